"""Checkers of the exercises in chapters/profiling."""
import math

from ..exercise import Wrong
from ..grading import number, refuses, run


def _close(what, got, want, tolerance=1e-9):
    got = number(what, got)
    if not math.isclose(got, want, rel_tol=tolerance, abs_tol=1e-12):
        raise Wrong(f"{what}: expected {want:.6g}, got {got:.6g}")


def _utilization(answer):
    cases = [
        ("70B on 16 GPUs", (7e10, 2048 * 16 * 500, 13.5 * 3600, 16, 312e12)),
        ("1B on one GPU", (1e9, 1e6, 60, 1, 312e12)),
        ("a run at its peak", (1e9, 1e6, 6, 1, 1e15)),
        ("whole numbers", (10**9, 10**6, 100, 2, 10**15)),
    ]
    for name, case in cases:
        P, D, seconds, gpus, peak = case
        want = 6 * P * D / (seconds * gpus * peak)
        _close(f"{name}, utilization{case}", run(name, answer, *case), want)
    for i, name in enumerate(("parameters", "tokens", "seconds", "gpus", "peak")):
        for bad in 0, -1:
            case = [1e9, 1e6, 60, 1, 312e12]
            case[i] = bad
            refuses(f"{name} = {bad}", answer, *case)
    refuses("an MFU of 6", answer, 1e9, 1e6, 1, 1, 1e15)


def _covered(kernels):
    """Length of the union of intervals with whole ends, point by point: slow and plain."""
    return len({t for start, duration in kernels for t in range(start, start + duration)})


def _idle_share(answer):
    cases = {
        "one kernel": [(5, 10)],
        "a gap of half": [(0, 10), (30, 10)],
        "not in order": [(30, 10), (0, 10), (15, 5)],
        "two streams overlap": [(0, 10), (5, 10), (30, 10)],
        "a short kernel inside a long one": [(0, 100), (10, 5), (120, 20)],
        "touching": [(0, 10), (10, 10), (20, 10)],
        "it starts late": [(1000, 10), (1020, 20)],
        "the same start": [(0, 5), (0, 20), (40, 10)],
        "a kernel of no length in a gap": [(0, 10), (15, 0), (20, 10)],
    }
    for name, kernels in cases.items():
        given = list(kernels)
        got = run(f"{name}, {kernels}", answer, given)
        span = max(s + d for s, d in kernels) - min(s for s, _ in kernels)
        _close(f"{name}, {kernels}", got, 1 - _covered(kernels) / span)
        if given != kernels:
            raise Wrong(f"{name}: your function changed the list it was given")
    refuses("an empty trace", answer, [])


def _apart_and_fused(answer):
    import torch
    n = 1000
    a, b = torch.ones(n), torch.full((n,), 2.0)
    # name, function, inputs, bytes apart, bytes fused; 4 bytes an element where not said
    cases = [
        ("one operation", lambda x: x + 1, (a,), 8 * n, 8 * n),
        ("a chain of three", lambda x: ((x + 1) * 2).tanh(), (a,), 24 * n, 8 * n),
        ("two inputs", lambda x, y: (x * y).relu(), (a, b), 20 * n, 12 * n),
        ("one tensor given twice", lambda x, y: (x * y).relu(), (a, a), 20 * n, 8 * n),
        ("two results", lambda x: (x + 1, (x + 1) * 2), (a,), 24 * n, 12 * n),
        ("the same result twice", lambda x: (x + 1,) * 2, (a,), 8 * n, 8 * n),
        ("a broadcast input", lambda x, y: (x + y) * 2,
         (a.view(10, 100), b[:1].clone().expand(10, 100)), 16 * n + 4, 8 * n + 4),
        ("a result that is a view", lambda x: (x + 1, x.view(10, 100)), (a,), 8 * n, 8 * n),
        ("16 bits out", lambda x: (x + 1).bfloat16(), (a,), 14 * n, 6 * n),
    ]
    for name, function, inputs, apart, fused in cases:
        got = run(name, answer, function, *inputs)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{name}: expected two numbers of bytes, got {got!r:.60}")
        for which, mine, want in ("apart", got[0], apart), ("fused", got[1], fused):
            mine = number(f"{name}, {which}", mine)
            if mine != want:
                raise Wrong(f"{name}, {which}: expected {want:,} bytes, got {mine:,}")


