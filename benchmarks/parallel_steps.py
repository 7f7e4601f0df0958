"""One training step of the book's decoder in every parallel form: time, memory, what is exposed.

Each form must first train a small model as one GPU does: three steps of SGD, so that a gradient
of the wrong size shows. Then the large one, weights and AdamW's moments in bf16, the same global
batch in every form. FLOPs are those of the mathematics: 6 per weight of a matrix and token, and
of attention only what the causal mask leaves. "exposed" is the share of a profiled step in which
NCCL's kernels run and no other kernel does; in a pipeline it holds the waiting for a neighbor.
"idle" is the share in which no kernel runs: the host has issued none.
"ring" doubles a sequence, forward and backward, while a line through the peaks of memory lets it;
"ring longest" is the length that the line allows in the end, really run. "experts" is one layer
with experts on all ranks.

PYTHONPATH=. torchrun --standalone --nproc-per-node 2 --max-restarts 3 benchmarks/parallel_steps.py
"""
import functools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from companion import corpus, pipeline, train
from companion.bench import mfu
from companion.gpt import Config, Decoder
from parallel_kit import Ledger, on_ranks, setting

LARGE = Config(width=3072, layers=16, heads=24, kv_heads=8, hidden=8192, context=2**21)
BATCH, LENGTH = 8, 2048  # of all ranks together; a pipeline's micro-batch is one sequence
SMALL = Config(width=64, heads=8, kv_heads=8, hidden=128, context=2**21)
SMALL_BATCH, SMALL_LENGTH = 8, 32
CLOSE = 1e-4  # relative, of a loss in float32


# ---------------------------------------------------------------- counting

def flops(config, batch, length):
    """Work of one step of a ``Decoder``, forward and backward, without recomputation [FLOP]."""
    head = config.width // config.heads
    layer = 2 * config.width**2 + 2 * config.width * config.kv_heads * head \
        + 3 * config.width * config.hidden
    weights = config.layers * layer + config.vocab * config.width
    pairs = length * (length + 1) // 2  # of a query and a key that it sees
    return 6 * batch * length * weights + 12 * config.layers * batch * config.width * pairs


def covered(spans):
    """Disjoint, sorted spans that cover the same as ``spans``, pairs (start, end)."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def exposed(kernels):
    """(time in which only NCCL runs, time in which it runs), in the unit of ``kernels``.

    kernels: (name, start, end) of everything that ran on one GPU.
    """
    def of(spans):
        return sum(end - start for start, end in covered(spans))
    both = [(start, end) for _, start, end in kernels]
    nccl = [(start, end) for name, start, end in kernels if name.startswith("nccl")]
    compute = [(start, end) for name, start, end in kernels if not name.startswith("nccl")]
    return of(both) - of(compute), of(nccl)


def kernels_of(trace):
    """(name, start, end) in microseconds of the kernels in a Chrome trace that torch wrote."""
    events = json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]


def profiled(ranks, step):
    """Of one step, for each rank: the shares in which NCCL runs alone ("exposed") and runs at all
    ("nccl"), and its seconds from the first kernel to the end of the last. None without a GPU."""
    if not ranks.cuda:
        return None
    ranks.synchronize()
    dist.barrier(group=ranks.talk)
    try:
        found = _shares(ranks, step)
    except Exception as error:  # a profiler that fails must not cost the times
        found = {"error": f"{type(error).__name__}: {error}"}
    return ranks.all(found)


def _shares(ranks, step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        step()
        ranks.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        p.export_chrome_trace(f"{folder}/trace.json")
        kernels = kernels_of(f"{folder}/trace.json")
    if not kernels:
        return None
    length = max(end for *_, end in kernels) - min(start for _, start, _ in kernels)
    alone, nccl = exposed(kernels)
    busy = sum(end - start for start, end in covered([(a, b) for _, a, b in kernels]))
    return {"exposed": alone / length, "nccl": nccl / length, "idle": 1 - busy / length,
            "seconds": length / 1e6}


# ---------------------------------------------------------------- the forms

def cross_entropy(logits, targets):
    logits = logits.to_local() if isinstance(logits, DTensor) else logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain_step(model, optimizer, share, scale):
    """step(x, y) -> this rank's part of the mean loss; ``share`` takes its part of the batch."""
    def step(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(share(x)), share(y))
        loss.backward()
        optimizer.step()
        return loss.detach() * scale
    return step


def one(ranks, model, make):
    return plain_step(model, make(model), lambda x: x, 1)


def _part(ranks):
    return lambda x: x.chunk(ranks.size)[ranks.rank]


def ddp(ranks, model, make):
    model = DistributedDataParallel(model, device_ids=[ranks.device] if ranks.cuda else None,
                                    gradient_as_bucket_view=True)
    return plain_step(model, make(model), _part(ranks), 1 / ranks.size)


