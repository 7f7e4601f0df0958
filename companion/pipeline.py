"""A small pipeline engine: runs any one-pipe schedule of ``companion.schedules`` on real ranks.

    stages = cut(Decoder(config), schedule.depth)
    mine = {s: stages[s] for s in schedule.stages_of(rank)}
    engine = Engine(schedule, mine, loss, like)
    engine.step([(tokens, targets), ...])        # gradients are in .grad, as from one process
    sum_tied(schedule, mine)                     # the embedding's, used at both ends

Every rank runs its list; what it makes is sent at once, without waiting, and what it needs is
received in the order in which the sender sends it, which it reads in the sender's list.

Limits: one pipe (not DualPipe); messages of one dtype; every rank is given all micro-batches;
a gradient that was sent is freed at the step's end only.
PyTorch's own engine is torch.distributed.pipelining. Taught in: chapters/pipeline_parallel.md.
"""
import time
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .gpt import rotary_table
from .schedules import Event, Timeline

__all__ = ["Engine", "LateLinear", "Stage", "cut", "split_backward", "sum_tied"]


class Stage(nn.Module):
    """Some blocks of a decoder; the first stage has the embedding too, the last norm and head.

    Takes tokens [B, T] (first) or activations [B, T, D]; returns activations or (last) logits
    [B, T, V].
    """

    def __init__(self, decoder, blocks, first, last):
        super().__init__()
        self.config = decoder.config
        self.embedding = decoder.embedding if first else None
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = (decoder.norm, decoder.head) if last else (None, None)

    def forward(self, x):
        cos, sin = rotary_table(torch.arange(x.shape[1], device=x.device),
                                self.config.width // self.config.heads, self.config.theta)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def cut(decoder, depth, layers=None):
    """Cut a ``companion.gpt.Decoder`` into ``depth`` stages; return the list.

    layers: blocks of each stage, by default as equal as can be (earlier stages take one more).
    The stages share the decoder's parameters. But with depth > 1 the last one's head, tied to
    the embedding, becomes a copy of its own: see ``sum_tied``. Raises ValueError for layers
    that do not add up.
    """
    blocks = list(decoder.blocks)
    if layers is None:
        layers = [len(blocks) // depth + (s < len(blocks) % depth) for s in range(depth)]
    if len(layers) != depth or min(layers) < 0 or sum(layers) != len(blocks):
        raise ValueError(f"cut: {len(blocks)} blocks cannot be {layers!r} on {depth} stages")
    if depth > 1:
        tied = decoder.head.weight
        decoder.head.weight = nn.Parameter(tied.detach().clone())
    ends = [sum(layers[:s + 1]) for s in range(depth)]
    return [Stage(decoder, blocks[end - n:end], s == 0, s == depth - 1)
            for s, (n, end) in enumerate(zip(layers, ends))]


# ---------------------------------------------------------------- backward in two halves

class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.layer.late.append((ctx.layer.weight, x, grad))
        return grad @ weight, None, None


class LateLinear(nn.Linear):
    """A linear layer whose backward leaves its weight's gradient for later, in ``self.late``."""

    def forward(self, x):
        return _Late.apply(x, self.weight, self) if torch.is_grad_enabled() else super().forward(x)


def split_backward(stage, on=True):
    """Turn the bias-free linear layers of a module into ``LateLinear``; return their one list.

    A backward then appends (weight, input, output's gradient) to the list. What is no such
    layer (norms, the embedding) keeps its weight's gradient in the first half. on=False turns
    them back.
    """
    late = []
    for module in stage.modules():
        if type(module) in (nn.Linear, LateLinear) and module.bias is None:
            module.__class__, module.late = LateLinear if on else nn.Linear, late
    return late


def _weight_gradients(late):
    for weight, x, grad in late:
        product = grad.flatten(0, -2).T @ x.flatten(0, -2)
        weight.grad = product if weight.grad is None else weight.grad.add_(product)


# ---------------------------------------------------------------- the engine

class Engine:
    """Runs a schedule on this rank.

    schedule: a ``Schedule`` of one pipe, over as many ranks as the process group has;
    stages: {stage: module}, those of this rank; loss: function of (output, targets) that
    returns this micro-batch's share of the step's loss, a scalar; like: function of a
    micro-batch's inputs that returns an empty tensor such as stages pass on; pace: seconds
    that an action shall last at least, such as {"F": 0.01, "I": 0.01, "W": 0.01}.

    After ``step``: events, with times in seconds; in_flight, the most (micro-batch, stage)
    pairs held at once; sent, messages sent.

    Raises ValueError for a schedule that is not for these ranks.
    """

    def __init__(self, schedule, stages, loss, like, pace=None):
        self.rank = dist.get_rank()
        if len(schedule.actions) != dist.get_world_size() or schedule.depth != len(schedule.where):
            raise ValueError(f"Engine: {schedule.name} is for {len(schedule.actions)} ranks and "
                             f"{len(schedule.where) // schedule.depth} pipe(s), there are "
                             f"{dist.get_world_size()} ranks and 1 pipe")
        if sorted(stages) != schedule.stages_of(self.rank):
            raise ValueError(f"Engine: rank {self.rank} has stages {sorted(stages)}, "
                             f"{schedule.name} puts {schedule.stages_of(self.rank)} there")
        self.schedule, self.stages, self.loss, self.like = schedule, stages, loss, like
        self.pace = pace or {}
        split = any(a.kind == "W" for a in schedule.actions[self.rank])
        self.late = {s: split_backward(module, split) for s, module in stages.items()}
        self.groups = _groups(schedule) if dist.get_backend() == "nccl" else {}

    def step(self, batch):
        """Forward and backward of all micro-batches; returns the loss, None without the last stage.

        batch: a list of (inputs, targets), one a micro-batch, on every rank.
        """
        if len(batch) != self.schedule.micros:
            raise ValueError(f"Engine: {len(batch)} micro-batches for a schedule of "
                             f"{self.schedule.micros}")
        self.batch, self.total = batch, None
        self.held, self.put_off, self.arrived, self.sending = {}, {}, {}, {}
        self.events, self.in_flight, self.sent = [], 0, 0
        self.coming = {r: _stream(self.schedule, r, self.rank)
                       for r in range(len(self.schedule.actions))}
        dist.barrier()
        self.clock = _Clock(batch[0][0].device)
        for action in self.schedule.actions[self.rank]:
            self._run(action)
        for work in self.sending.values():
            work[0].wait()
        self.events = [Event(a, *self.clock.seconds(start, end)) for a, start, end in self.events]
        return None if self.total is None else self.total.item()

    def _run(self, action):
        kind, micro, stage = action
        arrived = None  # wait for it before the clock starts
        if kind == "F" and not self.schedule.is_first(stage):
            arrived = self._receive("F", micro, stage)
        if kind in "BI" and not self.schedule.is_last(stage):
            arrived = self._receive("I", micro, stage)
        began, start = time.perf_counter(), self.clock.now()
        out = {"F": self._forward, "B": self._backward, "I": self._backward,
               "W": self._weights}[kind](kind, micro, stage, arrived)
        target = sum(self.pace.get(k, 0) for k in ("IW" if kind == "B" else kind))
        time.sleep(max(0, began + target - time.perf_counter()))
        self.events.append((action, start, self.clock.now()))
        if kind == "F" and not self.schedule.is_last(stage):
            self._send("F", micro, stage + 1, out)
        if kind in "BI" and not self.schedule.is_first(stage):
            self._send("I", micro, stage - 1, out)

    def _forward(self, kind, micro, stage, x):
        inputs, targets = self.batch[micro]
        x = inputs if x is None else x.requires_grad_()
        y = self.stages[stage](x)
        if self.schedule.is_last(stage):
            y = self.loss(y, targets)
            self.total = y.detach() + (0 if self.total is None else self.total)
        self.held[micro, stage] = x, y
        self.in_flight = max(self.in_flight, len(self.held.keys() | self.put_off.keys()))
        return y.detach()

    def _backward(self, kind, micro, stage, grad):
        x, y = self.held.pop((micro, stage))
        if sent := self.sending.pop(("F", micro, stage + 1), None):
            sent[0].wait()  # it has arrived, since its gradient is here: free it
        torch.autograd.backward(y, grad)
        late = self.late[stage]
        self.put_off[micro, stage] = late[:]
        late.clear()
        if kind == "B":
            self._weights("W", micro, stage, None)
        return x.grad

    def _weights(self, kind, micro, stage, arrived):
        _weight_gradients(self.put_off.pop((micro, stage)))

    def _send(self, kind, micro, stage, x):
        to = self.schedule.where[stage]
        if to == self.rank:
            self.arrived[kind, micro, stage] = x
            return
        x = x.contiguous()  # kept with the work: it must live until it has been sent
        self.sending[kind, micro, stage] = dist.isend(
            x, to, group=self.groups.get((self.rank, to))), x
        self.sent += 1

    def _receive(self, kind, micro, stage):
        wanted = kind, micro, stage
        source = self.schedule.where[stage + (1 if kind == "I" else -1)]
        while wanted not in self.arrived:
            message = self.coming[source].pop(0)
            x = self.like(self.batch[message[1]][0])
            dist.irecv(x, source, group=self.groups.get((source, self.rank))).wait()
            self.arrived[message] = x
        return self.arrived.pop(wanted)

    def timeline(self):
        """The ``Timeline`` of the last step over all ranks, peak in pairs. A collective.

        Times are in seconds. On GPUs each rank's begin at its own start of the step.
        """
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (tuple(self.events), self.in_flight))
        held = tuple(row[1] for row in rows)
        return Timeline(self.schedule, tuple(row[0] for row in rows), held, held)


def _stream(schedule, source, to):
    """The messages (kind, micro, stage that gets it) from one rank to another, in order."""
    found = []
    for kind, micro, stage in schedule.actions[source]:
        there = stage + (1 if kind == "F" else -1)
        ends = schedule.is_last(stage) if kind == "F" else schedule.is_first(stage)
        if kind != "W" and not ends and schedule.where[there] == to != source:
            found.append(("F" if kind == "F" else "I", micro, there))
    return found


_made = weakref.WeakKeyDictionary()  # {process group of all ranks: what _groups made beside it}


def _groups(schedule):
    """A group for each direction between two ranks: NCCL runs a group's messages one by one.

    Each sends one number at once, since the first message of a group waits for both its ranks.
    All engines share them: NCCL needs a while to make one.
    """
    ranks, me, groups = range(len(schedule.actions)), dist.get_rank(), _made.setdefault(
        dist.group.WORLD, {})
    for a, b in [(a, b) for a in ranks for b in ranks if _stream(schedule, a, b)]:
        if (a, b) in groups:
            continue
        group = groups[a, b] = dist.new_group([a, b])
        number = torch.zeros(1, device="cuda")
        if me in (a, b):
            (dist.send if me == a else dist.recv)(number, b if me == a else a, group=group)
    return groups


class _Clock:
    """Times of this rank: the machine's clock on a CPU, events of the stream on a GPU."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.zero = self.now()

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, *moments):
        if not self.cuda:
            return moments
        torch.cuda.synchronize()
        return [self.zero.elapsed_time(moment) / 1e3 for moment in moments]


def sum_tied(schedule, stages):
    """Sum the gradients of the embedding and of its copy in the head, on both their ranks.

    schedule, stages: as for ``Engine``. Call it after ``step``, on every rank, before the
    optimizer. With one stage there is no copy, and nothing to do.
    """
    first, last = schedule.where[0], schedule.where[-1]
    ours = [stages[s] for s in dict.fromkeys((0, schedule.depth - 1)) if s in stages]
    weights = [w for stage in ours for w in (stage.embedding, stage.head) if w is not None]
    if schedule.depth == 1 or not weights:
        return
    if first == last:
        a, b = (w.weight for w in weights)
        a.grad += b.grad
        b.grad.copy_(a.grad)
        return
    grad = weights[0].weight.grad
    other, to = torch.empty_like(grad), last if dist.get_rank() == first else first
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, grad.contiguous(), to),
                                        dist.P2POp(dist.irecv, other, to)]):
        work.wait()
    grad += other


# ---------------------------------------------------------------- old versions of PyTorch

class _All:
    """The works of a batch of messages, as one."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


def _mend_pipelining():
    """The pipelining of PyTorch 2.6 waits for the last message of a batch only.

    NCCL makes one work of a batch, gloo does not, and a work that nobody waits for is lost.
    """
    from torch.distributed.pipelining import schedules
    if not hasattr(schedules, "_wait_batch_p2p"):  # newer versions wait for a list
        schedules._batch_p2p = lambda operations, desc=None: (
            _All(dist.batch_isend_irecv(operations)) if operations else None)


if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 9):
    _mend_pipelining()
