"""What a training step costs on many GPUs: seconds and bytes, from shapes and a registry.

    from companion.costs import Cluster, Layout, NETWORKS, search, step
    cluster = Cluster("H100", 16384, between=50e9)
    step(NETWORKS["Llama 3 405B"], cluster, Layout(tp=8, pp=16, dp=128), batch=2048, seq=8192)

Time is a sum of parts that do not overlap, except gradients, which hide behind the backward
pass of one micro-batch. Every part is work divided by a rate: matrix products by a share of
the GPU's peak, elementwise traffic by its memory bandwidth, messages by a share of the link.
The three shares in SHARES are the only numbers that were fitted (chapters/composing fits them,
to the rows of data/runs.csv that are not held out). ASSUMED are numbers set by argument.

Limits: a message costs no latency; stages differ by whole layers and the head only; experts
are balanced; no fp8; gradients are fp32. Ranks are ordered tensor, context, pipeline, data:
the first that is larger than a node goes over the network.

Standard library only.   Taught in: chapters/composing.
"""
import csv
import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources

from .hardware import Gpu, gpu

SHARES = {"Ampere": 0.629, "Hopper": 0.569, "link": 0.9}  # the fit of chapters/composing
ASSUMED = {
    "bytes of a gradient": 4,
    "times a saved byte is moved forward": 2,   # written once, read once
    "times a saved byte is moved backward": 4,  # read, and its gradient written and read
    "bytes moved per parameter by the optimizer": 30,
    "share of memory that a job can fill": 0.92,
}
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Network:
    """A decoder. ffn is the MLP's width; gated: three matrices (SwiGLU), not two.

    experts > 1: every MLP is that many, top_k of which see a token.
    """
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    dropout: bool = False
    experts: int = 1
    top_k: int = 1

    @property
    def kv_width(self):
        return self.hidden // self.heads * self.kv_heads

    @property
    def attention_parameters(self):
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def mlp_parameters(self):
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self):
        return self.attention_parameters + self.experts * self.mlp_parameters

    @property
    def parameters(self):
        """All of them but norms and biases."""
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * self.layer_parameters + tables

    def layer_flops(self, seq, causal):
        """Forward FLOPs of one layer for one token: (weights, attention scores)."""
        weights = 2 * (self.attention_parameters + self.top_k * self.mlp_parameters)
        return weights, 4 * seq * self.hidden / (2 if causal else 1)

    def model_flops(self, seq, causal=True):
        """FLOPs of one token, forward and backward, without recomputation."""
        layer = sum(self.layer_flops(seq, causal))
        return 3 * (self.layers * layer + 2 * self.vocab * self.hidden)


@dataclass(frozen=True)
class Cluster:
    """gpus of one kind in nodes; between: bytes/s per GPU and direction of the network.

    chip: a name of companion.hardware. inside: bytes/s per GPU and direction within a node,
    by default its NVLink.
    """
    chip: str
    gpus: int
    between: float
    per_node: int = 8
    inside: float | None = None

    @cached_property  # looked up by name, and asked for many thousand times in a fit
    def gpu(self) -> Gpu:
        return gpu(self.chip)

    def link(self, ranks):
        """Bytes/s of the slowest link among ``ranks`` neighboring ranks, by the label."""
        within = self.inside or self.gpu.link_bytes_per_s or self.gpu.pcie_bytes_per_s
        return within if ranks <= self.per_node else self.between


@dataclass(frozen=True)
class Layout:
    """How one step is cut. Its ranks are tp * cp * pp * dp; experts live inside dp * cp.

    micro: sequences in a micro-batch. chunks: model chunks a stage (1: 1F1B, more:
    interleaved). recompute: none, selective (attention's scores where they are not fused,
    else norms and the MLP's product) or full. zero: 0 to 3. sequence: Megatron's sequence
    parallelism beside tp. fused: attention that does not store its scores.
    """
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    micro: int = 1
    chunks: int = 1
    recompute: str = "none"
    zero: int = 1
    sequence: bool = True
    fused: bool = True

    @property
    def ranks(self):
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self):
        names = ("tp", "cp", "pp", "dp", "ep")
        cut = [f"{n}{getattr(self, n)}" for n in names if getattr(self, n) > 1]
        return " ".join(cut) or "one"