def fsdp2(ranks, model, make):
    model = train.shard(model, ranks.mesh(data=ranks.size, tensor=1))
    return plain_step(model, make(model), _part(ranks), 1 / ranks.size)


def _tensor(sequence):
    def build(ranks, model, make):
        model = train.split_tensors(model, ranks.mesh(tensor=ranks.size), sequence)
        return plain_step(model, make(model), lambda x: x, 1 / ranks.size)
    return build


def fsdp2_tensor(ranks, model, make):
    """Rows of two ranks share the matrices; ``fully_shard`` over the columns."""
    mesh = ranks.mesh(data=ranks.size // 2, tensor=2)
    model = train.shard(model, mesh)
    data = mesh["data"]
    return plain_step(model, make(model), lambda x: x.chunk(data.size())[data.get_local_rank()],
                      1 / ranks.size)


def _piped(schedule, chunks=1, there_and_back=False, data=1):
    """A pipeline of all ranks, or of ``ranks.size / data`` with ``fully_shard`` over the rest.

    chunks: stages of a rank; there_and_back: the last stage lies on the first rank.
    """
    def build(ranks, model, make):
        mesh = ranks.mesh(data=data, pipe=ranks.size // data)
        n, rank = mesh["pipe"].size(), mesh["pipe"].get_local_rank()
        depth = n * chunks
        numbers = [rank + n * i for i in range(chunks)]
        if there_and_back:
            numbers = [rank, depth - 1 - rank]
        pieces = pipeline.cut(model, depth)
        held = {s: pieces[s] for s in numbers}
        if data > 1:
            for piece in held.values():
                for block in piece.blocks:
                    fully_shard(block, mesh=mesh["data"])
                fully_shard(piece, mesh=mesh["data"])
        stages = [pipelining.PipelineStage(held[s], s, depth, ranks.device,
                                           group=mesh["pipe"].get_group()) for s in numbers]
        optimizer = make(torch.nn.ModuleList(held.values()))
        engines = {}
        pairs = [(int(line[0]), int(line[-1])) for line in mesh.mesh]  # first and last of each pipe
        groups = [] if there_and_back else [ranks.group(pair) for pair in pairs]
        ends = groups[mesh["data"].get_local_rank()] if groups else None

        def step(x, y):
            x, y = (t.chunk(data)[mesh["data"].get_local_rank()] for t in (x, y))
            micros = x.shape[0]
            if micros not in engines:
                engines[micros] = getattr(pipelining, schedule)(
                    stages if chunks > 1 else stages[0], micros, loss_fn=cross_entropy)
            optimizer.zero_grad()
            losses = []
            last = {"target": y, "losses": losses} if depth - 1 in held else {}
            engines[micros].step(*([x] if 0 in held else []), **last)
            _sum_ends(held, depth, ends)
            optimizer.step()
            return torch.stack(losses).mean().detach() / data if losses else None
        return step
    return build


def _sum_ends(held, depth, group):
    """Sum the gradients of the embedding and of its copy in the head, on both their ranks."""
    weights = [held[0].embedding.weight] if 0 in held else []
    weights += [held[depth - 1].head.weight] if depth - 1 in held else []
    if len(weights) == 2:
        total = weights[0].grad + weights[1].grad
        for w in weights:
            w.grad = total.clone()
    elif weights:
        grad = weights[0].grad  # both ends shard it alike
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


# name -> (how to build it, fewest ranks)
FORMS = {
    "one GPU": (one, 1),
    "DDP": (ddp, 2),
    "FSDP2": (fsdp2, 2),
    "TP": (_tensor(False), 2),
    "TP+SP": (_tensor(True), 2),
    "GPipe": (_piped("ScheduleGPipe"), 2),
    "1F1B": (_piped("Schedule1F1B"), 2),
    "interleaved": (_piped("ScheduleInterleaved1F1B", 2), 2),
    "zero-bubble": (_piped("ScheduleInterleavedZeroBubble", 2), 2),
    "zero-bubble V": (_piped("ScheduleZBVZeroBubble", 2, True), 2),
    "FSDP2 x TP+SP": (fsdp2_tensor, 4),
    "FSDP2 x 1F1B": (_piped("Schedule1F1B", data=2), 4),
}


# ---------------------------------------------------------------- equal, then timed

def batch(ranks, count, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = corpus.batch(corpus.tokens("train"), count, length, generator)
    return x.to(ranks.device), y.to(ranks.device)


def decoder(ranks, config, dtype):
    """The same weights on every rank, drawn where they lie."""
    torch.manual_seed(0)
    with torch.device(ranks.device):
        return Decoder(config).to(dtype)


def small(ranks):
    """The toy sizes, with as many layers as the deepest pipeline has stages."""
    return replace(SMALL, layers=2 * ranks.size)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)  # cut and whole tensors


def adamw(model):
    return train.adamw(model, 1e-4)


def losses(ranks, build, steps=3):
    """Of the small model in float32, step by step: the sum of what the ranks returned."""
    step = build(ranks, decoder(ranks, small(ranks), torch.float32), sgd)
    found = []
    for i in range(steps):
        part = step(*batch(ranks, SMALL_BATCH, SMALL_LENGTH, seed=i))
        found.append(0.0 if part is None else part.item())
    return [sum(each) for each in zip(*ranks.all(found))]


@functools.cache
def _alone(ranks):
    return losses(ranks, lambda r, model, make: plain_step(
        model, make(model), lambda x: x, 1 / r.size))


def equal(ranks, build):
    """Losses of ``build`` and of one process; ValueError if they differ."""
    alone, ours = _alone(ranks), losses(ranks, build)
    apart = max(abs(a - b) / b for a, b in zip(ours, alone, strict=True))
    if not apart < CLOSE:
        raise ValueError(f"steps: losses {ours}, but one process has {alone}")
    return {"losses": ours, "one_process": alone, "largest_relative_difference": apart}


def measure(ranks, name, o):
    """Check the form, then time its step on the large model."""
    build, fewest = FORMS[name]
    if ranks.size < fewest:
        raise ValueError(f"steps: {name} needs at least {fewest} ranks")
    works = 1 if name == "one GPU" else ranks.size
    found = {"works": works}
    if works > 1:
        found["equal"] = equal(ranks, build)
    ranks.clear()
    config, count, length, dtype = LARGE, BATCH, LENGTH, torch.bfloat16
    if o.tiny:
        config, count, length, dtype = small(ranks), SMALL_BATCH, SMALL_LENGTH, torch.float32
    x, y = batch(ranks, count, length)
    step = None
    if ranks.rank < works:
        step = build(ranks, decoder(ranks, config, dtype), adamw)
    ranks.clear()

    def once():
        if step is not None:
            step(x, y)
    seconds, low, high = ranks.seconds(once, repeats=1 if o.tiny else 4, warm_ups=1)
    found |= {"config": asdict(config), "batch": count, "length": length, "dtype": str(dtype),
              "seconds": seconds, "low": low, "high": high, "peak_bytes": ranks.peaks(),
              "tokens_per_s": count * length / seconds, "flops": flops(config, count, length),
              "profile": profiled(ranks, once)}
    found["summary"] = f"{found['tokens_per_s']:,.0f} tokens/s"
    if ranks.gpu:
        found["mfu"] = mfu(found["flops"], seconds, ranks.gpu.peak("bf16"), works)
        found["summary"] += f", MFU {found['mfu']:.3f}"
    return found


# ---------------------------------------------------------------- long sequences, and experts

def _ring(n):
    """The first ``n`` ranks share each sequence; their gradients are summed."""
    from companion.ring_attention import decoder_logits, positions, ring_attention

    def build(ranks, model, make):
        group, optimizer = ranks.group(tuple(range(n))), make(model)

        def attend(q, k, v):
            if n == 1:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return ring_attention(q, k, v, group=group)

        def step(x, y):
            at = positions(x.shape[1], ranks.rank, n) if n > 1 else torch.arange(x.shape[1])
            at = at.to(ranks.device)
            optimizer.zero_grad()
            loss = cross_entropy(decoder_logits(model, x[:, at], at, attend), y[:, at]) / n
            loss.backward()
            for p in model.parameters():
                if n > 1:
                    dist.all_reduce(p.grad, group=group)
            optimizer.step()
            return loss.detach()
        return step
    return build


class Reach:
    """Times and peaks of the large model over the length of one sequence, on ``n`` ranks."""

    def __init__(self, ranks, n, tiny):
        self.ranks, self.n, self.tiny = ranks, n, tiny
        self.config, self.dtype = (small(ranks), torch.float32) if tiny else (LARGE, torch.bfloat16)
        ranks.group(tuple(range(n)))
        self.step = None
        if ranks.rank < n:
            self.step = _ring(n)(ranks, decoder(ranks, self.config, self.dtype),
                                 lambda model: torch.optim.SGD(model.parameters(), lr=0.0))

    def at(self, length):
        """One sequence of this length, its loss too."""
        self.ranks.clear()
        held = []

        def once():
            if self.step is not None:
                held.append(self.step(*batch(self.ranks, 1, length)).item())
        # A long one is its own warm-up: what the first call adds does not show in it.
        seconds, *_ = self.ranks.seconds(once, 1, 1 if length <= 2**14 else 0)
        return {"length": length, "seconds": seconds, "peak_bytes": self.ranks.peaks(),
                "reserved_bytes": self.ranks.peaks(reserved=True),
                "loss": sum(self.ranks.all(held[-1] if held else 0.0)),
                "flops": flops(self.config, 1, length)}

    def limit(self, rows):
        """Tokens at which a line through the last two peaks meets the memory of the GPU."""
        a, b = rows[-2:]
        room = torch.cuda.mem_get_info()[1]
        low, high = (max(r["reserved_bytes"][:self.n]) for r in (a, b))
        slope = (high - low) / (b["length"] - a["length"])
        return min(self.ranks.all(b["length"] + (room - high) / slope))


def ring(ranks, n, o):
    """Double the sequence while it will fit."""
    found = {"equal": equal(ranks, _ring(n))} if n == ranks.size else {}
    reach = Reach(ranks, n, o.tiny)
    first = 256 if o.tiny else 8192
    rows = [reach.at(first), reach.at(2 * first)]
    while ranks.cuda and 2 * rows[-1]["length"] < 0.9 * reach.limit(rows):
        rows.append(reach.at(2 * rows[-1]["length"]))
    if ranks.cuda:
        found |= {"limit": reach.limit(rows), "memory_bytes": torch.cuda.mem_get_info()[1]}
    return {**found, "rows": rows, "summary": f"{rows[-1]['length']} tokens in "
                                              f"{rows[-1]['seconds']:.2f} s"}


def ring_longest(ranks, n, o, ledger):
    """A twentieth less than the limit, for CUDA's own memory and for gaps."""
    found = ledger.row(f"ring {n}")
    length = int(0.95 * found.get("limit", 600)) // 128 * 128
    row = Reach(ranks, n, o.tiny).at(length)
    return {**row, "summary": f"{length} tokens in {row['seconds']:.2f} s"}


def experts(ranks, o):
    """One layer of experts, forward and backward: on one rank, then spread over all."""
    from companion.experts import ExpertParallel, MoE
    n, rank = ranks.size, ranks.rank
    count = max(8, n)
    width, hidden, tokens = (64, 128, 512) if o.tiny else (LARGE.width, LARGE.hidden, 16384)
    torch.manual_seed(0)
    with torch.device(ranks.device):
        whole = MoE(64, 128, experts=count, k=2)
        x = torch.randn(32 * n, 64)
    mine = x.chunk(n)[rank]
    apart = (ExpertParallel(whole)(mine) - whole(x).chunk(n)[rank]).abs().max().item()
    apart = max(ranks.all(apart))
    if not apart < 1e-4:
        raise ValueError(f"steps: experts differ from one process by {apart}")
    found = {"experts": count, "k": 2, "width": width, "hidden": hidden, "tokens": tokens,
             "largest_difference": apart,
             "flops": 6 * tokens * width * (2 * 3 * hidden + count)}
    dtype = torch.float32 if o.tiny else torch.bfloat16
    for form in "one", "spread":
        ranks.clear()
        torch.manual_seed(0)
        with torch.device(ranks.device):
            layer = MoE(width, hidden, experts=count, k=2).to(dtype)
            x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
        works = form == "spread" or rank == 0
        if form == "spread":
            layer = ExpertParallel(layer)
            x = x.detach().chunk(n)[rank].clone().requires_grad_()
        ranks.clear()

        def once():
            if works:
                layer.zero_grad()
                layer(x).square().mean().backward()
        seconds, low, high = ranks.seconds(once, 2 if o.tiny else 5)
        found[form] = {"seconds": seconds, "low": low, "high": high, "peak_bytes": ranks.peaks(),
                       "profile": profiled(ranks, once)}
    times = found["one"]["seconds"] / found["spread"]["seconds"]
    return {**found, "summary": f"{times:.2f} times one rank"}


def main(o, ranks):
    ledger = Ledger(ranks, f"parallel_steps_{ranks.size}", __file__, o.out, setting(ranks),
                    o.budget)
    plans = {name: lambda name=name: measure(ranks, name, o)
             for name, (_, fewest) in FORMS.items() if ranks.size >= fewest}
    if ranks.size > 1:
        plans["experts"] = lambda: experts(ranks, o)
    for n in dict.fromkeys((1, ranks.size)):
        plans[f"ring {n}"] = lambda n=n: ring(ranks, n, o)
        plans[f"ring {n} longest"] = lambda n=n: ring_longest(ranks, n, o, ledger)
    for name in o.only.split(",") if o.only else plans:
        if name not in plans:
            raise SystemExit(f"parallel_steps: no {name!r} here; there are {', '.join(plans)}")
        ledger.run(name, plans[name])


if __name__ == "__main__":
    on_ranks(main, __doc__)
