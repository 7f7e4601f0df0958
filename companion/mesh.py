"""A plain stack of blocks, and how each axis of a device mesh is applied to it from outside.

    from companion.mesh import Stack, cut
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    stage = cut(Stack(width=16, heads=4, hidden=32, layers=4), mesh)
    step = pipeline(stage, mesh, micro_batches=4)     # step(x, target) -> loss on the last stage

The model knows nothing of ranks. Tensor parallelism goes on first (it changes what a block
holds), sharding over the data axis last (it wraps what is left). On one rank of each axis
nothing changes.

Limits: no dropout, no tied weights; layers must be a multiple of the pipeline's stages.
Taught in: chapters/composing.
"""
import inspect
import logging
import warnings

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block", "Stack", "cut", "pipeline", "whole"]


class Block(nn.Module):
    """Causal attention and an MLP, with biases, each added to the residual stream."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        if width % heads:
            raise ValueError(f"mesh: {heads} heads do not divide a width of {width}")
        self.head_width = width // heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BTD):
        B, T, _ = x_BTD.shape
        y = self.norm_attention(x_BTD)
        q, k, v = (f(y).view(B, T, -1, self.head_width).transpose(1, 2)  # -1: its own heads
                   for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(y.transpose(1, 2).reshape(B, T, -1))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD))))


class Stack(nn.Module):
    """``layers`` blocks: [B, T, width] -> [B, T, width]."""

    def __init__(self, width, heads, hidden, layers):
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Block(width, heads, hidden) for i in range(layers)})

    def forward(self, x_BTD):
        for block in self.blocks.values():
            x_BTD = block(x_BTD)
        return x_BTD


def cut(stack, mesh):
    """``stack`` as this rank of ``mesh`` (dimensions "dp", "pp", "tp") holds it; in place.

    Keeps this stage's blocks under their names, cuts their layers over "tp" (columns, then
    rows), and shards what is left over "dp" with ``fully_shard``. Raises ValueError where
    layers or heads do not divide.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleOutput,
                                                   RowwiseParallel, parallelize_module)

    from . import data_parallel  # noqa: F401  mends fully_shard on the CPU in torch 2.6
    dp, pp, tp = mesh["dp"], mesh["pp"], mesh["tp"]
    names = list(stack.blocks)
    if len(names) % pp.size():
        raise ValueError(f"mesh: {len(names)} layers do not divide over {pp.size()} stages")
    each = len(names) // pp.size()
    first = pp.get_local_rank() * each
    for name in names[:first] + names[first + each:]:
        del stack.blocks[name]
    for block in stack.blocks.values():
        if block.q.out_features // block.head_width % tp.size():
            raise ValueError(f"mesh: {block.q.out_features // block.head_width} heads do not "
                             f"divide over {tp.size()} ranks")
        if tp.size() > 1:
            with warnings.catch_warnings():  # older torch: about random numbers, unused here
                warnings.filterwarnings("ignore", message="DTensor random operators")
                parallelize_module(block, tp, {
                    # q, k and v share one declared input: their gradients are added up
                    # before they are summed over ranks, once for all three
                    "norm_attention": PrepareModuleOutput(
                        output_layouts=Replicate(), desired_output_layouts=Replicate(),
                        use_local_output=False),
                    **dict.fromkeys("qkv", ColwiseParallel()), "up": ColwiseParallel(),
                    "o": RowwiseParallel(), "down": RowwiseParallel()})
        if dp.size() > 1:
            fully_shard(block, mesh=dp)
    if dp.size() > 1:
        fully_shard(stack, mesh=dp)
    return stack


def pipeline(stage, mesh, micro_batches, loss=F.mse_loss):
    """A function (x, target) -> loss or None, one step forward and backward by 1F1B.

    x, target: this data rank's part of the batch, on every stage. ``loss`` must be a mean
    over a micro-batch. Returns the mean loss on the last stage, None on the others.
    """
    from torch.distributed.pipelining import PipelineStage, schedules
    group = mesh["pp"]
    if group.size() == 1:
        def step(x, target):
            parts = list(zip(x.chunk(micro_batches), target.chunk(micro_batches)))
            total = 0.0
            for a, b in parts:
                value = loss(stage(a), b) / len(parts)
                value.backward()
                total += value.detach()
            return total
        return step
    number = group.get_local_rank()
    held = PipelineStage(stage, number, group.size(), torch.device(mesh.device_type),
                         group=group.get_group())
    # PyTorch 2.6 waits for the last of several messages only: with gloo its 1F1B hangs
    whole_waits = hasattr(schedules, "_wait_batch_p2p")
    engine = schedules.Schedule1F1B if whole_waits else schedules.ScheduleGPipe
    # newer engines divide gradients by the number of micro-batches; here the loss is divided
    old = "scale_grads" not in inspect.signature(engine).parameters
    schedule = engine(held, micro_batches, loss_fn=lambda y, t: loss(y, t) / micro_batches,
                      **({} if old else {"scale_grads": False}))

    def step(x, target):
        losses = []
        if number == 0:
            schedule.step(x)
        elif number == group.size() - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        return torch.stack(losses).sum().detach() if losses else None
    return step


def whole(tensor):
    """A DTensor's full value, gathered; anything else as it is. All its ranks must call it."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    # A matrix on two axes is gathered twice, and newer versions log that this is slow
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return tensor.full_tensor()
    finally:
        log.setLevel(level)
