"""Checkers of the exercises in chapters/collectives."""
import math

from ..exercise import Wrong
from ..grading import number, refuses, run
from ..grading_ranks import on_ranks


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


_OWN_CHUNK = """
from companion.counting import Film
from companion.wire import recorded


def watched(x, n):
    film = Film(inputs=[x])
    with recorded() as calls, film:
        got = answer(x, rank, n)
    return got, calls, max(film.frames().get("temporaries") or [0])


def fault(n, length):
    where = f"{n} ranks, {length} numbers: rank {rank}"
    draw = torch.Generator().manual_seed(length)
    every = torch.randint(-99, 99, (n, length), generator=draw)
    x, sums = every[rank].clone(), every.sum(0).tensor_split(n)
    hint = "does every rank wait for its send before any receives?"
    got, calls, new = within(patience, lambda: watched(x, n), lambda: hint)
    asked = sorted({c.name for c in calls} - {"send"})
    if asked:
        return f"{where} called {', '.join(asked)}; only messages from rank to rank are allowed"
    if not isinstance(got, torch.Tensor):
        return f"{where} returned a {type(got).__name__}, not a tensor"
    if not torch.equal(got, sums[rank]):
        other = [c for c in range(n) if torch.equal(got, sums[c])]
        what = f"the sum of chunk {other[0]}" if other else f"{got.tolist()}"
        return f"{where} returned {what:.60}, not the sum of chunk {rank}, {sums[rank].tolist()}"
    if not torch.equal(x, every[rank]):
        return f"{where}: x was changed"
    sent, most = sum(c.bytes for c in calls), x.nbytes - sums[rank].nbytes
    if sent > most:
        return (f"{where} sent {sent} bytes; {most} are enough, each chunk but its own once, "
                "with what has been added to it")
    if new > 3 * sums[0].nbytes:
        return (f"{where} had {new} bytes of new tensors at once; {3 * sums[0].nbytes}, "
                "three chunks, are enough (what a variable or a work of the step before still "
                "holds counts)")
    return ""


for n, length in (3, 7), (3, 2), (2, 5), (1, 4), (3, 300):
    report = [None] * world_size
    dist.all_gather_object(report, fault(n, length) if rank < n else "")
    if any(report):  # what a wrong answer left in the sockets would spoil the next one
        break
"""
PATIENCE = 3  # seconds for one reduce-scatter, of some milliseconds


def _own_chunk(answer):
    for fault in on_ranks("3 ranks", answer, 3, _OWN_CHUNK, patience=PATIENCE)[0]:
        if fault:
            raise Wrong(fault)


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
    "collectives-3": _own_chunk,
    "collectives-4": _two_levels,
    "collectives-5": _stuck,
}