class _Device:
    """An asynchronous device on a virtual clock.

    host: the host's time; free: when the queue is empty; both in seconds.
    """

    def __init__(self, name, call, first=0.0, queued=0.0, tick=1e-9, stall=0.0, every=0):
        self._name, self._call, self._first = name, call, first
        self._stall, self._every = stall, every
        self._host, self._free, self._busy, self._calls = 100.0, 100.0 + queued, 0.0, 0
        self.tick = tick

    def launch(self):
        self._calls += 1
        seconds = self._call + (self._first if self._calls == 1 else 0)
        if self._every and self._calls % self._every == 0:
            seconds += self._stall
        self._host += min(5e-6, self._call / 4)
        self._free = max(self._free, self._host) + seconds
        self._busy += seconds
        if self._busy > 20:
            raise Wrong(f"{self._name}: the device was busy for more than 20 s")
        if self._calls > 500_000:
            raise Wrong(f"{self._name}: more than 500,000 launches")

    def synchronize(self):
        self._host = max(self._host, self._free)

    def clock(self):
        self._host += 1e-7
        return math.floor(self._host / self.tick) * self.tick


def _seconds_per_call(answer):
    cases = [
        dict(name="a call of 10 ms", call=1e-2),
        dict(name="it compiles at first, 3 s", call=1e-2, first=3.0),
        dict(name="others left 4 s of work in the queue", call=2e-3, queued=4.0),
        dict(name="every 37th call stalls for 0.3 s", call=1e-2, stall=0.3, every=37),
        dict(name="the clock ticks in steps of 1 ms, a call takes less", call=3e-5, tick=1e-3),
        dict(name="a long call", call=0.5, first=1.0, tick=1e-6),
    ]
    for case in cases:
        name, want = case["name"], case["call"]
        got = number(name, run(name, answer, _Device(**case)))
        if not abs(got / want - 1) < 0.02:
            raise Wrong(f"{name}: expected {want:.3g} s, got {got:.3g}")


def _simulated(loads, computes, depth):
    """The pipeline in steps of one unit of time: slow and plain.

    The order within a moment: the device ends, the loader ends, batches move.
    """
    t, queue, in_hand, loading, left, done = 0, [], None, 0, None, 0
    next_load, busy = 0, 0
    computing = False
    n = len(loads)
    while done < n:
        moved = True
        while moved:
            moved = False
            if computing and left == 0:
                computing, done, moved = False, done + 1, True
            may_load = depth > 0 or (not computing and not queue)
            if in_hand is None and next_load < n and may_load and not loading:
                in_hand, loading, moved = next_load, loads[next_load] + 1, True
                next_load += 1
            if in_hand is not None and loading == 1 and len(queue) < max(depth, 1):
                queue.append(in_hand)
                in_hand, loading, moved = None, 0, True
            if not computing and queue:
                left, computing, moved = computes[queue.pop(0)], True, True
        if done == n:
            break
        t += 1
        busy += computing
        left = left - 1 if computing else left
        loading = max(1, loading - 1) if in_hand is not None else 0
    return t, t - busy


def _pipeline(answer):
    cases = [
        ("no batches", [], [], 2),
        ("one batch", [3], [5], 2),
        ("no thread", [10] * 4, [20] * 4, 0),
        ("computing is longer", [10] * 6, [20] * 6, 2),
        ("loading is longer", [30] * 6, [20] * 6, 2),
        ("one slow load", [1, 1, 1, 30, 1, 1, 1, 1], [5] * 8, 2),
        ("one slow load, more room", [1, 1, 1, 30, 1, 1, 1, 1], [5] * 8, 4),
        ("the queue is full", [1, 1, 1, 1, 60, 1], [20, 20, 20, 20, 1, 1], 1),
        ("loads that take no time", [0, 0, 0, 7], [2, 2, 2, 2], 1),
    ]
    for name, loads, computes, depth in cases:
        call = f"{name}, pipeline({loads}, {computes}, {depth})"
        got = run(call, answer, list(loads), list(computes), depth)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{call}: expected (end, idle), got {got!r}")
        for which, mine, want in zip(("end", "idle time"), got, _simulated(loads, computes, depth)):
            mine = number(f"{call}, {which}", mine)
            if mine != want:
                raise Wrong(f"{call}, {which}: expected {want}, got {mine}")


CHECKS = {
    "profiling-1": _utilization,
    "profiling-2": _idle_share,
    "profiling-3": _apart_and_fused,
    "profiling-4": _seconds_per_call,
    "profiling-5": _pipeline,
}
