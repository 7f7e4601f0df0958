"""Checkers of the exercises in chapters/tensor_parallel."""
import torch
import torch.nn.functional as F

from ..exercise import Wrong
from ..grading import number, refuses, run
from ..grading_ranks import on_ranks

# width, heads, kv_heads, hidden, ranks
_BLOCKS = [(64, 4, 4, 128, 1), (64, 4, 4, 128, 4), (64, 8, 2, 96, 2), (64, 8, 2, 96, 4),
           (128, 8, 1, 64, 8), (4096, 32, 8, 14336, 16)]
_UNEVEN = [(64, 4, 2, 128, 8), (64, 4, 4, 130, 4), (96, 12, 3, 64, 4), (96, 12, 6, 64, 4)]


def _rank_parameters(answer):
    for case in _BLOCKS:
        width, heads, kv_heads, hidden, ranks = case
        kv = width // heads * max(1, kv_heads // ranks)
        want = (2 * width * width + 3 * width * hidden) // ranks + 2 * width * kv + 2 * width
        call = f"rank_parameters{case}"
        got = number(call, run(call, answer, *case))
        if got != want:
            raise Wrong(f"{call}: expected {want}, got {got}")
    for case in _UNEVEN:
        refuses(f"rank_parameters{case}", answer, *case)


def _heads_of(answer):
    for ranks, heads, kv_heads in (1, 8, 4), (2, 8, 4), (4, 8, 4), (8, 8, 4), (8, 16, 2), (4, 4, 1):
        for rank in range(ranks):
            per = heads // ranks
            queries = list(range(rank * per, (rank + 1) * per))
            want = queries, sorted({q * kv_heads // heads for q in queries})
            call = f"heads_of({rank}, {ranks}, {heads}, {kv_heads})"
            got = run(call, answer, rank, ranks, heads, kv_heads)
            try:
                got = tuple(list(part) for part in got)
            except TypeError:
                raise Wrong(f"{call}: expected two lists, got {got!r:.60}") from None
            if got != want:
                raise Wrong(f"{call}: expected {want}, got {got}")


class _Ranks:
    """Collectives over a list of one tensor a rank, which count what is handed over."""

    def __init__(self, where, n):
        self.where, self.n, self.numbers, self.calls = where, n, 0, []

    def _take(self, name, tensors):
        tensors = list(tensors)
        if len(tensors) != self.n or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise Wrong(f"{self.where}: {name} takes a list of {self.n} tensors, one a rank")
        if len({t.shape for t in tensors}) > 1:
            raise Wrong(f"{self.where}: {name} needs the same shape on all ranks, "
                        f"got {[tuple(t.shape) for t in tensors]}")
        self.calls.append(name)
        return tensors

    def all_reduce(self, tensors, op="sum"):
        tensors = self._take("all_reduce", tensors)
        self.numbers += tensors[0].numel()
        whole = torch.stack(tensors)
        if op not in ("sum", "max"):
            raise Wrong(f"{self.where}: all_reduce knows 'sum' and 'max', not {op!r}")
        whole = (whole.sum(0) if op == "sum" else whole.amax(0)).detach()
        return [whole + (t - t.detach()) for t in tensors]  # a rank's graph knows its own part

    def all_gather(self, tensors):
        tensors = self._take("all_gather", tensors)
        whole = torch.cat(tensors)
        self.numbers += whole.numel()
        return [whole.clone() for _ in tensors]

    def reduce_scatter(self, tensors):
        tensors = self._take("reduce_scatter", tensors)
        self.numbers += tensors[0].numel()
        if len(tensors[0]) % self.n:
            raise Wrong(f"{self.where}: reduce_scatter cannot cut {len(tensors[0])} rows "
                        f"among {self.n} ranks")
        return [piece.clone() for piece in sum(tensors).chunk(self.n)]

    def require(self, *names):
        missing = [name for name in names if name not in self.calls]
        if self.n > 1 and missing:
            raise Wrong(f"{self.where}: {missing[0]} was not used; how did a rank learn of what "
                        "the others have?")


def _one_a_rank(where, got, wants):
    if not isinstance(got, (list, tuple)) or len(got) != len(wants):
        raise Wrong(f"{where}: expected a list of {len(wants)} tensors, one a rank")
    for rank, (g, want) in enumerate(zip(got, wants)):
        if not isinstance(g, torch.Tensor) or g.shape != want.shape:
            raise Wrong(f"{where}: rank {rank} should have shape {tuple(want.shape)}, got "
                        f"{tuple(getattr(g, 'shape', ()))}")
        if not torch.allclose(g, want, rtol=0, atol=1e-10):
            raise Wrong(f"{where}: rank {rank} is off by {(g - want).abs().max():.3g}")


def _draw(seed, *shapes):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=make, dtype=torch.float64) for s in shapes]


