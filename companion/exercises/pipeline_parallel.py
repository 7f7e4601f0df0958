"""Checkers of the exercises in chapters/pipeline_parallel."""
import contextlib
import operator
import queue
import signal
import threading
import time

import torch

from .. import schedules as s
from ..exercise import Wrong
from ..grading import number, refuses, run

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

class _Line:
    """p ranks as threads: queues between them, and counts of what each sends and holds."""

    def __init__(self, what, p, m):
        self.what, self.p, self.m = what, p, m
        self.queues = {(a, b): queue.Queue() for a in range(p) for b in range(p)}
        self.sent, self.held, self.most = [0] * p, [0] * p, [0] * p
        self.errors, self.quit = [], threading.Event()

    def send(self, rank, to, tensor):
        if not (isinstance(to, int) and 0 <= to < self.p and abs(to - rank) == 1):
            raise Wrong(f"{self.what}: rank {rank} sent to {to!r}, which is no neighbor")
        if not isinstance(tensor, torch.Tensor):
            raise Wrong(f"{self.what}: rank {rank} sent {tensor!r:.40}, which is no tensor")
        if tensor.requires_grad:
            raise Wrong(f"{self.what}: rank {rank} sent a tensor with its graph; is a detach missing?")
        self.sent[rank] += tensor.nbytes
        self.queues[rank, to].put(tensor.clone())

    def recv(self, rank, source):
        if not (isinstance(source, int) and 0 <= source < self.p and abs(source - rank) == 1):
            raise Wrong(f"{self.what}: rank {rank} received from {source!r}, which is no neighbor")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not self.quit.is_set():
            try:
                return self.queues[source, rank].get(timeout=0.02)
            except queue.Empty:
                continue
        raise Wrong(f"{self.what}: rank {rank} waited in vain for a message of rank {source}")

    def watch(self, rank, stage):
        """Count a micro-batch as held from the stage's forward until its backward."""
        def counted(module, arguments, output):
            self.held[rank] += 1
            self.most[rank] = max(self.most[rank], self.held[rank])
            output.register_hook(lambda grad: self._done(rank))
        stage.register_forward_hook(counted)

    def _done(self, rank):
        self.held[rank] -= 1

    def start(self, rank, *arguments):
        try:
            arguments[0](*arguments[1:])
        except BaseException as error:
            self.errors.append(error)
            self.quit.set()


def _train_rank(answer):
    for p, m in (2, 3), (4, 6), (3, 1), (4, 2), (1, 2):
        _one_line(answer, p, m)


def _one_line(answer, p, m):
    what = f"p = {p}, m = {m}"
    torch.manual_seed(p + m)
    width, rows = 4, 3
    stages = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()).double()
              for _ in range(p)]
    inputs = [torch.randn(rows, width, dtype=torch.float64) for _ in range(m)]
    weights = [torch.randn(rows, width, dtype=torch.float64) for _ in range(m)]

    def loss(y, k):
        return (y * weights[k]).sum() * (k + 1)

    sum(loss(torch.nn.Sequential(*stages)(x), k) for k, x in enumerate(inputs)).backward()
    want = [[q.grad.clone() for q in stage.parameters()] for stage in stages]
    for stage in stages:
        stage.zero_grad()
    line = _Line(what, p, m)
    threads = []
    for r, stage in enumerate(stages):
        line.watch(r, stage)
        program = _program(line, answer, r, stage, inputs if r == 0 else None,
                           loss if r == p - 1 else None)
        threads.append(threading.Thread(target=line.start, args=(r, program), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE + 5)
    if line.errors:
        raise line.errors[0]
    if any(thread.is_alive() for thread in threads):
        raise Wrong(f"{what}: a rank did not end")
    for r, stage in enumerate(stages):
        for q, w in zip(stage.parameters(), want[r]):
            if q.grad is None:
                raise Wrong(f"{what}: rank {r} ended without gradients")
            if not torch.allclose(q.grad, w, rtol=1e-9, atol=1e-9):
                raise Wrong(f"{what}: rank {r} has another gradient than one process")
        most = m * rows * width * 8 * ((r > 0) + (r < p - 1))
        if line.sent[r] > most:
            raise Wrong(f"{what}: rank {r} sent {line.sent[r]} bytes, {most} suffice")
        if line.most[r] > min(m, p - r):
            raise Wrong(f"{what}: rank {r} held {line.most[r]} micro-batches at once, "
                        f"at most {min(m, p - r)}")
        if line.most[r] < min(m, p - r):
            raise Wrong(f"{what}: rank {r} never held more than {line.most[r]}, 1F1B starts "
                        f"{min(m, p - r)} before the first backward; the others wait")


def _program(line, answer, rank, stage, inputs, loss):
    def program():
        run(f"{line.what}, rank {rank}", answer, rank, line.p, stage, inputs, loss,
            lambda to, tensor: line.send(rank, to, tensor),
            lambda source: line.recv(rank, source), line.m)
    return program


CHECKS = {
    "pipeline_parallel-1": _micro_batches,
    "pipeline_parallel-2": _rank_list,
    "pipeline_parallel-3": _finish_time,
    "pipeline_parallel-4": _balance,
    "pipeline_parallel-5": _train_rank,
}