@dataclass(frozen=True)
class Step:
    """A step's seconds by part, a GPU's bytes by part, and what follows from them."""
    layout: Layout
    seconds: float
    parts: dict
    memory: dict
    fits: bool
    mfu: float

    @property
    def binds(self):
        """The part that costs most beyond the model's own products."""
        others = {k: v for k, v in self.parts.items() if k != "products"}
        return max(others, key=others.get)


def check(network, cluster, layout, batch):
    """Raise ValueError, with the numbers, for a layout that cannot be."""
    if layout.ranks != cluster.gpus:
        raise ValueError(f"costs: {layout} is {layout.ranks} ranks, not {cluster.gpus} GPUs")
    if layout.recompute not in RECOMPUTE:
        raise ValueError(f"costs: recompute is one of {RECOMPUTE}, not {layout.recompute!r}")
    if batch % (layout.dp * layout.micro):
        raise ValueError(f"costs: a batch of {batch} is not a multiple of dp {layout.dp} x "
                         f"micro {layout.micro}")
    if network.heads % layout.tp or network.hidden % layout.tp or network.ffn % layout.tp:
        raise ValueError(f"costs: tp {layout.tp} must divide {network.heads} heads")
    if layout.pp * layout.chunks > network.layers + 2:
        raise ValueError(f"costs: {network.layers} layers do not fill pp {layout.pp} x "
                         f"{layout.chunks} chunks")
    if layout.pp == 1 and layout.chunks > 1:
        raise ValueError("costs: one stage has nothing to interleave")
    if network.experts % layout.ep or (layout.dp * layout.cp) % layout.ep:
        raise ValueError(f"costs: ep {layout.ep} must divide {network.experts} experts and "
                         f"dp x cp {layout.dp * layout.cp}")


def saved_bytes(network, layout, seq):
    """16-bit bytes that one layer saves per token on one GPU: (without scores, scores).

    Source: Korthikanti et al. 2022, arXiv:2205.05198, whose 10 + 24/t + 5as/ht (34/t with
    sequence parallelism) this gives for their block.
    """
    n, split = network, layout.tp
    whole = 8 * n.hidden + (2 * n.hidden if n.dropout else 0)
    cut = 4 * n.hidden + 4 * n.kv_width + n.top_k * (6 if n.gated else 4) * n.ffn
    whole /= split if layout.sequence else 1
    scores = 4 * n.heads if layout.fused else (5 if n.dropout else 4) * n.heads * seq
    return whole + cut / split, scores / split


def _kept(network, layout, seq):
    """Bytes a layer keeps per token until its backward, under the layout's recomputation."""
    plain, scores = saved_bytes(network, layout, seq)
    share = layout.tp if layout.sequence else 1
    if layout.recompute == "full":
        return 2 * network.hidden / share
    if layout.recompute == "selective":
        if not layout.fused:
            return plain
        product = network.top_k * 2 * network.ffn / layout.tp
        return plain + scores - 4 * network.hidden / share - product
    return plain + scores


def _stage_layers(network, layout):
    """(layers of the fullest stage, layers of the last one, which also has the head)."""
    most = math.ceil(network.layers / layout.pp)
    return most, most - (1 if most * layout.pp > network.layers else 0)


def _held(network, layout):
    """Parameters that a GPU of the first stage holds, unsharded by ZeRO: (dense, experts)."""
    most, _ = _stage_layers(network, layout)
    tables = 1 if layout.pp > 1 or network.tied else 2
    dense = most * network.attention_parameters + tables * network.vocab * network.hidden
    experts = most * network.experts * network.mlp_parameters / layout.ep
    return dense / layout.tp, experts / layout.tp


