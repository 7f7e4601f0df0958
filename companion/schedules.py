"""Pipeline schedules as lists of actions, and one simulator that runs any of them on paper.

    from companion import schedules as s
    t = s.simulate(s.one_f_one_b(4, 8), F=1, I=1, W=1, hop=0)
    t.time, t.idle, t.overhead, t.in_flight     # 33, 3/11, 3/8, (4, 3, 2, 1)

p ranks, m micro-batches, v stages a rank. An action is a forward F of one micro-batch through
one stage, a backward B, or the two halves of a backward: I, the gradient of the stage's input,
which the stage before waits for, and W, the gradients of its weights, for which nobody waits.
(The zero-bubble papers write B for I.) B costs I + W. Costs are times of one stage; a stage
that holds half the layers costs half. Numbers may be int, float or Fraction; all times come
out in the unit they went in.

A rank runs its list in order. An action starts when its rank is free and its input has come:
``hop`` after it was made, if that was on another rank. Sending keeps no rank busy.
``companion.pipeline`` runs the same lists on real ranks. Standard library only.

Taught in: chapters/pipeline_parallel.md.
"""
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Action", "Event", "Schedule", "Timeline", "dualpipe", "gpipe", "interleaved",
           "messages", "one_f_one_b", "simulate", "zero_bubble"]


class Action(NamedTuple):
    """kind: "F", "B", "I" or "W"; micro: which micro-batch; stage: which stage (all from 0)."""
    kind: str
    micro: int
    stage: int

    def __str__(self):
        """Such as ``3F0``: stage, kind, micro-batch, as torch.distributed.pipelining prints."""
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order.

    name: for messages; actions: one tuple of ``Action`` a rank; where: the rank of each stage;
    depth: stages that a micro-batch passes. It is ``len(where)``, unless several pipes share
    the ranks (DualPipe): stages 0 to depth - 1 are the first pipe, the next depth the second;
    pairs: (rank, index) of each action that runs together with the one after it, as one
    kernel: the two start when both can, and what they made leaves when both have ended.

    Raises ValueError for lists that are not a training step: an action on a wrong rank, twice,
    or missing. An order in which ranks wait for each other forever is found by ``simulate``.
    """
    name: str
    actions: tuple
    where: tuple
    depth: int
    pairs: frozenset = frozenset()

    def __post_init__(self):
        seen = {}
        for rank, actions in enumerate(self.actions):
            for a in actions:
                if a.kind not in ("F", "B", "I", "W") or not 0 <= a.stage < len(self.where):
                    raise ValueError(f"{self.name}: no such action: {a!r}")
                if self.where[a.stage] != rank:
                    raise ValueError(f"{self.name}: {a} is on rank {rank}, but stage {a.stage} "
                                     f"is on rank {self.where[a.stage]}")
                kinds = seen.setdefault((a.micro, a.stage), [])
                if a.kind in kinds:
                    raise ValueError(f"{self.name}: {a} is there twice")
                kinds.append(a.kind)
        for (micro, stage), kinds in seen.items():
            if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
                raise ValueError(f"{self.name}: micro-batch {micro} on stage {stage} has "
                                 f"{sorted(kinds)}, needs F and B, or F, I and W")
        pipes = {}
        for micro, stage in seen:
            pipes.setdefault(micro, set()).add(stage)
        for micro, stages in pipes.items():
            first = min(stages) // self.depth * self.depth
            if stages != set(range(first, first + self.depth)):
                raise ValueError(f"{self.name}: micro-batch {micro} passes stages {sorted(stages)}, "
                                 f"needs {self.depth} of one pipe")

    @property
    def micros(self):
        """How many micro-batches."""
        return len({a.micro for actions in self.actions for a in actions})

    def stages_of(self, rank):
        """The stages that a rank holds, in order."""
        return [s for s, r in enumerate(self.where) if r == rank]

    def is_first(self, stage):
        """True if the stage's input comes from the data."""
        return stage % self.depth == 0

    def is_last(self, stage):
        """True if the stage's output is the loss."""
        return stage % self.depth == self.depth - 1

    def needs(self, action):
        """What must have ended before: pairs ("F" or "I", stage), of the same micro-batch.

        "I" of a stage has ended with its "B" as well.
        """
        stage = action.stage
        if action.kind == "F":
            return [] if self.is_first(stage) else [("F", stage - 1)]
        if action.kind == "W":
            return [("I", stage)]
        return [("F", stage)] + ([] if self.is_last(stage) else [("I", stage + 1)])


