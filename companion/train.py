"""Train the book's decoder on one process or on many: the same script everywhere.

    python -m companion.train --out run --steps 100
    torchrun --nproc-per-node 4 -m companion.train --out run --steps 100 --tp 2

Gloo on a CPU, NCCL where every rank has a GPU. Over nodes, on each of them (``--out`` on a
file system that all of them see):

    torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-id mine --rdzv-endpoint FIRST_NODE:29500 \\
        -m companion.train --out /shared/run --steps 1000 --resume

Ranks form a grid (data, tensor). Along "tensor" (``--tp``) DTensor splits the matrices, and
the positions between them; along "data" ``fully_shard`` splits what is left of parameters,
gradients and AdamW's moments, block by block. The batch is global: the number of ranks
changes who computes what, not what is computed. Which windows of the text a step trains on
follows from the seed and the step alone: no window comes twice before all have come once.

A checkpoint is a folder ``step-00000100``, renamed to that name when every rank's part is on
disk, so a kill at any moment leaves the last whole one. ``--resume`` takes the newest, on any
number of ranks, and starts from step 0 where there is none: it is right for the first launch
and for every restart. Ctrl-C and SIGTERM finish the step, save and stop.

Limits: each process builds the whole model on its CPU before it is sharded. There is no
dropout, so no state of random generators is kept.
Sources: Zhao et al. 2023, arXiv:2304.11277; Korthikanti et al. 2022, arXiv:2205.05198.
"""
import argparse
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput,
                                               RowwiseParallel, SequenceParallel,
                                               parallelize_module)

from . import corpus
from . import data_parallel  # noqa: F401  mends fully_shard on the CPU in torch 2.6
from .gpt import Config, Decoder
from .ranks_agent import choose_backend

__all__ = ["Options", "adamw", "clip", "indices", "join", "load", "main", "newest", "pick", "save",
           "shard", "split_tensors", "tensor_plan", "train", "windows"]

STORED = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
_FIXED = ("seed", "batch", "length", "dtype", "model")  # a run that goes on cannot change these


class Refused(ValueError):
    """An option that cannot be, or that does not fit the ranks or the checkpoint."""