def _row_parallel(answer):
    for n in 1, 2, 4:
        where = f"{n} ranks"
        x, W, bias = _draw(n, (3, 8), (5, 8), (5,))
        group = _Ranks(where, n)
        bias.requires_grad_()
        got = run(where, answer, [p.clone() for p in x.chunk(n, 1)],
                  [p.clone() for p in W.chunk(n, 1)], bias, group.all_reduce)
        _one_a_rank(where, got, [x @ W.T + bias] * n)
        group.require("all_reduce")
        if group.numbers > 3 * 5:
            raise Wrong(f"{where}: {group.numbers} numbers were summed; {3 * 5} are enough")
        for rank, y in enumerate(got):
            grad = None
            if y.requires_grad:
                grad = torch.autograd.grad(y.sum(), bias, retain_graph=True, allow_unused=True)[0]
            if grad is None or not torch.allclose(grad, torch.full_like(bias, 3)):
                raise Wrong(f"{where}: on rank {rank} the gradient of the bias is not that of "
                            "one bias added once")


def _cross_entropy(answer):
    for n, scale, name in (1, 1, ""), (2, 1, ""), (4, 1, ""), (4, 2000, ", logits in thousands"):
        where = f"{n} ranks{name}"
        (logits,) = _draw(n, (6, 12))
        logits, targets = scale * logits, torch.tensor([0, 3, 5, 6, 9, 11])
        group = _Ranks(where, n)
        got = number(where, run(where, answer, [p.clone() for p in logits.chunk(n, 1)],
                                targets, group.all_reduce))
        want = F.cross_entropy(logits, targets).item()
        if not abs(got - want) <= 1e-9 * max(1, abs(want)):
            raise Wrong(f"{where}: expected {want:.6g}, got {got:.6g}")
        if group.numbers > 3 * 6:
            raise Wrong(f"{where}: {group.numbers} numbers were sent to all-reduces for 6 tokens; "
                        "3 a token are enough")
        group.require("all_reduce")
        if scale > 1 and group.numbers <= 2 * 6:  # a maximum and a sum for each token, no target
            raise Wrong(f"{where}: only {group.numbers} numbers were sent for 6 tokens; how did a "
                        "rank learn of the target's logit on another?")


def _sequence_mlp(answer):
    for n in 1, 2, 4:
        where = f"{n} ranks"
        x, up, down = _draw(n, (8, 3), (3, 8), (8, 3))
        group = _Ranks(where, n)
        got = run(where, answer, [p.clone() for p in x.chunk(n)],
                  [p.clone() for p in up.chunk(n, 1)], [p.clone() for p in down.chunk(n)],
                  group.all_gather, group.reduce_scatter)
        _one_a_rank(where, got, (F.gelu(x @ up) @ down).chunk(n))
        group.require("all_gather", "reduce_scatter")
        if group.numbers > 2 * 8 * 3:
            raise Wrong(f"{where}: the buffers of all collectives had {group.numbers} numbers; "
                        f"{2 * 8 * 3} are enough")