def memory(network, layout, batch, seq):
    """Bytes on a GPU of the first stage: {"states", "gradients", "activations"}."""
    most, _ = _stage_layers(network, layout)
    here, n = sum(_held(network, layout)), layout.dp * layout.cp
    share = [1 / n if layout.zero >= level else 1 for level in (1, 2, 3)]
    each = ASSUMED["bytes of a gradient"]
    m = batch // (layout.dp * layout.micro)
    if layout.chunks > 1:  # the first stage holds more chunks than it has layers for
        flight = min(m, layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.chunks)))
    else:
        flight = min(m, layout.pp)
    tokens = layout.micro * seq / layout.cp
    kept = _kept(network, layout, seq)
    working = sum(saved_bytes(network, layout, seq)) if layout.recompute == "full" else 0
    gathered = 2 * 2 * here / most if layout.zero == 3 else 0
    logits = 6 * network.vocab / layout.tp if layout.pp == 1 else 0
    return {"states": here * (12 * share[0] + 2 * share[2]) + gathered,
            "gradients": here * each * share[1],
            "activations": tokens * (flight * most * kept + working + logits)}


def _layer_times(network, cluster, layout, seq, shares):
    """Seconds of one micro-batch in one layer: {part: (forward, backward)}."""
    n, tokens = network, layout.micro * seq / layout.cp
    rate = cluster.gpu.peak("bf16") * shares[cluster.gpu.architecture]
    hbm, links = cluster.gpu.hbm_bytes_per_s, shares["link"]
    weights, scores = n.layer_flops(seq, causal=layout.fused)
    forward = tokens * (weights + scores) / layout.tp / rate
    flash = tokens * scores / 2 / layout.tp / rate if layout.fused else 0  # scores made again
    plain, saved_scores = saved_bytes(n, layout, seq)
    once = tokens * (plain + saved_scores) / hbm
    to, back = (ASSUMED[f"times a saved byte is moved {way}"] for way in ("forward", "backward"))
    again = elementwise = 0.0
    if layout.recompute == "full":
        again, elementwise = forward, to * once
    elif layout.recompute == "selective" and not layout.fused:
        again = tokens * scores / layout.tp / rate
        elementwise = to * tokens * saved_scores / hbm
    elif layout.recompute == "selective":
        elementwise = to * tokens * (plain + saved_scores - _kept(n, layout, seq)) / hbm
    t, c, e = layout.tp, layout.cp, layout.ep
    reduce = 2 * (t - 1) / t * tokens * n.hidden * 2 / (links * cluster.link(t))
    ring = (c - 1) * tokens * 4 * n.kv_width / t / (links * cluster.link(t * c))
    dispatch = 2 * (e - 1) / e * tokens * n.top_k * n.hidden * 2 / t
    dispatch /= links * cluster.link(t * e)
    twice = 1 if layout.recompute == "full" else 0
    return {"products": (forward, 2 * forward), "recompute": (0, again + flash),
            "elementwise": (to * once, back * once + elementwise),
            "tp": (2 * reduce, (2 + 2 * twice) * reduce),
            "cp": (ring, (2 + twice) * ring), "ep": (dispatch, (1 + twice) * dispatch)}


def _head_times(network, cluster, layout, seq, shares):
    """Seconds of one micro-batch in the head and the loss: {part: (forward, backward)}."""
    tokens = layout.micro * seq / layout.cp
    rate = cluster.gpu.peak("bf16") * shares[cluster.gpu.architecture]
    one = tokens * 2 * network.vocab * network.hidden / layout.tp / rate
    moved = tokens * 4 * network.vocab / layout.tp / cluster.gpu.hbm_bytes_per_s
    to, back = (ASSUMED[f"times a saved byte is moved {way}"] for way in ("forward", "backward"))
    return {"products": (one, 2 * one), "elementwise": (to * moved, back * moved)}


