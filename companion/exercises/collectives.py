"""Checkers of the exercises in chapters/collectives."""
import math

import torch

from ..exercise import Wrong
from ..grading import number, refuses, run


def _bytes_sent(answer):
    factors = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}
    for n, size in (8, 2**30), (1, 64), (2, 64), (3, 300), (1024, 2**30):
        for name, factor in factors.items():
            call = f"bytes_sent({name!r}, {n}, {size})"
            got, want = number(call, run(call, answer, name, n, size)), factor * (n - 1) * size // n
            if got != want:
                raise Wrong(f"{call}: expected {want}, got {got}")
    refuses("bytes_sent('all-sum', 2, 64)", answer, "all-sum", 2, 64)


def _crossing(answer):
    for n in 1, 2, 3, 4, 5, 8, 9, 1000:
        for alpha, beta in (5e-6, 2e-11), (0.0, 1e-9), (1.0, 1.0):
            steps = 2 * math.ceil(math.log2(n)) if n > 1 else 0
            more = steps - 2 * (n - 1) / n
            want = (2 * (n - 1) - steps) * alpha / (more * beta) if more else math.inf
            call = f"crossing({n}, {alpha}, {beta})"
            got = number(call, run(call, answer, n, alpha, beta))
            if not (got == want or math.isclose(got, want, rel_tol=1e-6)):
                raise Wrong(f"{call}: expected {want:.6g}, got {got:.6g}")


def _all_reduce(answer):
    for n in 1, 2, 3, 4, 7:
        for length in n, 2 * n + 1, 1, 0, 100:
            _one_ring(answer, n, length)


def _one_ring(answer, n, length):
    where = f"{n} ranks, {length} numbers each"
    draw = torch.Generator().manual_seed(n + 100 * length)
    tensors = [torch.randint(-50, 50, (length,), generator=draw) for _ in range(n)]
    buffers = list(tensors)
    want, counts, numbers = sum(tensors), [0] * n, [0] * n

    def send(source, target, tensor):
        if not (0 <= source < n and target == (source + 1) % n):
            raise Wrong(f"{where}: rank {source} sent to rank {target}, "
                        "which is not its right neighbor")
        counts[source] += 1
        numbers[source] += tensor.numel()
        return tensor.clone()

    got = run(where, answer, buffers, send)
    for r, tensor in enumerate(tensors):
        if torch.equal(tensor, want):
            continue
        if _hold(want, buffers) or _hold(want, got):
            raise Wrong(f"{where}: the sum is in new tensors; write it into those of `buffers`")
        pairs = zip(tensor.tensor_split(n), want.tensor_split(n))
        right = [c for c, pair in enumerate(pairs) if torch.equal(*pair)]
        raise Wrong(f"{where}: rank {r} does not have the sum; of its chunks 0 to {n - 1}, "
                    f"{right or 'none'} are right")
    most = 2 * (n - 1) * -(-length // n)
    for r in range(n):
        if numbers[r] > most or counts[r] > 2 * (n - 1):
            raise Wrong(f"{where}: rank {r} sent {numbers[r]} numbers in {counts[r]} messages; "
                        f"at most {most} in {2 * (n - 1)}")
    if n > 1 and length and not any(counts):
        raise Wrong(f"{where}: nothing was sent, so how did the ranks learn the sum?")


def _hold(want, found):
    return isinstance(found, (list, tuple)) and len(found) > 0 and all(
        isinstance(x, torch.Tensor) and torch.equal(x, want) for x in found)


def _two_levels(answer):
    # One level alone first, so that the message tells which phase is wrong
    for case in ((1, 1, 1e9, 1e9, 1e9), (1, 8, 1e9, 450e9, 50e9), (16, 1, 1e9, 450e9, 50e9),
                 (2, 2, 100.0, 10.0, 1.0), (4, 8, 1e9, 450e9, 50e9)):
        nodes, per_node, size, inside, between = case
        want = 2 * (per_node - 1) / per_node * size / inside
        want += 2 * (nodes - 1) / nodes * size / per_node / between
        call = f"two_levels{case}"
        got = number(call, run(call, answer, *case))
        if not math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-15):
            raise Wrong(f"{call}: expected {want:.6g} s, got {got:.6g}")


def _stuck(answer):
    cases = {
        "all finish": ([["sum", "max"]] * 3, None),
        "nothing to do": ([[], []], None),
        "another order": ([["sum", "max"], ["max", "sum"]], (0, ["sum", "max"])),
        "one batch fewer": ([["sum"] * 3, ["sum"] * 2], (2, ["sum", None])),
        "they part later": ([list("abc"), list("abc"), list("abd")], (2, ["c", "c", "d"])),
        "one has nothing at all": ([["a"], [], ["a"]], (0, ["a", None, "a"])),
    }
    for name, (calls, want) in cases.items():
        got = run(f"{name}, stuck({calls})", answer, [list(c) for c in calls])
        if isinstance(got, (tuple, list)) and len(got) == 2 and isinstance(got[1], (tuple, list)):
            got = (got[0], list(got[1]))
        if got != want:
            raise Wrong(f"{name}, stuck({calls}): expected {want}, got {got!r}")


CHECKS = {
    "collectives-1": _bytes_sent,
    "collectives-2": _crossing,
    "collectives-3": _all_reduce,
    "collectives-4": _two_levels,
    "collectives-5": _stuck,
}
