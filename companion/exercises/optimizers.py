"""Checkers of the exercises in chapters/optimizers."""
import threading

from ..exercise import Wrong
from ..grading import number, refuses, run


def _state_from_shapes(answer):
    cases = [("one matrix", [(512, 256)]), ("a vector", [(7,)]), ("a scalar", [()]),
             ("a 4-D kernel", [(8, 3, 5, 4)]), ("nothing", []),
             ("a decoder's", [(96, 64), (64, 64), (64,), (2, 3, 4)])]

    def want(shapes, name):
        total = 0
        for shape in shapes:
            n = 1
            for size in shape:
                n *= size
            if name == "adafactor":
                total += 4 * (n // shape[-1] + n // shape[-2] if len(shape) > 1 else n)
            elif name == "muon":
                total += n * (4 if len(shape) == 2 else 8)
            else:
                total += n * {"sgd": 0, "momentum": 4, "lion": 4, "adamw": 8}[name]
        return total

    for what, shapes in cases:
        for name in "sgd", "momentum", "adamw", "lion", "adafactor", "muon":
            call = f"{what}, state_from_shapes({shapes}, {name!r})"
            got, expected = number(call, run(call, answer, shapes, name)), want(shapes, name)
            if got != expected:
                raise Wrong(f"{call}: expected {expected:,}, got {got:,}")
    for shapes in [(2, 2)], []:
        refuses(f"{shapes}, 'adamm'", answer, shapes, "adamm")


def _lion_step(answer):
    import torch
    from ..counting import Film

    cases = [("plain", (64, 32), 1e-2, (0.9, 0.99), 0.0),
             ("with decay", (64, 32), 1e-2, (0.9, 0.99), 0.3),
             ("a vector", (5,), 0.1, (0.5, 0.8), 0.1), ("no memory", (64,), 0.1, (0.0, 0.0), 0.5)]
    for name, shape, lr, betas, decay in cases:
        draw = torch.Generator().manual_seed(0)
        w, m = (torch.randn(shape, generator=draw) for _ in "wm")
        want_w, want_m = w.clone(), m.clone()
        call = f"{name}, shape {list(shape)}, lr {lr}, betas {betas}, decay {decay}"
        for step in range(3):
            g = torch.randn(shape, generator=draw)
            kept, before = g.clone(), (w.clone(), m.clone())
            film = Film(held=[w, g, m])
            with film:
                run(call, answer, w, g, m, lr, betas, decay)
            d = torch.sign(betas[0] * want_m + (1 - betas[0]) * g)
            want_w = (1 - lr * decay) * want_w - lr * d
            want_m = betas[1] * want_m + (1 - betas[1]) * g
            if not torch.equal(g, kept):
                raise Wrong(f"{call}: the gradient was changed")
            for name_of, got, old, want in zip("wm", (w, m), before, (want_w, want_m)):
                if torch.equal(got, old):
                    raise Wrong(f"{call}: {name_of} was not changed; change it in place")
                gap = (got - want).abs().max()
                if not gap < 1e-5:
                    raise Wrong(f"{call}: {name_of} is off by {gap:.2g} after step {step + 1}")
            new = max(film.frames().get("temporaries", [0]))
            if new > 1.5 * w.nbytes:
                raise Wrong(f"{call}: {new / w.nbytes:.1f} new tensors of the size of w at once; "
                            "one is enough")


def _tensors(tree):
    import torch
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [t for part in tree for t in _tensors(part)]


def _small_adam(answer):
    import torch
    from ..counting import storage_bytes

    # name, n, spread of the gradients' sizes within a block (sd of the log), steps, growth
    for name, n, spread, steps, growth in [
            ("equal sizes", 512, 0.0, 40, 1), ("sizes that differ", 1024, 0.4, 40, 1),
            ("one block", 256, 0.4, 3, 1),
            ("gradients that grow tenfold after step 20", 256, 0.4, 40, 10)]:
        draw = torch.Generator().manual_seed(1)
        sizes = torch.exp(spread * torch.randn(n, generator=draw))
        drift = torch.randn(n, generator=draw)
        state, m, v = {}, torch.zeros(n), torch.zeros(n)
        call = f"{name}, {n} numbers"
        for t in range(1, steps + 1):
            g = sizes * (drift + torch.randn(n, generator=draw)) * (growth if t > 20 else 1)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            want = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            got = run(call, answer, g.clone(), state, t)
            if not isinstance(got, torch.Tensor) or got.shape != want.shape:
                raise Wrong(f"{call}, step {t}: expected a tensor of shape [{n}], "
                            f"got {got!r:.60}")
            error = ((got - want).norm() / want.norm()).item()
            if not error < 0.08:
                raise Wrong(f"{call}, step {t}: off by {100 * error:.3g} % of exact Adam's "
                            "direction; 8 are allowed")
            held = storage_bytes(_tensors(state))
            if held > 2.1 * n:
                raise Wrong(f"{call}, step {t}: the state holds {held / n:.2f} bytes per number; "
                            "2.1 are allowed")


def _step_in_backward(answer):
    import torch
    from torch import nn

    class Net(nn.Module):
        """Three layers, the first of them used twice; one parameter is frozen."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in "abc")
            self.d = nn.Linear(16, 16, bias=False)
            self.d.weight = self.b.weight
            self.c.bias.requires_grad_(False)

        def forward(self, x):
            return self.c(self.d(self.a(self.b(self.a(x)).relu()).relu()))

    def make(ps):
        return torch.optim.AdamW(ps, lr=0.01)

    usual, early, most = Net(), Net(), [0]
    optimizer = make([p for p in usual.parameters() if p.requires_grad])

    def watch(p):
        """Runs before the answer's hooks."""
        most[0] = max(most[0], sum(q.grad is not None for q in early.parameters()))

    trained = [p for p in early.parameters() if p.requires_grad]
    for p in trained:
        p.register_post_accumulate_grad_hook(watch)
    call = "a tied, a reused and a frozen parameter"
    got = run(call, answer, early, make)
    if not isinstance(got, (list, tuple)) or len(got) != len(trained):
        seen = len(got) if isinstance(got, (list, tuple)) else f"{got!r:.60}"
        raise Wrong(f"{call}: expected {len(trained)} optimizers, one a trained parameter, "
                    f"got {seen}")
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 16, generator=draw)
        optimizer.zero_grad()
        usual(x).square().mean().backward()
        optimizer.step()
        run(call, lambda: early(x).square().mean().backward())
        pairs = zip(usual.parameters(), early.parameters())
        gap = max((p - q).abs().max().item() for p, q in pairs)
        if not gap < 1e-7:
            raise Wrong(f"{call}: after step {step + 1} weights differ from the usual loop's "
                        f"by {gap:.2g}")
        left = sum(p.grad is not None for p in early.parameters())
        if left:
            raise Wrong(f"{call}: {left} gradients are left after backward; "
                        "free each once it is used")
    if most[0] > 1:
        raise Wrong(f"{call}: {most[0]} gradients were alive at once; one is enough")