def _gradient_seconds(network, cluster, layout, shares):
    """(seconds of the gradients' and weights' traffic in a step, the same per micro-batch)."""
    dense, experts = _held(network, layout)
    n, each = layout.dp * layout.cp, ASSUMED["bytes of a gradient"]
    inner = layout.tp * layout.cp * layout.pp
    lanes = max(1, cluster.per_node // inner)  # neighbors that share a ring's way out of a node
    speed = cluster.link(inner * layout.dp)
    if speed == cluster.between:
        speed = min(cluster.link(1), lanes * speed)
    speed *= shares["link"]
    total = (n - 1) / n * dense + (1 - layout.ep / n) * experts
    if layout.zero == 3:  # weights forward, weights backward, gradients: every micro-batch
        return 0.0, total * (2 + 2 + each) / speed
    return total * (each + (2 if layout.zero else each)) / speed, 0.0


def parts(network, cluster, layout, batch, seq, shares):
    """Seconds that each part of a training step takes: {name: seconds}. For ``step``."""
    m = batch // (layout.dp * layout.micro)
    most, last = _stage_layers(network, layout)
    layer = _layer_times(network, cluster, layout, seq, shares)
    head = _head_times(network, cluster, layout, seq, shares)
    each_layer, each_head = (sum(map(sum, t.values())) for t in (layer, head))
    slowest = max(most * each_layer, last * each_layer + each_head)
    mean = (network.layers * each_layer + each_head) / layout.pp
    found = {}
    for part, pair in layer.items():
        found[part] = m * network.layers / layout.pp * sum(pair)
    for part, pair in head.items():
        found[part] += m / layout.pp * sum(pair)
    found["imbalance"] = m * (slowest - mean)
    found["bubble"] = (layout.pp - 1) / layout.chunks * slowest
    message = layout.micro * seq / layout.cp * network.hidden * 2 / layout.tp
    ways = 2 * layout.chunks if layout.pp > 1 else 0
    link = cluster.link(layout.tp * layout.cp * layout.pp) * shares["link"]
    found["pp"] = m * ways * message / link
    backward = slowest - most * sum(pair[0] for pair in layer.values())
    once, every = _gradient_seconds(network, cluster, layout, shares)
    found["dp"] = max(0.0, once - backward) + m * max(0.0, every - slowest)
    owned = sum(_held(network, layout)) / (layout.dp * layout.cp if layout.zero else 1)
    moved = ASSUMED["bytes moved per parameter by the optimizer"]
    found["optimizer"] = owned * moved / cluster.gpu.hbm_bytes_per_s
    return found


def step(network, cluster, layout, batch, seq, shares=None, mfu_causal=True):
    """One training step of ``batch`` sequences of ``seq`` tokens: a ``Step``.

    shares: of the peak, by architecture, and of the link; SHARES by default. mfu_causal: count
    half of the attention scores as the model's FLOPs (the lower triangle).
    Raises ValueError for a layout that cannot be, and KeyError for an architecture without
    a share.
    """
    check(network, cluster, layout, batch)
    times = parts(network, cluster, layout, batch, seq, shares or SHARES)
    bytes_here, seconds = memory(network, layout, batch, seq), sum(times.values())
    useful = batch * seq * network.model_flops(seq, causal=mfu_causal)
    room = cluster.gpu.memory_bytes * ASSUMED["share of memory that a job can fill"]
    return Step(layout, seconds, times, bytes_here, sum(bytes_here.values()) <= room,
                useful / (cluster.gpus * cluster.gpu.peak("bf16") * seconds))


def _divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(network, cluster, batch, start=Layout(), free=("micro", "chunks", "recompute"),
            most_tp=8, most_cp=1):
    """Every layout of ``cluster`` that can be; ``start`` gives what is not searched.

    free: which of micro, chunks, recompute and zero to search besides tp, cp, pp and dp.
    """
    micros = (1, 2, 4, 8) if "micro" in free else (start.micro,)
    again = RECOMPUTE if "recompute" in free else (start.recompute,)
    zeros = (1, 3) if "zero" in free else (start.zero,)
    for tp, cp in itertools.product(_divisors(most_tp), _divisors(most_cp)):
        if network.heads % tp or network.ffn % tp or cluster.gpus % (tp * cp):
            continue
        for pp in _divisors(cluster.gpus // (tp * cp)):
            most, _ = _stage_layers(network, replace(start, pp=pp))
            if pp > 1 and not 0 <= most * pp - network.layers <= 2:
                continue
            dp = cluster.gpus // (tp * cp * pp)
            chunks = [d for d in _divisors(most) if d <= 8] if pp > 1 else [1]
            if "chunks" not in free and pp > 1:
                chunks = [d for d in chunks if d == start.chunks]
            for micro, v, r, z in itertools.product(micros, chunks, again, zeros):
                if batch % (dp * micro) == 0 and not (z == 3 and pp > 1):
                    yield replace(start, tp=tp, cp=cp, pp=pp, dp=dp, micro=micro, chunks=v,
                                  recompute=r, zero=z)


def search(network, cluster, batch, seq, start=Layout(), shares=None, fitting=True, **options):
    """Steps of every layout, quickest first; only those that fit unless fitting is False.

    options: as ``layouts`` takes them.
    """
    steps = (step(network, cluster, layout, batch, seq, shares)
             for layout in layouts(network, cluster, batch, start, **options))
    return sorted((s for s in steps if s.fits or not fitting), key=lambda s: s.seconds)


# ---------------------------------------------------------------- published runs

@dataclass(frozen=True)
class Run:
    """A published training run: what its report states, and what it leaves open.

    printed: ("seconds", s) of a step or ("FLOP/s", rate) per GPU, as the report counts them;
    open: fields of the layout that the report does not state; later: collected after the fit.
    """
    name: str
    network: Network
    cluster: Cluster
    layout: Layout
    batch: int
    seq: int
    printed: tuple
    open: tuple
    held_out: bool
    source: str
    counts: str = field(default="model", repr=False)
    later: bool = False

    @property
    def seconds(self):
        """Of a step, as printed, or from the printed FLOP/s by the report's way of counting."""
        kind, value = self.printed
        if kind == "seconds":
            return value
        flops = self.network.model_flops(self.seq, causal="causal" in self.counts)
        if "recomputation" in self.counts:
            n = self.network
            head = 3 * 2 * n.vocab * n.hidden
            flops = (flops - head) * 4 / 3 + head
        return self.batch * self.seq * flops / (value * self.cluster.gpus)

    @property
    def mfu(self):
        """By this book's count: no recomputation, half of the attention scores."""
        useful = self.batch * self.seq * self.network.model_flops(self.seq)
        return useful / (self.cluster.gpus * self.cluster.gpu.peak("bf16") * self.seconds)

    def predict(self, shares=None, layout=None):
        """The model's ``Step``: the quickest that fits of what the report leaves open.

        If none fits, the one that needs least memory (its ``fits`` says so).
        """
        choices = self._choices if layout is None else self._fitting(layout)
        return min((step(self.network, self.cluster, option, self.batch, self.seq, shares)
                    for option in choices), key=lambda s: s.seconds)

    def predicted_seconds(self, shares):
        """``predict(shares).seconds``, without what a fit that asks thousands of times can spare."""
        return min(sum(parts(self.network, self.cluster, option, self.batch, self.seq,
                             shares).values()) for option in self._choices)

    @cached_property  # memory does not depend on the shares, of which a fit tries hundreds
    def _choices(self):
        return self._fitting(self.layout)

    def _fitting(self, start):
        any_shares = {self.cluster.gpu.architecture: 1.0, "link": 1.0}
        steps = [step(self.network, self.cluster, option, self.batch, self.seq, any_shares)
                 for option in self._options(start)]
        good = [s.layout for s in steps if s.fits]
        return good or [min(steps, key=lambda s: sum(s.memory.values())).layout]

    def _options(self, start):
        micros = (1, 2, 4, 8) if "micro" in self.open else (start.micro,)
        again = RECOMPUTE if "recompute" in self.open else (start.recompute,)
        most, _ = _stage_layers(self.network, start)
        chunks = [start.chunks]
        if "chunks" in self.open:
            chunks = [d for d in _divisors(most) if d <= 8] if start.pp > 1 else [1]
        for micro, v, r in itertools.product(micros, chunks, again):
            if self.batch % (start.dp * micro) == 0:
                yield replace(start, micro=micro, chunks=v, recompute=r)


def _run(row):
    number = {k: int(row[k]) for k in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab",
                                       "gpus", "batch", "seq", "tp", "cp", "pp", "dp", "zero")}
    yes = {k: row[k] == "yes" for k in ("gated", "tied", "dropout", "sequence", "fused",
                                        "held_out")}
    network = Network(**{k: number[k] for k in ("layers", "hidden", "heads", "kv_heads", "ffn",
                                                "vocab")},
                      **{k: yes[k] for k in ("gated", "tied", "dropout")})
    cluster = Cluster(row["chip"], number["gpus"], float(row["between"]))
    stated = {k: int(row[k]) for k in ("micro", "chunks") if row[k]}
    if row["recompute"]:
        stated["recompute"] = row["recompute"]
    layout = Layout(**{k: number[k] for k in ("tp", "cp", "pp", "dp", "zero")},
                    sequence=yes["sequence"], fused=yes["fused"], **stated)
    kind, value = ("seconds", row["seconds"]) if row["seconds"] else ("FLOP/s", row["flops_per_s"])
    return Run(row["name"], network, cluster, layout, number["batch"], number["seq"],
               (kind, float(value)), tuple({"micro", "chunks", "recompute"} - set(stated)),
               yes["held_out"], row["source"], row["counts"], row["held_out"] == "later")


def fit(rows, precision=1000):
    """Shares that predict the steps of ``rows`` best, in relative error: a dict like SHARES.

    Least squares of the log of predicted / printed. One constant for each architecture of
    ``rows`` and one for all links: a scan over the link's in steps of 0.05, a bisection for
    the others. precision: the answer is rounded to 1 / precision.
    """
    kinds = sorted({r.cluster.gpu.architecture for r in rows})
    best = None
    for twentieths in range(6, 21):
        shares, total = {"link": twentieths / 20}, 0.0
        for kind in kinds:
            mine = [r for r in rows if r.cluster.gpu.architecture == kind]
            shares[kind], error = one_share(mine, kind, shares)
            total += error
        if best is None or total < best[0]:
            best = total, dict(shares)
    return {k: round(v * precision) / precision for k, v in best[1].items()}


def one_share(rows, kind, others, low=0.3, high=1.0):
    """(share of the peak of ``kind``, sum of squared logs there), the other shares given.

    Bisects on the sum of logs: predicted times do not rise with the share.
    """
    def logs(share):
        shares = {**others, kind: share}
        return [math.log(r.predicted_seconds(shares) / r.seconds) for r in rows]
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(logs(middle)) > 0 else (low, middle)
    share = (low + high) / 2
    return share, sum(x * x for x in logs(share))


@cache
def runs(later=False):
    """The published runs of data/runs.csv, in its order; later: those collected after the fit."""
    text = resources.files("companion").joinpath("data", "runs.csv").read_text(encoding="utf-8")
    found = [_run(row) for row in csv.DictReader(text.splitlines())]
    return [r for r in found if r.later == later]


NETWORKS = {
    "Llama 3 8B": Network(32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": Network(80, 8192, 64, 8, 28672, 128256),
    "Llama 3 405B": Network(126, 16384, 128, 8, 53248, 128256),
}
