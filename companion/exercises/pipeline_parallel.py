"""Checkers of the exercises in chapters/pipeline_parallel."""
import contextlib
import operator
import signal
import threading

import torch

from .. import schedules as s
from ..exercise import Wrong
from ..grading import number, refuses, run
from ..grading_ranks import on_ranks

PATIENCE = 5.0  # seconds that an answer may take, or a rank wait for a message


@contextlib.contextmanager
def _within(what):
    """Wrong where an answer takes longer than PATIENCE: an endless loop would hang the notebook.

    Signals are the main thread's, and Windows has none of these: there it waits.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(signum, frame):
        raise Wrong(f"{what}: no answer within {PATIENCE:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(what, answer, *arguments):
    with _within(what):
        return run(what, answer, *arguments)


def _refuses(what, answer, *arguments):
    with _within(what):
        refuses(what, answer, *arguments)


def _micro_batches(answer):
    for p, most in (1, 0.0), (1, 0.5), (4, 0.5), (4, 0.28), (4, 0.11), (8, 0.47), (8, 0.06), (2, 1), (64, 0.31):
        m = 1
        while p - 1 > most * (m + p - 1):
            m += 1
        call = f"micro_batches({p}, {most})"
        got = number(call, _run(call, answer, p, most))
        if got != m:
            raise Wrong(f"{call}: expected {m}, got {got}")
    _refuses("micro_batches(4, 0)", answer, 4, 0)


def _lists(what, got):
    """The reader's pairs, checked; Wrong for anything else."""
    if not isinstance(got, (list, tuple)) or not all(
            isinstance(a, (list, tuple)) and len(a) == 2 for a in got):
        raise Wrong(f"{what}: expected a list of pairs, got {got!r:.60}")
    return [tuple(a) for a in got]


def _rank_list(answer):
    for p, m in (1, 1), (4, 8), (4, 2), (3, 7), (5, 5), (2, 1):
        case, ranks = f"p = {p}, m = {m}", []
        for r in range(p):
            what = f"{case}, rank {r}"
            actions = _lists(what, _run(what, answer, r, p, m))
            if sorted(map(str, actions)) != sorted(str((k, i)) for k in "FB" for i in range(m)):
                raise Wrong(f"{what}: needs one F and one B of each micro-batch from 0 to {m - 1}, "
                            f"got {actions}")
            ranks.append(tuple(s.Action(kind, k, r) for kind, k in actions))
        try:
            t = s.simulate(s.Schedule(case, tuple(ranks), tuple(range(p)), p))
        except ValueError as error:
            raise Wrong(str(error)) from error
        for r, held in enumerate(t.in_flight):
            if held > min(m, p - r):
                raise Wrong(f"{case}: rank {r} holds {held} micro-batches, at most {min(m, p - r)}")
        if t.time != 3 * (m + p - 1):
            raise Wrong(f"{case}: takes {t.time} with F = 1, B = 2; GPipe takes {3 * (m + p - 1)}")


def _finish_time(answer):
    cases = [(shape, cost, hop) for shape in
             ((1, 2, 1), (2, 3, 1), (4, 8, 1), (4, 8, 2), (3, 1, 1))
             for cost, hop in (((1, 1, 1), 0), ((3, 4, 2), 0), ((2, 2, 5), 3), ((1, 0, 7), 1))]
    for shape, (F, I, W), hop in cases:
        schedule = s.zero_bubble(*shape)
        lists = [[(a.kind, a.micro) for a in row] for row in schedule.actions]
        what = f"lists of s.zero_bubble{shape}, F = {F}, I = {I}, W = {W}, hop = {hop}"
        got = number(what, _run(what, answer, lists, {"F": F, "I": I, "W": W}, hop))
        want = s.simulate(schedule, F, I, W, hop).time
        if got != want:
            raise Wrong(f"{what}: expected {want}, got {got}")
    bad = [[("F", 0), ("I", 0), ("F", 1), ("I", 1)], [("F", 0), ("F", 1), ("I", 0), ("I", 1)]]
    _refuses("ranks that wait forever", answer, bad, {"F": 1, "I": 1, "W": 1}, 0)


def _best(costs, p):
    """The slowest stage of the best cut: the smallest limit that p stages can keep."""
    def fits(limit):
        stages, left = 1, limit
        for c in costs:
            if c > left:
                stages, left = stages + 1, limit
            left -= c
        return stages <= p
    sums = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})
    return next(x for x in sums if x >= max(costs) and fits(x))


