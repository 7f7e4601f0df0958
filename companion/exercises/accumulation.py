"""Checkers of the exercises in chapters/accumulation."""
import bisect
import math
import random
import weakref

from ..exercise import Wrong
from ..grading import refuses, run


def _factors(answer):
    cases = [[10, 100], [5], [4, 4, 4, 4], [0, 3, 0, 1], [0, 0], [7, 0], [1, 1000, 31]]
    for counts in cases:
        want = [c / max(sum(counts), 1) for c in counts]
        call = f"factors({counts})"
        got = run(call, answer, list(counts))
        try:
            got = [float(x) for x in got]
        except (TypeError, ValueError):
            raise Wrong(f"{call}: expected a list of numbers, got {got!r}") from None
        close = len(got) == len(want) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(got, want))
        if not close:
            raise Wrong(f"{call}: expected {want}, got {got}")


def _fewest(parameters, each, batch, budget):
    for k in range(1, batch + 1):
        forward = (12 if k == 1 else 16) * parameters + -(-batch // k) * each
        if max(forward, 16 * parameters) <= budget:
            return k
    return 0


def _fewest_pieces(answer):
    # name: (parameters, bytes an example, batch, budget)
    cases = {
        "all fits at once": (1000, 100, 64, 22_400),
        "met exactly with one piece": (1000, 100, 64, 18_400),
        "A below 4P: the optimizer's step is the peak": (1000, 10, 64, 15_999),
        "A = 6P: two pieces need more than one": (1000, 100, 60, 17_999),
        "met exactly with four": (1000, 1000, 64, 32_000),
        "a batch that four does not divide": (1000, 1000, 66, 32_600),
        "one example each": (1000, 1000, 64, 17_000),
        "one example does not fit": (1000, 1000, 64, 16_999),
        "the states do not fit": (1000, 1, 2, 15_000),
    }
    for name, case in cases.items():
        got, want = run(f"{name}, fewest_pieces{case}", answer, *case), _fewest(*case)
        if isinstance(got, bool) or got != want:
            raise Wrong(f"{name}, fewest_pieces{case}: expected {want}, got {got!r}")


def _token_weights(answer):
    import torch
    for sizes in [10, 100], [5, 5, 5], [1, 0, 9], [0, 0, 4], [3], [2, 7, 0, 31]:
        used, total = sum(n > 0 for n in sizes), sum(sizes)
        got = run(f"pieces of {sizes} tokens", answer, [torch.arange(float(n)) for n in sizes])
        try:
            got = [torch.as_tensor(g) for g in got]
        except (TypeError, ValueError, RuntimeError):
            raise Wrong(f"pieces of {sizes} tokens: expected a list of tensors, got {got!r}"[:200]) from None
        if [list(g.shape) for g in got] != [[n] for n in sizes]:
            raise Wrong(f"pieces of {sizes} tokens: the weights have shapes {[list(g.shape) for g in got]}")
        for j, n in enumerate(sizes):
            want = total / (used * n) if n else 0
            if n and not torch.allclose(got[j].double(), torch.full((n,), want).double(), rtol=1e-5):
                raise Wrong(f"pieces of {sizes} tokens: a token of piece {j} should weigh {want:.6g}, "
                            f"got {got[j][0].item():.6g}")


def _watched_model(torch):
    """A small network that knows how many of its graphs are alive and not used yet."""
    class Token:
        pass

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            model.graphs.append(weakref.ref(ctx.token))
            model.used.append(False)
            ctx.number = len(model.used) - 1
            model.held = max(model.held, model.waiting())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            model.used[ctx.number] = True
            return grad

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(),
                                            torch.nn.Linear(12, 5)).double()
            self.frozen = torch.nn.Parameter(torch.ones(5).double(), requires_grad=False)
            self.graphs, self.used, self.largest, self.held = [], [], 0, 0

        def forward(self, x):
            self.largest = max(self.largest, len(x))
            y = self.body(x) * self.frozen
            return Watch.apply(y) if torch.is_grad_enabled() else y

        def waiting(self):
            return sum(ref() is not None and not used for ref, used in zip(self.graphs, self.used))

    model = Watched()
    return model


