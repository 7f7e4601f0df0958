"""Checkers of the exercises in chapters/data_parallel."""
import math

import torch

from ..exercise import Wrong
from ..grading import number, refuses, run
from ..grading_ranks import on_ranks


def _held_bytes(answer):
    for sizes, n in ([64], 4), ([10, 7, 3], 4), ([5], 1), ([1, 1, 1], 8), ([7 * 10**9], 8):
        for stage in range(4):
            whole, part = sum(sizes), sum(-(-s // n) for s in sizes)
            want = (2 * (part if stage == 3 else whole) + 2 * (part if stage >= 2 else whole)
                    + 12 * (part if stage >= 1 else whole))
            call = f"held_bytes({sizes}, {n}, {stage})"
            got = number(call, run(call, answer, sizes, n, stage))
            if got != want:
                raise Wrong(f"{call}: expected {want}, got {got}")
    for stage in 4, -1:
        refuses(f"held_bytes([64], 4, {stage})", answer, [64], 4, stage)


def _step_bytes(answer):
    for n, size, k in (8, 1600, 1), (8, 1600, 4), (1, 64, 2), (3, 300, 3):
        times = {"ddp": 2 * k, "ddp no_sync": 2, "zero-1": 2, "zero-2": k + 1, "zero-3": 3 * k,
                 "fsdp kept": 2 * k}
        for form, factor in times.items():
            call = f"step_bytes({form!r}, {size}, {n}, {k})"
            got = number(call, run(call, answer, form, size, n, k))
            want = factor * size * (n - 1) / n
            if not math.isclose(got, want):
                raise Wrong(f"{call}: expected {want:g}, got {got:g}")
    refuses("step_bytes('zero-4', 64, 2, 1)", answer, "zero-4", 64, 2, 1)


# ---------------------------------------------------------------- ZeRO-1 on simulated ranks

def _zero_step(answer):
    for n in 1, 2, 3, 4:
        for length in n, 2 * n + 1, 17:
            _one_step(answer, n, length)


def _one_step(answer, n, length):
    where = f"{n} rank{'s' * (n > 1)}, {length} parameter{'s' * (length > 1)}"
    draw = torch.Generator().manual_seed(length)
    part = -(-length // n)
    start = torch.randn(length, generator=draw, dtype=torch.float64)
    gradients = [torch.randn(length, generator=draw, dtype=torch.float64) for _ in range(n)]
    old = torch.zeros(n * part, dtype=torch.float64)
    old[:length] = torch.randn(length, generator=draw, dtype=torch.float64)
    weights, momenta = [start.clone() for _ in range(n)], [m.clone() for m in old.chunk(n)]
    calls = []

    def tensors(name, given, size):
        calls.append(name)
        if calls.count(name) > 1:
            raise Wrong(f"{where}: {name} was called twice")
        good = isinstance(given, (list, tuple)) and len(given) == n and all(
            isinstance(t, torch.Tensor) and tuple(t.shape) == (size,) for t in given)
        if not good:
            raise Wrong(f"{where}: {name} takes {n} tensors of length {size}")
        return [t.detach().clone() for t in given]

    def reduce_scatter(given):
        return [c.clone() for c in sum(tensors("reduce_scatter", given, n * part)).chunk(n)]

    def all_gather(given):
        whole = torch.cat(tensors("all_gather", given, part))
        return [whole.clone() for _ in range(n)]

    run(where, answer, weights, [g.clone() for g in gradients], momenta, 0.1, reduce_scatter,
        all_gather)
    m = 0.9 * old[:length] + sum(gradients) / n
    want = start - 0.1 * m
    for r in range(n):
        if tuple(momenta[r].shape) != (part,):
            raise Wrong(f"{where}: rank {r} must keep {part} numbers of momentum")
        mine = m[r * part:(r + 1) * part]
        if not torch.allclose(momenta[r][:len(mine)], mine):
            raise Wrong(f"{where}: rank {r} has another momentum than one process")
        if weights[r].shape != want.shape or not torch.allclose(weights[r], want):
            raise Wrong(f"{where}: rank {r} has other weights than one process")
    if n > 1 and set(calls) != {"reduce_scatter", "all_gather"}:
        raise Wrong(f"{where}: both collectives are needed, {calls or 'none'} called")


# ---------------------------------------------------------------- on real ranks

_UNEQUAL = """
from companion.wire import recorded
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
draw = torch.Generator().manual_seed(1)
xs = [torch.randn(c, 3, generator=draw, dtype=torch.float64) for c in counts]
own = list(model.parameters())
want = torch.autograd.grad(sum(model(x).square().sum() for x in xs) / sum(counts), own)
if counts[rank]:
    model(xs[rank]).square().sum().backward()
with recorded() as calls:
    answer(own, counts[rank])
missing = any(p.grad is None for p in own)
off = 1.0
if not missing:
    off = torch.cat([(p.grad - w).flatten() for p, w in zip(own, want)]).abs().max().item()
report = missing, off, [(c.name, c.bytes) for c in calls], sum(p.nbytes for p in own)
"""


def _synchronize(answer):
    for counts in [2, 2, 2], [3, 5, 0]:
        where = "{} ranks with {}, {} and {} targets".format(3, *counts)
        reports = on_ranks(where, answer, 3, _UNEQUAL, counts=counts)
        for r, (missing, off, calls, size) in enumerate(reports):
            if missing or not off < 1e-12:  # nan too
                what = "is None" if missing else f"is off by {off:.1e}"
                raise Wrong(f"{where}: a gradient of rank {r} {what}")
            sent = sum(b for _, b in calls)
            if {name for name, _ in calls} != {"all_reduce"} or len(calls) > 2 or sent > size + 8:
                names = ", ".join(name for name, _ in calls)
                raise Wrong(f"{where}: rank {r} called {names} with {sent} bytes; at most two "
                            f"all-reduces with {size + 8} bytes")


_LINEAR = """
from companion.counting import saved_tensors, storage_bytes
from companion.wire import recorded
draw = torch.Generator().manual_seed(3)
w, dy = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((6, 5), (4, 6)))
xs = [torch.randn(4, 5, generator=draw, dtype=torch.float64) for _ in range(2)]
x, shard = xs[rank].clone().requires_grad_(), w.chunk(2)[rank].clone().requires_grad_()
kept = []
with recorded() as calls:
    kept = saved_tensors(lambda: kept.append(answer(x, shard)) or kept, but=[x, shard]), *kept
    before = len(calls)
    extra, y = storage_bytes(kept[0]), kept[1]
    is_tensor = isinstance(y, torch.Tensor) and y.requires_grad
    if is_tensor and y.shape == dy.shape:
        y.backward(dy)


def off(got, want):
    if not isinstance(got, torch.Tensor):
        return f"is a {type(got).__name__}" if got is not None else "is None"
    if got.shape != want.shape:
        return f"is {list(got.shape)}, expected {list(want.shape)}"
    return "" if torch.allclose(got, want) else "is not what one process has"


names = [c.name for c in calls]
found = {"the output": off(y, xs[rank] @ w.T), "x.grad": off(x.grad, dy @ w),
         "shard.grad": off(shard.grad, (dy.T @ sum(xs)).chunk(2)[rank])}
report = found, names[:before], names[before:], extra
"""


def _sharded_linear(answer):
    where = "2 ranks, weight 6 x 5"
    for r, (found, before, after, extra) in enumerate(on_ranks(where, answer, 2, _LINEAR)):
        for what, off in found.items():
            if off:
                raise Wrong(f"{where}: {what} of rank {r} {off}")
        if before != ["all_gather"] or sorted(after) != ["all_gather", "reduce_scatter"]:
            raise Wrong(f"{where}: rank {r} called {before} in forward and {after} in backward; "
                        "expected one all_gather, then one more and a reduce_scatter")
        if extra:
            raise Wrong(f"{where}: rank {r} keeps {extra} bytes for backward besides x and shard")


CHECKS = {
    "data_parallel-1": _held_bytes,
    "data_parallel-2": _step_bytes,
    "data_parallel-3": _zero_step,
    "data_parallel-4": _synchronize,
    "data_parallel-5": _sharded_linear,
}