def _balance(answer):
    draw = torch.Generator().manual_seed(0)
    long = torch.randint(1, 50, (100,), generator=draw).tolist()
    for costs, p in (([1] * 8, 4), ([4, 4, 4, 4, 10], 2), ([1, 2, 3, 4, 5], 3), ([9], 1), ([5, 1, 1, 1, 5], 3),
                     ([2, 2, 2, 2, 2, 2, 7], 3), ([1, 1, 1, 9], 4), (long, 12)):
        what = f"balance({costs if len(costs) < 9 else 'a hundred layers'}, {p})"
        got = _run(what, answer, list(costs), p)
        try:
            got = [operator.index(n) for n in got]  # numpy's and torch's integers too
        except TypeError as error:
            raise Wrong(f"{what}: expected a list of whole numbers, got {got!r:.60}") from error
        if len(got) != p or min(got) < 1 or sum(got) != len(costs):
            raise Wrong(f"{what}: {got} are not {p} stages of at least one layer and "
                        f"{len(costs)} layers in all")
        ends = [sum(got[:i + 1]) for i in range(p)]
        slowest = max(sum(costs[end - n:end]) for n, end in zip(got, ends))
        if slowest != _best(costs, p):
            raise Wrong(f"{what}: the slowest stage of {got} takes {slowest}; "
                        f"{_best(costs, p)} is possible")
    _refuses("balance([1, 2], 3)", answer, [1, 2], 3)


# ---------------------------------------------------------------- a rank that trains

_TRAIN = """
from companion.wire import recorded

SHAPE, works, waits = (3, 4), [], []  # a send that is dropped before its end is canceled


def neighbor(p, other, verb):
    if not (isinstance(other, int) and 0 <= other < p and abs(other - rank) == 1):
        raise ValueError(f"rank {rank} {verb} {other!r}, which is no neighbor")


def wires(p):
    def send(to, tensor):
        neighbor(p, to, "sent to")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"rank {rank} sent {tensor!r:.40}, which is no tensor")
        if tensor.requires_grad:
            raise ValueError(f"rank {rank} sent a tensor with its graph; is a detach missing?")
        if tensor.shape != SHAPE or tensor.dtype != torch.float64:
            raise ValueError(f"rank {rank} sent {list(tensor.shape)}, {tensor.dtype}; activations "
                             f"and their gradients are {list(SHAPE)}, torch.float64")
        tensor = tensor.clone()
        works.append((dist.isend(tensor, to), tensor))

    def recv(source):
        neighbor(p, source, "received from")
        into = torch.empty(SHAPE, dtype=torch.float64)
        waits.append(source)
        dist.irecv(into, source).wait()
        waits.pop()
        return into

    return send, recv


class Held:
    now = most = 0

    def forward(self, module, arguments, output):
        self.now += 1
        self.most = max(self.most, self.now)
        output.register_hook(self.backward)

    def backward(self, grad):
        self.now -= 1


def fault(p, m):
    where = f"p = {p}, m = {m}: rank {rank}"
    torch.manual_seed(p + m)
    stages = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
              for _ in range(p)]
    inputs, weights = torch.randn(2, m, *SHAPE, dtype=torch.float64)

    def loss(y, k):
        return (y * weights[k]).sum() * (k + 1)

    whole, stage, held = torch.nn.Sequential(*stages), stages[rank], Held()
    want = torch.autograd.grad(sum(loss(whole(x), k) for k, x in enumerate(inputs)),
                               list(stage.parameters()))
    stage.register_forward_hook(held.forward)

    def watched():
        with recorded() as calls:
            answer(rank, p, stage, list(inputs) if rank == 0 else None,
                   loss if rank == p - 1 else None, *wires(p), m)
        return calls

    calls = within(patience, watched, lambda: f"p = {p}, m = {m}: rank {rank} " + (
        f"waits for a message of rank {waits[-1]}" if waits else "does not wait for a message"))
    for q, w in zip(stage.parameters(), want):
        if q.grad is None:
            return f"{where} ended without gradients"
        if not torch.allclose(q.grad, w, rtol=1e-9, atol=1e-9):
            return f"{where} has another gradient than one process"
    sent, most = sum(c.bytes for c in calls), m * inputs[0].nbytes * ((rank > 0) + (rank < p - 1))
    if sent > most:
        return f"{where} sent {sent} bytes, {most} suffice"
    full = min(m, p - rank)
    if held.most > full:
        return f"{where} held {held.most} micro-batches at once, at most {full}"
    if held.most < full:
        return (f"{where} never held more than {held.most}, 1F1B starts {full} before the first "
                "backward; the others wait")
    return ""


for p, m in (2, 3), (3, 5), (3, 1), (3, 2), (1, 2):
    report = [None] * world_size
    dist.all_gather_object(report, fault(p, m) if rank < p else "")
    if any(report):  # messages that nobody took would spoil the next case
        break
"""


def _train_rank(answer):
    for fault in on_ranks("3 ranks", answer, 3, _TRAIN, patience=PATIENCE)[0]:
        if fault:
            raise Wrong(fault)


CHECKS = {
    "pipeline_parallel-1": _micro_batches,
    "pipeline_parallel-2": _rank_list,
    "pipeline_parallel-3": _finish_time,
    "pipeline_parallel-4": _balance,
    "pipeline_parallel-5": _train_rank,
}
