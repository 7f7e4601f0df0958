"""Checkers of the exercises in chapters/composing."""
import itertools
import math

import torch

from ..exercise import Wrong
from ..grading import number, refuses, run


def _groups(answer):
    for shape in (2, 2, 2), (4,), (1, 3), (2, 3, 4), (1, 1, 1), (3, 1, 2, 2):
        places = list(itertools.product(*map(range, shape)))  # by rank
        for axis in range(len(shape)):
            found = {}
            for rank, place in enumerate(places):
                found.setdefault(place[:axis] + place[axis + 1:], []).append(rank)
            want, call = sorted(found.values()), f"mesh_groups({shape}, {axis})"
            got = run(call, answer, shape, axis)
            kinds = (list, tuple)
            lists = isinstance(got, kinds) and all(isinstance(g, kinds) for g in got)
            if not lists or [list(g) for g in got] != want:
                raise Wrong(f"{call}: expected {want}, got {got!r}")
    refuses("mesh_groups((2, 2), 2)", answer, (2, 2), 2)
    refuses("mesh_groups((2, 2), -1)", answer, (2, 2), -1)


def _idle(answer):
    for case in ((1024, 64, 1, 8, 1), (1024, 64, 2, 8, 1), (2048, 128, 1, 16, 8),
                 (64, 8, 8, 1, 1), (96, 4, 3, 12, 4)):
        batch, dp, micro, pp, chunks = case
        bubble = (pp - 1) / chunks
        want, call = bubble / (batch / (dp * micro) + bubble), f"idle_share{case}"
        got = number(call, run(call, answer, *case))
        if not math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-12):
            raise Wrong(f"{call}: expected {want:.6g}, got {got:.6g}")
    refuses("idle_share(1000, 64, 1, 8, 1)", answer, 1000, 64, 1, 8, 1)


def _items(answer):
    order = [(7 * i + 3) % 101 for i in range(101)]
    for shape in (1, 1, 1), (2, 1, 2), (2, 2, 2), (4, 1, 2), (1, 2, 4), (3, 2, 1):
        dp, pp, tp = shape
        batch = 4 * dp
        for step in 0, 2:
            for rank in range(dp * pp * tp):
                start = step * batch + 4 * (rank // (pp * tp))
                want = order[start:start + 4]
                call = f"items_of({rank}, {shape}, order, {batch}, {step})"
                got = run(call, answer, rank, shape, list(order), batch, step)
                if not isinstance(got, (list, tuple)) or list(got) != want:
                    raise Wrong(f"{call}: expected items {want}, got {got!r}")
    refuses("items_of(0, (2, 1, 2), order, 5, 0)", answer, 0, (2, 1, 2), list(order), 5, 0)


def _mend(answer):
    for dp, tp in (1, 1), (2, 1), (1, 2), (2, 2), (3, 4):
        draw = torch.Generator().manual_seed(dp + 10 * tp)
        kinds = {"norm": "partial", "up": "split"}
        grads = [[{name: torch.randn(3, generator=draw, dtype=torch.float64) for name in kinds}
                  for _ in range(tp)] for _ in range(dp)]
        start = [[{k: g.clone() for k, g in row.items()} for row in rows] for rows in grads]
        calls = []

        def all_reduce(tensors):
            calls.append(len(tensors))
            total = sum(t.clone() for t in tensors)
            for t in tensors:
                t.copy_(total)

        where = f"{dp} data and {tp} tensor ranks"
        run(where, answer, grads, kinds, all_reduce)
        for d, t in itertools.product(range(dp), range(tp)):
            want = {"up": sum(start[k][t]["up"] for k in range(dp)) / dp,
                    "norm": sum(start[k][j]["norm"] for k in range(dp) for j in range(tp)) / dp}
            for name in kinds:
                if not torch.allclose(grads[d][t][name], want[name], rtol=1e-12, atol=1e-12):
                    raise Wrong(f"{where}: the gradient of {name!r} ({kinds[name]}) on data rank "
                                f"{d}, tensor rank {t} is not that of one process")
        # a group of n sends 2 (n - 1) / n of a tensor a rank: over its ranks 2 (n - 1)
        sent = sum(2 * (n - 1) for n in calls)
        most = tp * 2 * (2 * (dp - 1)) + dp * 2 * (tp - 1)
        if sent > most:
            raise Wrong(f"{where}: the ranks send {sent} tensors in all; {most} are enough")
        least = tp * 2 * (dp - 1) + 2 * (dp * tp - 1)  # one call over all ranks for "norm"
        if sent < least:
            raise Wrong(f"{where}: the ranks sent {sent} tensors in all, so how did they learn "
                        "the sums?")


def _plans(layers, states, layer_seconds, gpus, room, batch):
    for tp in 1, 2, 4, 8:
        for pp in range(1, layers + 1):
            if gpus % (tp * pp) == 0 and layers % pp == 0:
                dp = gpus // (tp * pp)
                if batch % dp == 0 and states <= room * tp * pp:
                    layer = layer_seconds / tp * (1 + 0.05 * (tp - 1))
                    yield (batch // dp + pp - 1) * (layers // pp) * layer, tp, pp, dp


def _plan(answer):
    for case in ((32, 126e9, 1.0, 64, 80e9, 128), (32, 1.3e12, 1.0, 64, 80e9, 128),
                 (96, 2.8e12, 0.5, 512, 80e9, 1024), (12, 1e9, 2.0, 8, 80e9, 8),
                 (6, 1e9, 1.0, 6, 80e9, 6), (16, 1e9, 1.0, 8, 80e9, 12),
                 (8, 100e12, 1.0, 64, 80e9, 64)):
        want, call = min(_plans(*case), default=None), f"quickest_plan{case}"
        got = run(call, answer, *case)
        if want is None or got is None:
            if got is not want:
                raise Wrong(f"{call}: expected {want}, got {got!r}")
            continue
        if not isinstance(got, (list, tuple)) or len(got) != 4:
            raise Wrong(f"{call}: expected (seconds, tp, pp, dp), got {got!r}")
        if tuple(got[1:]) != want[1:] or not math.isclose(number(call, got[0]), want[0],
                                                          rel_tol=1e-9):
            raise Wrong(f"{call}: expected {want[0]:.6g} s at tp, pp, dp {want[1:]}, got {got!r}")


CHECKS = {
    "composing-1": _groups,
    "composing-2": _idle,
    "composing-3": _items,
    "composing-4": _mend,
    "composing-5": _plan,
}