def _reference(torch, model, pieces):
    """(mean, gradients) over all targets at once; None where there is no target."""
    x = torch.cat([x for x, _ in pieces]) if pieces else torch.zeros(0, 6).double()
    y = torch.cat([y for _, y in pieces]) if pieces else torch.zeros(0, dtype=torch.long)
    if not (y != -100).any():
        return 0.0, None
    loss = torch.nn.functional.cross_entropy(model.body(x) * model.frozen, y)
    return loss.item(), torch.autograd.grad(loss, list(model.body.parameters()))


def _split_cases(torch):
    draw = torch.Generator().manual_seed(0)

    def piece(n, ignored=0.0):
        y = torch.randint(5, (n,), generator=draw)
        y[torch.rand(n, generator=draw) < ignored] = -100
        return torch.randn(n, 6, generator=draw, dtype=torch.float64), y

    yield "one piece of 8", [piece(8)]
    yield "four equal pieces", [piece(8) for _ in range(4)]
    yield "pieces of 1 and 20", [piece(1), piece(20)]
    yield "a third of labels ignored", [piece(n, 1 / 3) for n in (12, 12, 12)]
    yield "an empty piece", [piece(5), piece(0), piece(7)]
    yield "all labels of one piece ignored", [piece(5), piece(6, 1.0), piece(3)]
    yield "the last piece ignored", [piece(5), piece(6, 1.0)]
    yield "no targets at all", [piece(4, 1.0), piece(0)]
    yield "an empty stream", []
    for number in range(30):
        sizes = torch.randint(0, 12, (int(torch.randint(1, 7, (1,), generator=draw)),), generator=draw)
        shares = torch.randint(0, 4, (len(sizes),), generator=draw) / 3
        pieces = [piece(n, s) for n, s in zip(sizes.tolist(), shares.tolist())]
        counts = [int((y != -100).sum()) for _, y in pieces]
        yield f"random split {number}: {sizes.tolist()} rows with {counts} targets", pieces


class _Stream:
    """Copies of pieces, once; knows how many of their inputs its reader kept alive."""

    def __init__(self, pieces):
        self.pieces, self.inputs, self.kept = pieces, [], 0

    def __iter__(self):
        for x, y in self.pieces:
            self.kept = max(self.kept, sum(ref() is not None for ref in self.inputs))
            x = x.clone()
            self.inputs.append(weakref.ref(x))
            piece = x, y.clone()
            del x
            yield piece
            del piece


def _accumulate_stream(answer):
    import torch
    for name, pieces in _split_cases(torch):
        model = _watched_model(torch)
        want, gradients = _reference(torch, model, pieces)
        for p in model.body.parameters():
            p.grad = torch.full_like(p, 7.0)  # left over

        stream = _Stream(pieces)
        got = run(name, answer, model, iter(stream))
        if model.held > 1:
            raise Wrong(f"{name}: the graphs of {model.held} pieces are held at once")
        if isinstance(got, torch.Tensor) and got.numel() == 1:
            got = got.item()
        if isinstance(got, bool) or not isinstance(got, (int, float)):
            raise Wrong(f"{name}: expected the mean loss as a float, got {got!r}"[:200])
        if not abs(got - want) < 1e-9:
            raise Wrong(f"{name}: the mean loss is {want:.6f}, got {got:.6f}")
        for (label, p), g in zip(model.body.named_parameters(), gradients or [None] * 9):
            if g is None:
                if p.grad is not None and (p.grad != 0).any():
                    raise Wrong(f"{name}: without targets .grad should be None or zero, {label}'s is not")
                continue
            if p.grad is None:
                raise Wrong(f"{name}: {label}.grad is None")
            gap = ((p.grad - g).norm() / g.norm()).item()
            if not gap < 1e-9:
                raise Wrong(f"{name}: the gradient of {label} is off by {gap:.2g} of its norm")
        largest = max((len(y) for _, y in pieces), default=0)
        if model.largest > largest:
            raise Wrong(f"{name}: the model ran {model.largest} rows at once, "
                        f"the largest piece has {largest}")
        if stream.kept > 1:  # the loop's own variables hold the last one
            raise Wrong(f"{name}: {stream.kept} pieces are kept while the next one is read")


def _packed_stream(lengths, row, open_rows):
    """The rule, with a sorted list in place of a search."""
    rows, state = [], []  # state: (room, row), sorted
    for i, n in enumerate(lengths):
        at = bisect.bisect_left(state, (n, -1))
        if at == len(state):
            if len(state) == open_rows:
                state.pop(0)
            state.append((row, len(rows)))
            rows.append([])
            at = len(state) - 1
        room, r = state.pop(at)
        rows[r].append(i)
        bisect.insort(state, (room - n, r))
    return rows