def _ranks(answer, shards):
    """Run ``answer`` on every shard in a thread of its own: (results, numbers sent a rank)."""
    n, sent = len(shards), [0] * len(shards)
    barrier, slots, results, errors = threading.Barrier(n), [None] * n, [None] * n, []

    def on(rank):
        def all_reduce(t):
            sent[rank] += t.numel()
            slots[rank] = t.clone()
            barrier.wait(timeout=5)
            total = sum(slots[1:], start=slots[0].clone())
            barrier.wait(timeout=5)
            return total

        try:
            results[rank] = answer(shards[rank].clone(), all_reduce)
        except threading.BrokenBarrierError:
            errors.append(Wrong("the ranks call all_reduce a different number of times"))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=on, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # the one that came first; broken barriers follow from it
        raise errors[0]
    return results, max(sent)


def _muon_rows(answer):
    import torch

    for name, R, C, ranks in [("two ranks", 48, 16, 2), ("four ranks", 64, 16, 4),
                              ("one rank", 20, 8, 1),
                              ("uneven rows", 33, 12, 3), ("one column", 12, 1, 3),
                              ("fewer rows than columns on a rank", 40, 24, 4)]:
        G = torch.randn(R, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
        U, S, Vt = torch.linalg.svd(G, full_matrices=False)
        S = S / S.norm()
        for _ in range(5):
            S = 3.4445 * S - 4.775 * S**3 + 2.0315 * S**5
        want, call = U * S @ Vt, f"{name}, {R} x {C}"
        shards = list(torch.tensor_split(G, ranks))
        got, sent = run(call, _ranks, answer, shards)
        for rank, (rows, part) in enumerate(zip(got, torch.tensor_split(want, ranks))):
            if not isinstance(rows, torch.Tensor) or rows.shape != part.shape:
                raise Wrong(f"{call}: rank {rank} must return its {list(part.shape)} rows, "
                            f"got {rows!r:.60}")
        gap = ((torch.cat(got) - want).norm() / want.norm()).item()
        if not gap < 1e-6:
            raise Wrong(f"{call}: off by {100 * gap:.2g} % of the whole matrix's result")
        if sent > C * C:
            raise Wrong(f"{call}: each rank sent {sent:,} numbers; {C * C:,} are enough")


CHECKS = {
    "optimizers-1": _state_from_shapes,
    "optimizers-2": _lion_step,
    "optimizers-3": _small_adam,
    "optimizers-4": _step_in_backward,
    "optimizers-5": _muon_rows,
}
