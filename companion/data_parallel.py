"""Data parallelism by hand: replicas that average their gradients, and ZeRO's three stages.

    replicas = Replicas(model)                  # or: zero = Zero(model, model.blocks, stage=3)
    loss(model, my_part_of_the_batch).backward()
    replicas.finish()                           #     zero.step()
    optimizer.step()

All are for ranks, that is for cells under ``%%torchrun`` and scripts under ``torchrun``. Written
to be read and counted: bucketed and exact, but with one dtype, one device and no streams. For
work use DistributedDataParallel and ``fully_shard``, with which the tests hold them equal.

Taught in: chapters/data_parallel.
Sources: Li et al. 2020, arXiv:2006.15704; Rajbhandari et al. 2020, arXiv:1910.02054;
Zhao et al. 2023, arXiv:2304.11277.
"""
import contextlib

import torch
import torch.distributed as dist

from . import wire
from .counting import storage_bytes

__all__ = ["Replicas", "Zero", "reduce_scatter", "state_bytes", "traffic"]

STAGES = 0, 1, 2, 3


# ---------------------------------------------------------------- formulas

def state_bytes(parameters, ranks, stage, weights=2, gradients=2, states=12):
    """Bytes of weights, gradients and optimizer states on one of ``ranks``: a dictionary.

    stage: 0 for replicas, 1 to 3 for ZeRO's. weights, gradients, states: bytes per parameter;
    the defaults are mixed precision with AdamW. What is cut is rounded up to whole parameters;
    what a step gathers for a moment is not counted.
    Raises ValueError for another stage, and for fewer than one rank.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
    """
    if stage not in STAGES or ranks < 1:
        raise ValueError(f"state_bytes: stage {stage!r} on {ranks!r} ranks")
    part = -(-parameters // ranks)
    return {"weights": weights * (part if stage == 3 else parameters),
            "gradients": gradients * (part if stage >= 2 else parameters),
            "states": states * (part if stage >= 1 else parameters)}


def traffic(size, ranks, stage, micro_batches=1, no_sync=True):
    """Bytes that one of ``ranks`` sends in a step, by rings.

    size: bytes of all weights, and so of all gradients; stage: as in ``state_bytes``;
    micro_batches: backward passes before the step; no_sync: whether stage 0 waits for the last.
    Raises ValueError for another stage, and for fewer than one rank or micro-batch.
    """
    if stage not in STAGES or ranks < 1 or micro_batches < 1:
        raise ValueError(f"traffic: stage {stage!r}, {ranks!r} ranks, "
                         f"{micro_batches!r} micro-batches")
    passes = {0: 2 if no_sync else 2 * micro_batches,  # all-reduces, of two passes each
              1: 2,                                    # reduce-scatter, all-gather
              2: micro_batches + 1,
              3: 3 * micro_batches}[stage]             # all-gather twice, reduce-scatter
    return passes * size * (ranks - 1) / ranks


# ---------------------------------------------------------------- sending

def reduce_scatter(into, x, group=None):
    """Fill ``into`` [k] with this rank's slice of the sum of ``x`` [n k] over the ranks.

    On gloo by a ring of its own: gloo's reduce-scatter sends what an all-reduce sends.
    """
    if dist.get_backend(group) != "gloo":
        return wire.reduce_scatter(into, x, group)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    right, left = (_global(group, (rank + d) % n) for d in (1, -1))
    chunks = x.chunk(n) if len(x) else n * [x]
    total = chunks[(rank - 1) % n]
    for step in range(n - 1):
        got = torch.empty_like(total)
        work = dist.batch_isend_irecv([dist.P2POp(dist.isend, total, right, group),
                                       dist.P2POp(dist.irecv, got, left, group)])
        for w in work:
            w.wait()
        total = got.add_(chunks[(rank - 2 - step) % n])
    into.copy_(total)


def _global(group, rank):
    return rank if group is None else dist.get_global_rank(group, rank)


def _make_equal(model, group):
    """All ranks get the weights and buffers of the group's first."""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.data, src=_global(group, 0), group=group)


# ---------------------------------------------------------------- replicas