class Event(NamedTuple):
    """An action with its start and end, in the unit of the costs."""
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation (or a real run) of a schedule came to.

    events: one tuple of ``Event`` a rank; in_flight: per rank, the most (micro-batch, stage)
    pairs at once whose activations it holds, from F to the end of B or W; peak: per rank, the
    same with their sizes, as ``simulate`` was told.
    """
    schedule: Schedule
    events: tuple
    in_flight: tuple
    peak: tuple

    @property
    def time(self):
        """From the start of the first action to the end of the last one, over all ranks."""
        ends = [e.end for events in self.events for e in events]
        return max(ends) - min(e.start for events in self.events for e in events)

    @property
    def busy(self):
        """Per rank: the time it computes."""
        return tuple(sum(e.end - e.start for e in events) for events in self.events)

    @property
    def idle(self):
        """Bubble fraction: share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.events) * self.time)

    @property
    def overhead(self):
        """Bubble overhead: waiting over computing, summed over ranks. idle / (1 - idle)."""
        return len(self.events) * self.time / sum(self.busy) - 1

    @property
    def waits(self):
        """Per rank: waiting between its own first start and its own last end.

        What is left of the bubble when ranks need not start or end a step together.
        """
        return tuple(events[-1].end - events[0].start - busy
                     for events, busy in zip(self.events, self.busy))