@dataclass(frozen=True)
class Options:
    """What a run does. ``batch`` counts sequences over all ranks, ``length`` their bytes.

    micro: sequences that a rank takes at a time (None: all of its share); save_every: steps
    between checkpoints; keep: how many of them stay; dtype: "float32", "float64", or
    "bfloat16", which computes in it and keeps parameters and gradients in float32.
    """
    out: Path
    steps: int = 100
    batch: int = 32
    length: int = 256
    micro: int | None = None
    tp: int = 1
    lr: float = 3e-3
    warmup: int = 20
    clip: float = 1.0
    dtype: str = "float32"
    seed: int = 0
    save_every: int = 50
    keep: int = 2
    resume: bool = False
    device: str | None = None
    trace: Path | None = None
    model: Config = field(default_factory=Config)

    def check(self, ranks):
        """Raise ``Refused`` for what cannot run on ``ranks`` ranks."""
        for name in ("steps", "batch", "length", "micro", "tp", "save_every", "keep", "lr", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise Refused(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if self.dtype not in STORED:
            raise Refused(f"--dtype must be one of {', '.join(STORED)}, got {self.dtype}")
        if ranks % self.tp:
            raise Refused(f"--tp {self.tp} does not divide the {ranks} ranks")
        data = ranks // self.tp
        if self.batch % data:
            raise Refused(f"--batch {self.batch} does not divide over {data} data ranks")
        if self.micro and self.batch // data % self.micro:
            raise Refused(f"--micro {self.micro} does not divide a rank's "
                          f"{self.batch // data} sequences")
        for name, size in (("--length", self.length), ("--kv-heads", self.model.kv_heads),
                           ("--hidden", self.model.hidden), ("--vocab", self.model.vocab)):
            if size % self.tp:
                raise Refused(f"--tp {self.tp} does not divide {name} {size}")


# ---------------------------------------------------------------- data

@functools.lru_cache(maxsize=2)
def _order(seed, epoch, count):
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(count, generator=generator)


def indices(step, batch, count, seed):
    """The windows that ``step`` (from 0) trains on: [batch] integers below ``count``.

    Steps read on through one endless sequence: all windows in an order drawn from
    (seed, 0), then all in one drawn from (seed, 1), and so on.
    """
    places = range(step * batch, (step + 1) * batch)
    return torch.stack([_order(seed, p // count, count)[p % count] for p in places])


def windows(data, which, length):
    """Windows ``which`` [B] of ``data`` [N] and the bytes that follow: two [B, length] int64."""
    at = which.to(data.device)[:, None] * length + torch.arange(length + 1, device=data.device)
    window = data[at].long()
    return window[:, :-1], window[:, 1:]


# ---------------------------------------------------------------- the model on its ranks

def tensor_plan(layers, sequence=True):
    """How DTensor splits a ``Decoder`` of so many layers, for ``parallelize_module``.

    By heads, by hidden units, by rows of the vocabulary; with ``sequence`` what lies between
    them by position. It unties the head: tie it again afterwards. The head returns a DTensor,
    with whole logits.
    """
    between = Shard(1) if sequence else Replicate()  # [B, T, D]: positions
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate(),
                                use_local_output=False),  # fully_shard warns of a view
    }
    for i in range(layers):
        block = f"blocks.{i}."
        plan |= {block + name: ColwiseParallel() for name in (
            "attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
        plan |= {block + name: RowwiseParallel(output_layouts=between) for name in (
            "attention.o", "mlp.down")}
        plan |= {block + "attention": _enter(between, 3), block + "mlp": _enter(between, 1)}
    if sequence:
        norms = [f"blocks.{i}.norm_{half}" for i in range(layers) for half in ("attention", "mlp")]
        plan |= {name: SequenceParallel() for name in (*norms, "norm")}
    return plan


def _enter(layout, inputs):
    """Make a module's first input whole, and sum its gradient, once for all layers in it."""
    rest = (None,) * (inputs - 1)
    return PrepareModuleInput(input_layouts=(layout, *rest),
                              desired_input_layouts=(Replicate(), *rest))


def split_tensors(model, mesh, sequence=True):
    """Split a ``Decoder`` over the 1-D ``mesh`` by ``tensor_plan``, in place; returns it."""
    with warnings.catch_warnings():  # older torch: about random numbers, unused here
        warnings.filterwarnings("ignore", message="DTensor random operators")
        parallelize_module(model, mesh, tensor_plan(model.config.layers, sequence))
    model.head.weight = model.embedding.weight  # splitting them one by one untied them
    return model


def shard(model, mesh, dtype="float32"):
    """Spread a ``Decoder`` over ``mesh`` ("data", "tensor"), in place; returns it.

    Every rank must hold the same parameters before. What a parameter becomes is a DTensor
    whose ``full_tensor()`` is the old one.
    """
    if mesh["tensor"].size() > 1:
        split_tensors(model, mesh["tensor"])
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data"], mp_policy=policy)


def adamw(model, lr):
    """AdamW that lets only matrices decay, by 0.1: norms are gains around 1.

    Cut and whole tensors stand in groups of their own, since one kernel takes one kind.
    """
    kinds = {}
    for p in model.parameters():
        kinds.setdefault((p.ndim == 2, isinstance(p, DTensor)), []).append(p)
    groups = [{"params": ps, "weight_decay": 0.1 * decays} for (decays, _), ps in kinds.items()]
    fused = all(p.is_cuda for p in model.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


# ---------------------------------------------------------------- checkpoints

def newest(folder):
    """The last whole checkpoint in ``folder``: (its path, its step), or (None, 0)."""
    found = sorted(Path(folder).glob("step-*"))
    return (found[-1], int(found[-1].name.split("-")[1])) if found else (None, 0)


def save(folder, facts, model, optimizer, keep=2):
    """Write a checkpoint of all ranks, publish it, and let only the last ``keep`` stay.

    facts: a dict for ``facts.json``, with the number of steps done under "step". The folder
    carries its final name only once it is whole: it is written under a hidden name, then
    renamed; an old one is renamed before it is deleted. Every rank must call this.
    """
    folder, name = Path(folder), f"step-{facts['step']:08d}"
    hidden = folder / f".{name}"
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.6 asks for it
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=hidden)
    if dist.get_rank() == 0:
        (hidden / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        _to_disk(hidden / "facts.json")
        _to_disk(hidden)
        hidden.rename(folder / name)
        _to_disk(folder)
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old.rename(folder / f".{old.name}"))
    dist.barrier()
    return folder / name


def load(checkpoint, model, optimizer):
    """Fill ``model`` and ``optimizer`` from a checkpoint of any number of ranks.

    Returns the facts it was saved with. Every rank must call this.
    """
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return json.loads((Path(checkpoint) / "facts.json").read_text(encoding="utf-8"))


def _to_disk(path):
    """Return when the file or folder will outlive a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _start(o):
    """The checkpoint to go on from, or None. Rank 0 looks and clears up, all hear of it."""
    found = [None]
    if dist.get_rank() == 0:
        o.out.mkdir(parents=True, exist_ok=True)
        for left in o.out.glob(".step-*"):  # of a run that was killed while it saved
            shutil.rmtree(left)
        found = [newest(o.out)[0]]
    dist.broadcast_object_list(found)
    if found[0] and not o.resume:
        raise Refused(f"{o.out} holds {found[0].name}: give --resume, or another --out")
    return found[0]


def _fixed(o):
    return {name: asdict(o)[name] for name in _FIXED}


def _refuse_another_run(o, facts):
    """Going on with another batch or seed would repeat some windows and lose others."""
    for name, now in _fixed(o).items():
        if facts[name] != now:
            raise Refused(f"--resume: {o.out} was made with {name} {facts[name]}, not {now}")


# ---------------------------------------------------------------- training

class _Stop:
    """Notes SIGINT and SIGTERM, so that a step or a checkpoint is finished first.

    Later ones change nothing: torchrun repeats the one that a terminal has sent.
    """

    def __enter__(self):
        self.by = None
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        self.by = self.by or number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def train(o):
    """Train as ``Options`` say, in the process group that there is.

    Returns (model, optimizer, step, signal): the signal that stopped it, or None.
    Raises Refused for options that do not fit the ranks, the text or the checkpoint.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    o.check(ranks)
    device = pick(o.device)
    mesh = init_device_mesh(device.type, (ranks // o.tp, o.tp), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(o.seed)
    model = shard(Decoder(o.model).to(STORED[o.dtype]), mesh, o.dtype)
    optimizer = adamw(model, o.lr)
    data = corpus.tokens("train").to(device)
    count = (len(data) - 1) // o.length
    if not count:
        raise Refused(f"--length {o.length}, but the text has {len(data)} bytes")
    checkpoint, step = _start(o), 0
    if checkpoint:
        facts = load(checkpoint, model, optimizer)
        _refuse_another_run(o, facts)
        step = facts["step"]
    if rank == 0:
        print(f"{ranks} ranks, {sum(p.numel() for p in model.parameters()):,} parameters, "
              f"from step {step}", flush=True)
    stopped = None
    with _Stop() as stop:
        while step < o.steps and not stopped:
            started = time.perf_counter()
            which = indices(step, o.batch, count, o.seed)
            mine = which.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
            for group in optimizer.param_groups:
                group["lr"] = o.lr * min(1, (step + 1) / o.warmup)
            loss = _step(o, model, optimizer, data, mine, mesh["data"].size())
            step += 1
            loss, stopped = _over_ranks(loss / ranks, stop.by, device)
            if o.trace:
                _trace(o.trace, rank, step, mine)
            if rank == 0:
                rate = o.batch * o.length / (time.perf_counter() - started)
                print(f"step {step}: loss {loss:.6f}, {rate:,.0f} tokens/s", flush=True)
            if stopped or step % o.save_every == 0 or step == o.steps:
                facts = {"step": step, "windows": step * o.batch, **_fixed(o)}
                saved = save(o.out, facts, model, optimizer, o.keep)
                if rank == 0:
                    print(f"saved {saved}", flush=True)
    return model, optimizer, step, stopped


def _step(o, model, optimizer, data, mine, data_ranks):
    """One update. Returns this rank's share of the mean loss, times the data ranks."""
    optimizer.zero_grad()
    pieces = mine.split(o.micro or len(mine))
    total = 0.0
    for i, piece in enumerate(pieces):
        model.set_requires_gradient_sync(i == len(pieces) - 1)
        inputs, targets = windows(data, piece, o.length)
        logits = model(inputs)
        logits = logits.to_local() if isinstance(logits, DTensor) else logits
        logits = logits.float() if o.dtype == "bfloat16" else logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss * (data_ranks / (o.batch * o.length))  # fully_shard takes the ranks' mean
        loss.backward()
        total += loss.detach()
    clip([p.grad for p in model.parameters()], o.clip)
    optimizer.step()
    return total


def clip(gradients, most):
    """Scale sharded gradients so that their norm is at most ``most``; returns the norm before.

    What ``clip_grad_norm_`` does, in one all-reduce for the whole grid. gradients: DTensors
    that lie on all ranks of the process group, each of them split or whole along each axis.
    """
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for g in gradients:
        copies = 1  # ranks that hold an element
        for place, size in zip(g.placements, g.device_mesh.shape):
            copies *= size if place.is_replicate() else 1
        squares += g.to_local().square().sum(dtype=torch.float64) / copies
    dist.all_reduce(squares)
    norm = squares.sqrt()
    scale = (most / (norm + 1e-6)).clamp(max=1)
    for g in gradients:
        g.to_local().mul_(scale.to(g.dtype))
    return norm


def _over_ranks(loss, signal_here, device):
    """(sum of the losses, a signal that any rank got or None): the same on all ranks."""
    flags = torch.zeros(3, dtype=torch.float64, device=device)
    flags[0] = loss
    for i, number in enumerate((signal.SIGTERM, signal.SIGINT), 1):
        flags[i] = signal_here == number
    dist.all_reduce(flags)
    loss, term, interrupt = flags.tolist()
    return loss, signal.SIGTERM if term else signal.SIGINT if interrupt else None


def _trace(folder, rank, step, mine):
    """Note what this rank has trained on. A restart that repeats a step notes it again."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    line = {"attempt": attempt, "pid": os.getpid(), "step": step, "windows": mine.tolist()}
    with (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------- the command

class _Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage."""

    def error(self, message):
        raise Refused(message)


_HELP = {
    "out": "folder for checkpoints", "steps": "steps in all", "batch": "sequences over all ranks",
    "length": "bytes of a sequence", "micro": "sequences a rank takes at a time (all)",
    "tp": "ranks that share each matrix", "warmup": "steps until the whole learning rate",
    "clip": "largest norm of the gradient", "dtype": ", ".join(STORED),
    "save_every": "steps between checkpoints", "keep": "how many checkpoints stay",
    "resume": "go on from the newest checkpoint, if there is one", "device": "cpu or cuda",
    "trace": "folder for a list of the windows that each rank trained on",
}
_SIZES = ("width", "layers", "heads", "kv_heads", "hidden")


def parse(argv):
    """``Options`` from a command line. Raises Refused for a mistake."""
    parser = _Parser(prog="companion.train", description=__doc__.splitlines()[0])
    for f in fields(Options):
        flag = "--" + f.name.replace("_", "-")
        if f.name == "resume":
            parser.add_argument(flag, action="store_true", help=_HELP[f.name])
        elif f.name != "model":
            convert = {"out": Path, "trace": Path, "micro": int, "lr": float, "clip": float,
                       "dtype": str, "device": str}.get(f.name, int)
            required = f.name == "out"
            parser.add_argument(flag, type=convert, required=required, metavar=f.name.upper(),
                                default=None if required else f.default, help=_HELP.get(f.name))
    for name in _SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(Config, name))
    given = vars(parser.parse_args(argv))
    sizes = {name: given.pop(name) for name in _SIZES}
    try:
        model = Config(**sizes, context=given["length"])
    except ValueError as error:
        raise Refused(str(error)) from None
    return Options(**given, model=model)


def pick(name):
    """This rank's device. name: "cpu", "cuda", or None for a GPU where every rank has one.

    Raises Refused where that cannot be.
    """
    if name not in (None, "cpu", "cuda"):
        raise Refused(f"--device must be cpu or cuda, got {name}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fits = torch.cuda.is_available() and choose_backend(here, torch.cuda.device_count()) == "nccl"
    if name == "cuda" and not fits:
        raise Refused(f"--device cuda: {here} ranks here, {torch.cuda.device_count()} GPUs")
    if name == "cpu" or not fits:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def join(device, **options):
    """Make the process group that torchrun describes, or one of this process alone.

    NCCL for a GPU, else gloo; options: such as ``timeout``. After a restart it is a new one.
    """
    group = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # One node's store outlives a restart, with the addresses of the dead ranks in it
            # (https://github.com/pytorch/pytorch/issues/135712). c10d's rendezvous makes one anew.
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        group = {"rank": rank, "world_size": size, "store": store}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group, **options)
    else:
        dist.init_process_group("gloo", **group, **options)


def main(argv=None):
    """The command. Returns its exit status: 0, 2 for a mistake, 128 + a signal that stopped it."""
    speaks = int(os.environ.get("RANK", 0)) == 0
    try:
        o = parse(argv)
        o.check(int(os.environ.get("WORLD_SIZE", 1)))
        join(pick(o.device))
        *_, step, stopped = train(o)
    except Refused as error:
        if speaks:
            print(f"companion.train: {error}", file=sys.stderr)
        stopped, status = None, 2
    else:
        status = 128 + stopped if stopped else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if stopped and speaks:
        print(f"stopped by {stopped.name} after step {step}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