class Replicas:
    """Average the gradients of ``model`` over the ranks, in buckets, while backward goes on.

    bucket_bytes: a bucket is sent when it holds at least so much. Buckets follow the
    parameters from last to first, which is about the order in which gradients appear.

    Call ``finish()`` after backward; under ``no_sync()`` gradients add up and nothing is sent.
    Raises ValueError in a backward pass that follows another without ``finish()`` between.
    """

    def __init__(self, model, bucket_bytes=25 * 2**20, group=None):
        _make_equal(model, group)
        self.group, self.held = group, False
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.buckets = _cut(reversed(self.names), bucket_bytes)
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._restart()
        for p in self.names:
            p.register_post_accumulate_grad_hook(self._arrived)

    def _restart(self):
        self.waiting, self.sent = [set(bucket) for bucket in self.buckets], []

    def _arrived(self, p):
        if self.held:
            return
        if self.bucket_of[p] < len(self.sent):
            raise ValueError(f"Replicas: {self.names[p]} was sent already; call finish(), or "
                             "accumulate under no_sync()")
        self.waiting[self.bucket_of[p]].discard(p)
        # In the same order on all ranks, whatever order gradients had here
        while len(self.sent) < len(self.buckets) and not self.waiting[len(self.sent)]:
            bucket = self.buckets[len(self.sent)]
            flat = torch.cat([p.grad.flatten() for p in bucket])
            flat /= dist.get_world_size(self.group)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.sent.append((flat, work))

    def finish(self):
        """Wait for what was sent, and put the averages into ``.grad``.

        Raises ValueError if a parameter got no gradient: other ranks may wait for its bucket.
        """
        if missing := [self.names[p] for p in self.names if any(p in w for w in self.waiting)]:
            raise ValueError(f"Replicas: no gradient arrived for {', '.join(missing)}")
        for bucket, (flat, work) in zip(self.buckets, self.sent):
            work.wait()
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(g.view_as(p))
        self._restart()

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in here keep their gradients to themselves."""
        self.held = True
        try:
            yield
        finally:
            self.held = False


def _cut(parameters, bucket_bytes):
    buckets, room = [], 0
    for p in parameters:
        if room <= 0:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


# ---------------------------------------------------------------- ZeRO

class Zero:
    """Train ``model`` with the optimizer's states cut over the ranks, and more by ``stage``.

    1: each rank keeps the optimizer states of its own slice of the weights. 2: and only the
    gradients of that slice, once backward is through. 3: and only that slice of the weights.
    units: modules that are gathered and reduced as one; what is in none of them is one more
    unit, the model itself, which stage 3 keeps whole from forward to backward.
    optimizer: must treat every number alike (AdamW does, Adafactor and Muon do not).
    Gradients are averaged over the ranks of ``group`` and accumulate until ``step()``.

    Raises ValueError for another stage.
    """

    def __init__(self, model, units, stage, optimizer=torch.optim.AdamW, group=None, **options):
        if stage not in STAGES[1:]:
            raise ValueError(f"Zero: stage must be 1, 2 or 3, got {stage!r}")
        _make_equal(model, group)
        self.stage, self.units, taken = stage, [], set()
        for module in [*units, model]:
            own = [p for p in module.parameters() if p.requires_grad and p not in taken]
            taken.update(own)
            if own:
                self.units.append(_UNITS[stage](own, group))
                self.units[-1].watch(module, keep=module is model)
        self.optimizer = optimizer([u.shard for u in self.units], **options)

    def step(self):
        """Update the weights and clear the gradients.

        Raises ValueError if no gradients arrived since the last step.
        """
        for u in self.units:
            u.reduce()
        self.optimizer.step()
        for u in self.units:
            u.publish()
            u.clear()

    def held(self):
        """Bytes that this rank holds now: weights, gradients and (once there) states."""
        shards = [u.shard for u in self.units]
        states = [t for s in shards for t in self.optimizer.state[s].values()
                  if isinstance(t, torch.Tensor) and t.shape == s.shape]
        gradients = [t.grad for u in self.units for t in (u.shard, *u.parameters)]
        return {"weights": storage_bytes([*shards, *(u.flat for u in self.units)]),
                "gradients": storage_bytes(gradients), "states": storage_bytes(states)}


class _Stage1:
    """A unit: its parameters are views of one flat buffer, whose n-th part is ours."""

    def __init__(self, parameters, group):
        self.parameters, self.group = parameters, group
        self.n = dist.get_world_size(group)
        self.sizes = [p.numel() for p in parameters]
        self.part = -(-sum(self.sizes) // self.n)
        self.flat = self._joined([p.data for p in parameters])
        for p, view in zip(parameters, self._views(self.flat)):
            p.data = view
        self._cut()

    def _joined(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.part)
        torch.cat([t.flatten() for t in tensors], out=flat[:sum(self.sizes)])
        return flat

    def _views(self, flat):
        pieces = flat[:sum(self.sizes)].split(self.sizes)
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters)]

    def _mine(self, flat):
        return flat.chunk(self.n)[dist.get_rank(self.group)]

    def _reduced(self, flat):
        mean = torch.empty_like(self.shard)
        reduce_scatter(mean, flat, self.group)
        return mean.div_(self.n)

    def _cut(self):
        self.shard = torch.nn.Parameter(self._mine(self.flat))  # a view still
        self.gradients = torch.zeros_like(self.flat)
        for p, view in zip(self.parameters, self._views(self.gradients)):
            p.grad = view
        self.shard.grad = self._mine(self.gradients)

    def watch(self, module, keep):
        """Nothing to do in forward and backward: autograd adds into our buffer."""

    def reduce(self):
        if any(p.grad is None for p in self.parameters):
            raise ValueError("Zero: gradients were set to None; step() clears them itself")
        self.shard.grad.copy_(self._reduced(self.gradients))

    @torch.no_grad()
    def publish(self):
        wire.all_gather(self.flat, self.shard.data.clone(), self.group)

    def clear(self):
        self.gradients.zero_()


class _Stage2(_Stage1):
    """Reduce the unit's gradients as soon as the last is there, and keep only our part."""

    def _cut(self):
        self.shard = torch.nn.Parameter(self._mine(self.flat))
        self._hook()

    def _hook(self):
        self.waiting = set(self.parameters)
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self._arrived)

    @torch.no_grad()
    def _arrived(self, p):
        self.waiting.discard(p)
        if self.waiting:
            return
        mean = self._reduced(self._joined([p.grad for p in self.parameters]))
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for p in self.parameters:
            p.grad = None
        self.waiting = set(self.parameters)
        self.through()

    def through(self):
        """What follows once the unit's backward pass is over."""

    def reduce(self):
        if self.shard.grad is None:
            raise ValueError("Zero: a unit's gradients are not complete; was a parameter unused?")

    def clear(self):
        self.shard.grad = None