def simulate(schedule, F=1, I=1, W=1, hop=0, size=1, kept=1):  # noqa: E741
    """Run a schedule on paper; return its ``Timeline``.

    F, I, W: time of a forward, of the input's gradient, of the weights' gradients: numbers, or
    one a stage; hop: time of a message between two ranks; size: activations of one micro-batch
    on one stage, a number or one a stage, in any unit; kept: the share of them still needed
    between I and W.

    Raises ValueError if ranks wait for each other forever, naming what each waits in.
    """
    costs = {k: _per_stage(k, v, schedule) for k, v in {"F": F, "I": I, "W": W}.items()}
    costs["B"] = [i + w for i, w in zip(costs["I"], costs["W"])]
    ended, events = {}, [[] for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while together := _next(schedule, rank, len(events[rank])):
                inputs = [(kind, a.micro, stage) for a in together for kind, stage in schedule.needs(a)]
                if not all(key in ended for key in inputs):
                    break
                end = max([events[rank][-1].end if events[rank] else 0,
                           *(ended[key] + (hop if schedule.where[key[2]] != rank else 0)
                             for key in inputs)])
                for a in together:
                    start, end = end, end + costs[a.kind][a.stage]
                    events[rank].append(Event(a, start, end))
                for a in together:
                    ended["I" if a.kind == "B" else a.kind, a.micro, a.stage] = end
                moved = True
    stuck = [f"rank {r} in {actions[len(events[r])]}"
             for r, actions in enumerate(schedule.actions) if len(events[r]) < len(actions)]
    if stuck:
        raise ValueError(f"{schedule.name}: waiting forever: {', '.join(stuck)}")
    sizes = _per_stage("size", size, schedule)
    ones = [1] * len(schedule.where)
    return Timeline(schedule, tuple(map(tuple, events)),
                    tuple(_most(a, ones, 1) for a in schedule.actions),
                    tuple(_most(a, sizes, kept) for a in schedule.actions))


def _next(schedule, rank, index):
    """The actions that a rank starts next: none, one, or two that run as one."""
    return schedule.actions[rank][index:index + 1 + ((rank, index) in schedule.pairs)]


def _per_stage(name, value, schedule):
    stages = len(schedule.where)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * stages
    if len(values) != stages or min(values) < 0:
        raise ValueError(f"simulate: {name} must be a number >= 0 or {stages} of them, got {value!r}")
    return values


def _most(actions, sizes, kept):
    """The most a rank holds at once, if a micro-batch holds ``sizes[stage]``."""
    held = most = 0
    for a in actions:
        if a.kind == "F":
            held += sizes[a.stage]
        most = max(most, held)
        if a.kind == "I":
            held -= sizes[a.stage] * (1 - kept)
        elif a.kind != "F":
            held -= sizes[a.stage] * (1 if a.kind == "B" else kept)
    return most


def messages(schedule):
    """Per rank: how many activations or gradients of a micro-batch it sends to another rank.

    Times their bytes, that is what the rank sends in a step.
    """
    counts = []
    for rank, actions in enumerate(schedule.actions):
        count = 0
        for a in actions:
            if a.kind == "F" and not schedule.is_last(a.stage):
                count += schedule.where[a.stage + 1] != rank
            elif a.kind in "BI" and not schedule.is_first(a.stage):
                count += schedule.where[a.stage - 1] != rank
        counts.append(count)
    return tuple(counts)


# ---------------------------------------------------------------- the schedules

def _check(name, p, m, v=1):
    if min(p, m, v) < 1:
        raise ValueError(f"{name}: every number must be at least 1, got {(p, m, v)}")


def gpipe(p, m):
    """All forwards, then all backwards: every rank holds m micro-batches.

    Source: Huang et al. 2019, arXiv:1811.06965.
    """
    _check("gpipe", p, m)
    return Schedule("GPipe", tuple(
        tuple(Action(kind, k, r) for kind in "FB" for k in range(m)) for r in range(p)),
        tuple(range(p)), p)


def one_f_one_b(p, m, ahead=1):
    """A backward as soon as it can run: rank r holds at most p - r micro-batches.

    Rank r starts ahead * (p - 1 - r) forwards before its first backward; ahead = 2 holds more,
    and hides messages that take time. Also called PipeDream-Flush. Source: Narayanan et al.
    2021, arXiv:2104.04473.
    """
    _check("one_f_one_b", p, m, ahead)
    ranks = []
    for r in range(p):
        warm = min(ahead * (p - 1 - r), m)
        forwards = [Action("F", k, r) for k in range(m)]
        ranks.append(_alternate(forwards, [[Action("B", k, r)] for k in range(m)], warm))
    return Schedule("1F1B", tuple(ranks), tuple(range(p)), p)


def _alternate(forwards, backwards, warm):
    """``warm`` forwards, then a forward and a backward in turn, then the other backwards."""
    actions = forwards[:warm]
    rest = forwards[warm:]
    for i, backward in enumerate(backwards):
        actions += rest[i:i + 1] + backward
    return tuple(actions)


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage s is on rank s mod p, so a micro-batch goes round v times.

    Needs m to be a multiple of p, or a ValueError. Source: Narayanan et al. 2021,
    arXiv:2104.04473.
    """
    _check("interleaved", p, m, v)
    if m % p:
        raise ValueError(f"interleaved: {m} micro-batches are no multiple of {p} ranks")
    # groups of p micro-batches: all through a rank's first stage, then through its second, ...
    order = [(g * p + k, chunk) for g in range(m // p) for chunk in range(v) for k in range(p)]
    back = [(k, v - 1 - chunk) for k, chunk in order]
    ranks = []
    for r in range(p):
        warm = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        if v == 1:
            warm = min(p - 1 - r, m)
        ranks.append(_alternate([Action("F", k, c * p + r) for k, c in order],
                                [[Action("B", k, c * p + r)] for k, c in back], warm))
    return Schedule(f"interleaved, v = {v}", tuple(ranks), tuple(s % p for s in range(p * v)), p * v)


def zero_bubble(p, m, ahead=1):
    """1F1B with backwards cut in I and W, and W put off to where the rank would wait.

    ahead 1 is ZB-H1: no rank holds more than p micro-batches. ahead 2 is ZB-H2: up to
    2p - 1. Rank r starts ahead * (p - 1 - r) forwards ahead and puts W off by ahead * r
    micro-batches. Source: Qi et al. 2024, arXiv:2401.10241.
    """
    _check("zero_bubble", p, m)
    if ahead not in (1, 2):
        raise ValueError(f"zero_bubble: ahead must be 1 (ZB-H1) or 2 (ZB-H2), got {ahead!r}")
    ranks = []
    for r in range(p):
        late = ahead * r
        backwards = [[Action("I", k, r)] + ([Action("W", k - late, r)] if k >= late else [])
                     for k in range(m)]
        actions = _alternate([Action("F", k, r) for k in range(m)], backwards,
                             min(ahead * (p - 1 - r), m))
        ranks.append(actions + tuple(Action("W", k, r) for k in range(max(m - late, 0), m)))
    return Schedule(f"ZB-H{ahead}", tuple(ranks), tuple(range(p)), p)


def dualpipe(p, m, paired=True):
    """Two pipes in opposite directions on the same ranks, half of the micro-batches in each.

    Rank r holds stage r of the first pipe and stage p - 1 - r of the second: every weight is
    there twice. Even micro-batches go down, odd ones up. In the middle of a step a forward of
    one pipe and a backward of the other run as one, so that the messages inside them hide;
    paired=False lets them run one after the other. p and m must be even, m >= 2p, or a
    ValueError. Source: DeepSeek-AI 2024, arXiv:2412.19437, and the order of its published
    code, https://github.com/deepseek-ai/DualPipe.
    """
    _check("dualpipe", p, m)
    if p % 2 or m % 2 or m < 2 * p:
        raise ValueError(f"dualpipe: p and m must be even and m >= 2p, got p = {p}, m = {m}")
    where = tuple(range(p)) + tuple(reversed(range(p)))
    ranks = [_dual_rank(p, m, r) for r in range(p)]
    pairs = {(r, i) for r, (_, found) in enumerate(ranks) for i in found} if paired else ()
    return Schedule("DualPipe", tuple(actions for actions, _ in ranks), where, p, frozenset(pairs))


def _dual_rank(p, m, rank):
    near = min(rank, p - 1 - rank)   # distance to this rank's end of the line
    far = p // 2 - 1 - near          # distance to the middle
    counts, actions, late, pairs = {}, [], [], []

    def run(kind, side):
        """side 0: the pipe that enters at this rank's end of the line."""
        pipe = side if rank < p // 2 else 1 - side
        k = counts[kind in "BI", side] = counts.get((kind in "BI", side), -1) + 1
        stage = rank if pipe == 0 else 2 * p - 1 - rank
        actions.append(Action(kind, 2 * k + pipe, stage))
        if kind == "I":
            late.append(Action("W", 2 * k + pipe, stage))

    def pair(forward, backward, apart=False):
        pairs.extend([] if apart else [len(actions)])
        run("F", forward)
        run("B", backward)

    def weights():
        actions.append(late.pop(0))

    for _ in range(2 * far):
        run("F", 0)
    for _ in range(near + 1):
        run("F", 0)
        run("F", 1)
    for _ in range(far):
        run("I", 1)
        weights()
        run("F", 1)
    for i in range(m // 2 - p + near + 1):
        pair(0, 1, apart=far == 0 and i == 0)  # in the middle, the first would only wait
        pair(1, 0)
    for _ in range(far):
        run("B", 1)
        pair(1, 0)
    for i in range(2 * (near + 1)):
        run("I" if i >= near + 1 else "B", 1 - i % 2)
    for _ in range(far):
        weights()
        run("I", 0)
    while late:
        weights()
    return tuple(actions), pairs