def _pack_stream(answer):
    draw = random.Random(0)
    cases = {
        "no documents": ([], 10, 2),
        "one open row": ([6, 6, 4, 4], 10, 1),
        "exactly full": ([4, 6, 10, 1], 10, 2),
        "the least room": ([5, 7, 3, 5], 10, 3),
        "a tie goes to the oldest": ([6, 6, 2, 2], 10, 2),
        "the fullest is closed": ([6, 7, 9, 4, 3], 10, 2),
        "the oldest of equally full is closed": ([7, 7, 9, 3], 10, 2),
        "more open rows than needed": ([3, 3, 3], 10, 50),
    }
    for number in range(20):
        lengths = [draw.randint(1, 20) for _ in range(draw.randint(1, 60))]
        cases[f"random stream {number}"] = (lengths, 20, draw.randint(1, 5))
    for name, (lengths, row, open_rows) in cases.items():
        call = f"{name}, pack_stream({lengths}, {row}, {open_rows})"
        got = run(call, answer, list(lengths), row, open_rows)
        want = _packed_stream(lengths, row, open_rows)
        try:
            got = [[int(i) for i in r] for r in got]
        except (TypeError, ValueError):
            raise Wrong(f"{call}: expected a list of lists, got {got!r}"[:300]) from None
        if got != want:
            raise Wrong(f"{call}: expected {want}, got {got}")
    refuses("a document of 11 in rows of 10", answer, [3, 11], 10, 2)
    refuses("an empty document", answer, [3, 0], 10, 2)
    refuses("open_rows = 0", answer, [3], 10, 0)


def _packed_rows(torch, rows, length):
    inputs, labels, ids = [], [], []
    for row in rows:
        tokens = [t for d in row for t in d.tolist()]
        after = [t for d in row for t in [*d.tolist()[1:], *[-100] * (len(d) > 0)]]
        numbers = [i for i, d in enumerate(row) for _ in d]
        pads = length - len(tokens)
        inputs.append(tokens + [0] * pads)
        labels.append(after + [-100] * pads)
        ids.append(numbers + [-1] * pads)
    return [torch.tensor(t, dtype=torch.long).view(len(rows), length) for t in (inputs, labels, ids)]


def _packed_tensors(answer):
    import torch
    draw = torch.Generator().manual_seed(0)

    def text(n):
        return torch.randint(1, 100, (n,), generator=draw)

    cases = {
        "one document that fills its row": ([[text(6)]], 6),
        "one document and padding": ([[text(4)]], 6),
        "two documents": ([[text(3), text(3)]], 8),
        "a document of one token": ([[text(1), text(3)]], 6),
        "one token fills the row": ([[text(1)]], 1),
        "an empty document": ([[text(2), text(0), text(2)]], 6),
        "a row without documents": ([[text(2)], []], 4),
        "no rows": ([], 4),
    }
    for number in range(10):
        sizes = torch.randint(1, 6, (3, 3), generator=draw).tolist()
        cases[f"random rows of {sizes}"] = ([[text(n) for n in row] for row in sizes], 16)
    for name, (rows, length) in cases.items():
        got = run(name, answer, rows, length)
        if not isinstance(got, (tuple, list)) or len(got) != 3:
            raise Wrong(f"{name}: expected inputs, labels and documents, got {got!r}"[:200])
        for what, mine, want in zip(("inputs", "labels", "documents"), got, _packed_rows(torch, rows, length)):
            if not isinstance(mine, torch.Tensor) or mine.shape != want.shape or mine.dtype != torch.long:
                seen = f"{mine.dtype} of {list(mine.shape)}" if isinstance(mine, torch.Tensor) else repr(mine)
                raise Wrong(f"{name}: {what} should be int64 of shape {list(want.shape)}, got {seen}"[:200])
            if not torch.equal(mine, want):
                raise Wrong(f"{name}: {what} should be {want.tolist()}, got {mine.tolist()}")
    refuses("5 tokens in a row of length 4", answer, [[text(3), text(2)]], 4)


CHECKS = {
    "accumulation-1": _factors,
    "accumulation-2": _fewest_pieces,
    "accumulation-3": _token_weights,
    "accumulation-4": _accumulate_stream,
    "accumulation-5": _pack_stream,
    "accumulation-6": _packed_tensors,
}