class _Stage3(_Stage2):
    """And keep only our part of the weights: the flat buffer is filled when it is needed."""

    def _cut(self):
        self.shard = torch.nn.Parameter(self._mine(self.flat).clone())
        self._hook()
        self.through()

    def watch(self, module, keep):
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda _, __, out: self._ran(out, keep))

    def _ran(self, out, keep):
        if not keep:
            self.through()
        # Not by the module's own backward hook: some versions warn where no input has a gradient
        for y in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.register_hook(lambda _: self.gather())

    @torch.no_grad()
    def gather(self):
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat.nbytes)
            wire.all_gather(self.flat, self.shard.data, self.group)

    def through(self):
        """Free the weights; the parameters remain as views of an empty storage."""
        self.flat.untyped_storage().resize_(0)

    def publish(self):
        """Nothing: the next forward pass gathers."""


_UNITS = {1: _Stage1, 2: _Stage2, 3: _Stage3}


# ---------------------------------------------------------------- old versions of PyTorch

def _mend_fully_shard():
    """PyTorch 2.6 ships ``fully_shard`` but its CPU path is not finished; newer ones are.

    It lacks two methods of the CPU's stand-in for a stream, counts a gathered weight as
    changed, and asks gloo for an average, which gloo does not have.
    """
    import torch.cpu
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    import warnings

    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda self, event: None
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # its checkpoints ask for it
    copy_out = _fsdp_param_group.foreach_all_gather_copy_out
    factors = _fsdp_collectives._get_gradient_divide_factors

    def unnoticed(result, parameters, group):
        gathered = [t for p in parameters for t in getattr(p, "all_gather_outputs", [])]
        before = [t._version for t in gathered]
        copy_out(result, parameters, group)
        for t, version in zip(gathered, before):
            torch._C._autograd._unsafe_set_version_counter(t, version)

    def by_division(group, other, dtype, *rest):
        on_gloo = dist.get_backend(group) == "gloo"
        return factors(group, other, torch.float16 if on_gloo else dtype, *rest)

    _fsdp_param_group.foreach_all_gather_copy_out = unnoticed
    _fsdp_collectives._get_gradient_divide_factors = by_division


_mend_fully_shard()