_PAIR = """
from companion.wire import recorded
report = []
for tokens in 3, 8:
    draw = torch.Generator().manual_seed(tokens)
    d, hidden = 4, 6 * world_size
    whole = [torch.randn(*s, generator=draw, dtype=torch.float64, requires_grad=True)
             for s in ((tokens, d), (d, hidden), (hidden, d))]
    x, up, down = whole
    grad = torch.randn(tokens, d, generator=draw, dtype=torch.float64)
    want = F.gelu(x @ up) @ down
    want.backward(grad)
    parts = [x, up.chunk(world_size, 1)[rank], down.chunk(world_size, 0)[rank]]
    mine = [p.detach().clone().requires_grad_() for p in parts]
    with recorded() as calls:
        y = answer(*mine)
        y.backward(grad)
    grads = [x.grad, up.grad.chunk(world_size, 1)[rank], down.grad.chunk(world_size, 0)[rank]]
    pairs = [(y, want)] + [(p.grad, g) for p, g in zip(mine, grads)]
    off = [float("inf") if a is None or a.shape != b.shape else (a - b).abs().max().item()
           for a, b in pairs]
    report.append((tokens, off, sum(c.bytes for c in calls) // 8, 2 * tokens * d))
"""


def _pair(answer):
    names = "the output", "the gradient of x", "the gradient of up", "the gradient of down"
    n = 2
    for rank, report in enumerate(on_ranks(f"{n} ranks", answer, n, _PAIR)):
        for tokens, off, numbers, most in report:
            where = f"{n} ranks, {tokens} tokens, rank {rank}"
            for name, value in zip(names, off):
                if not value < 1e-10:
                    raise Wrong(f"{where}: {name} is off by {value:.3g}")
            if numbers > most:
                raise Wrong(f"{where}: the buffers of all collectives, forward and backward, had "
                            f"{numbers} numbers; {most} are enough")


# gradients of the ranks, on how many ranks each is held, and the norm that one process has
_NORMS = {"one cut weight": ([[3.0], [4.0]], [1], 5.0),
          "one whole weight": ([[2.0], [2.0]], [2], 2.0),
          "one cut, one whole": ([[6.0, 2.0], [3.0, 2.0]], [1, 2], 7.0),
          "zeros": ([[0.0], [0.0]], [1], 0.0),
          "two numbers in a weight": ([[[2.0, -1.0]], [[2.0, 4.0]]], [1], 5.0)}
_NORM = """
from companion.wire import recorded
report = []
for name, (values, copies, want) in cases.items():
    grads = [torch.tensor(v, dtype=torch.float64) for v in values[rank]]
    with recorded() as calls:
        got = answer(grads, copies)
    got = got.item() if isinstance(got, torch.Tensor) and got.numel() == 1 else got
    kept = [g.tolist() for g in grads] == values[rank]
    report.append((name, got, want, kept, sum(c.bytes for c in calls)))
"""


def _grad_norm(answer):
    for rank, report in enumerate(on_ranks("2 ranks", answer, 2, _NORM, cases=_NORMS)):
        for name, got, want, kept, sent in report:
            where = f"{name}, rank {rank}"
            if not abs(number(where, got) - want) < 1e-9:
                raise Wrong(f"{where}: expected {want:.6g}, got {got:.6g}")
            if not kept:
                raise Wrong(f"{where}: the gradients were changed")
            if sent > 8:
                raise Wrong(f"{where}: {sent} bytes were summed over ranks; 8, one number, are "
                            "enough")


CHECKS = {
    "tensor_parallel-1": _rank_parameters,
    "tensor_parallel-2": _heads_of,
    "tensor_parallel-3": _row_parallel,
    "tensor_parallel-4": _cross_entropy,
    "tensor_parallel-5": _sequence_mlp,
    "tensor_parallel-6": _grad_norm,
    "tensor_parallel-7": _pair,
}
