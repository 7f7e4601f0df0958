"""Train the small decoder with every optimizer of chapters/optimizers, at tuned rates.

Each optimizer gets the same budget: its rate is the best of eight, a factor of two apart, by
the training loss of one tuning seed (a best one at the end of the ladder is followed by the
next eight); nothing else is tuned and there is no weight decay.
Then eight fresh seeds train at that rate: for equal steps, and again for as many steps as
fit into the time that AdamW took. bf16 autocast over fp32 weights on a GPU (fp32 on a CPU);
gradients of norm above 1 are scaled down; warm-up, constant rate, linear decay to 0 over the
last fifth. Variants of AdamW take AdamW's rate.

Members are stacked: each weight is [S, ...] and a batch is [S*B, T], so one step trains S
models that never meet, each with its own seed and rate; on a GPU a step is one CUDA graph.
Every optimizer sees the same first weights and batches of a seed: compare in pairs.
A last part fine-tunes the trained decoder on text whose letters have the other case, in full
and with LoRA, at a ladder of rates.

Writes optimizers.json after each run and goes on from the one that is there (``--fresh``
starts again); ``--package`` copies what the chapter shows to companion/data and stops.

Letters: S members, B batch, T positions, P parameters, R x C a matrix, r rank.

    PYTHONPATH=. python benchmarks/optimizers.py --out benchmarks/results
"""
import argparse
import functools
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from companion import corpus, gpt, optimizers, pick_device
from companion.gpt import Config, Decoder
from precision_recipes import plain_product, rounded, stacked_decoder
from provenance import RESULTS, provenance, save

CLIP, BETAS, TUNING_SEED = 1.0, (0.9, 0.95), 100
CONFIGS = {"small": Config(),
           "toy": Config(width=64, layers=2, heads=2, kv_heads=1, hidden=128)}
LOWEST = {"AdamW": 5e-4, "SGD + momentum": 2e-2, "Lion": 3e-5, "Adafactor": 5e-3,
          "Muon": 1e-3, "GaLore": 2e-3}
VARIANTS = ["AdamW, nudged start", "AdamW, bf16 moments", "AdamW, bf16 moments, beta2 0.999",
            "AdamW, beta2 0.999", "AdamW, 8-bit moments", "AdamW, 8-bit, linear code for v"]


# --- rules: how w [S, P] moves, given g [S, P], a rate [S, 1] and the step t -----------------

class Elementwise:
    """Directions that treat every number alike; ``moments`` states of one dtype."""

    def __init__(self, direction, moments, dtype=torch.float32):
        self.direction, self.moments, self.dtype = direction, moments, dtype

    def start(self, w, layout):
        self.state = [torch.zeros_like(w, dtype=self.dtype) for _ in range(self.moments)]

    def update(self, w, g, lr, t):
        w.sub_(lr * self.direction(g, *self.state, t))


class EightBit:
    """AdamW whose moments are kept as 8-bit codes with a scale a block."""

    def __init__(self, linear_v=False):
        self.linear_v = linear_v

    def start(self, w, layout):
        self.block = math.gcd(256, *(math.prod(shape) for _, _, shape in layout))
        self.levels = [optimizers.dynamic_levels(signed).to(w.device) for signed in (True, False)]
        if self.linear_v:
            self.levels[1] = torch.linspace(0, 1, 256, device=w.device)
        self.state = [part for levels in self.levels
                      for part in optimizers.encode(torch.zeros_like(w), levels, self.block)]

    def update(self, w, g, lr, t):
        moments = [optimizers.decode(*self.state[i:i + 2], self.levels[i // 2]) for i in (0, 2)]
        w.sub_(lr * optimizers.adamw(g, *moments, t, BETAS))
        for i, moment in zip((0, 2), moments):
            for old, new in zip(self.state[i:i + 2],
                                optimizers.encode(moment, self.levels[i // 2], self.block)):
                old.copy_(new)


def matrices_by_shape(layout):
    """{(R, C): where they begin} of the matrices inside the blocks."""
    found = {}
    for name, begin, shape in layout:
        if len(shape) == 2 and "blocks" in name:
            found.setdefault(shape, []).append(begin)
    return found


def gathered(x, shape, begins):
    """x [S, P] -> [S, n, R, C]: the matrices of one shape."""
    parts = [x[:, b:b + math.prod(shape)] for b in begins]
    return torch.stack(parts, 1).unflatten(-1, shape)


def scattered_sub(w, step_SnRC, begins):
    for i, b in enumerate(begins):
        part = step_SnRC[:, i].flatten(1)
        w[:, b:b + part.shape[1]].sub_(part)


class MatrixRule:
    """A rule for the matrices of the blocks; AdamW at the same rate for all the rest."""

    def start(self, w, layout):
        self.groups = matrices_by_shape(layout)
        whole = torch.ones(w.shape[1], dtype=torch.bool)
        for shape, begins in self.groups.items():
            for b in begins:
                whole[b:b + math.prod(shape)] = False
        self.rest = whole.nonzero()[:, 0].to(w.device)
        moments = [w.new_zeros(w.shape[0], len(self.rest)) for _ in "mv"]
        self.own = {shape: self.start_group(w, len(b), *shape) for shape, b in self.groups.items()}
        self.state = moments + [t for own in self.own.values() for t in own]

    def update(self, w, g, lr, t):
        d = optimizers.adamw(g[:, self.rest], *self.state[:2], t, BETAS)
        w.index_add_(1, self.rest, -lr * d)
        for shape, begins in self.groups.items():
            d = self.direct(gathered(g, shape, begins), self.own[shape], t)
            scattered_sub(w, lr[..., None, None] * d, begins)


class Muon(MatrixRule):
    def start_group(self, w, n, R, C):
        return [w.new_zeros(w.shape[0], n, R, C)]

    def direct(self, g, own, t):
        return optimizers.muon(g, *own)


class GaLore(MatrixRule):
    """Adam on gradients projected to a quarter of the short side's rank."""

    scale, gap = 0.25, 200

    def start_group(self, w, n, R, C):
        short, long = min(R, C), max(R, C)
        r = short // 4
        return [w.new_zeros(w.shape[0], n, *s) for s in ((short, r), (r, long), (r, long))]

    def refresh(self, g):
        """New projections: the leading singular vectors of the short side of ``g``."""
        for shape, begins in self.groups.items():
            G = _wide(gathered(g, shape, begins)).nan_to_num(0, 0, 0)  # a member may diverge
            P = self.own[shape][0]
            _, vectors = torch.linalg.eigh(G @ G.mT)
            P.copy_(vectors[..., -P.shape[-1]:])

    def direct(self, g, own, t):
        P, m, v = own
        d = self.scale * P @ optimizers.adamw(P.mT @ _wide(g), m, v, t, BETAS)
        return d.mT if g.shape[-2] > g.shape[-1] else d


def _wide(G):
    return G.mT if G.shape[-2] > G.shape[-1] else G


class Adafactor:
    def start(self, w, layout):
        self.layout, self.own = layout, []
        S = w.shape[0]
        for _, _, shape in layout:
            sides = [(shape[0], 1), (1, shape[1])] if len(shape) == 2 else [shape]
            self.own.append([w.new_zeros(S, *side) for side in sides])
        self.state = [t for own in self.own for t in own]

    def update(self, w, g, lr, t):
        for (_, b, shape), own in zip(self.layout, self.own):
            part, gradient = (x[:, b:b + math.prod(shape)].unflatten(1, shape) for x in (w, g))
            rate = lr.view(-1, *[1] * len(shape))
            part.sub_(optimizers.adafactor(gradient, part, own, rate, t))


class Nothing:
    """No update: what forward and backward take alone."""
    state = ()

    def start(self, w, layout):
        pass

    def update(self, w, g, lr, t):
        pass


def rule(name):
    def adamw(betas=BETAS, dtype=torch.float32):
        return Elementwise(lambda g, m, v, t: optimizers.adamw(g, m, v, t, betas), 2, dtype)

    slow, b16 = (BETAS[0], 0.999), torch.bfloat16
    return {
        "AdamW": adamw, "AdamW, nudged start": adamw, "SGD + momentum": lambda: Elementwise(
            lambda g, m, t: optimizers.momentum(g, m), 1),
        "Lion": lambda: Elementwise(lambda g, m, t: optimizers.lion(g, m), 1),
        "Adafactor": Adafactor, "Muon": Muon, "GaLore": GaLore, "no update": Nothing,
        "AdamW, bf16 moments": lambda: adamw(dtype=b16),
        "AdamW, bf16 moments, beta2 0.999": lambda: adamw(slow, b16),
        "AdamW, beta2 0.999": lambda: adamw(slow),
        "AdamW, 8-bit moments": EightBit,
        "AdamW, 8-bit, linear code for v": lambda: EightBit(linear_v=True),
    }[name]()


# --- training -------------------------------------------------------------------------------

def layout_of(config):
    """[(name, first column, shape)] of the decoder's parameters in a row [P]."""
    found, begin = [], 0
    for name, p in Decoder(config).named_parameters():
        found.append((name, begin, tuple(p.shape)))
        begin += p.numel()
    return found


def first_weights(seeds, config):
    """[S, P] fp32 on the CPU: row i is what ``torch.manual_seed(seeds[i]); Decoder()`` has."""
    return torch.stack([_first_row(seed, config) for seed in seeds])


@functools.cache
def _first_row(seed, config):
    torch.manual_seed(seed)
    return torch.cat([p.detach().flatten() for p in Decoder(config).parameters()])


def schedule(steps):
    """Multiples of the rate [steps, 1]: warm-up, constant, linear to 0 over the last fifth."""
    warm, decay = min(40, steps // 4), steps // 5
    return torch.tensor([[min(1.0, (i + 1) / warm, (steps - i) / decay)] for i in range(steps)])


def window_starts(data, seeds, steps, batch, length):
    """[steps, S, B]: where the windows begin, as ``corpus.batch`` draws them for each seed."""
    starts = torch.empty(steps, len(seeds), batch, dtype=torch.long)
    for s, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        for i in range(steps):
            starts[i, s] = torch.randint(len(data) - length, (batch, 1), generator=generator)[:, 0]
    return starts


class Trainer:
    """S stacked decoders under one rule; ``run`` trains them from their first weights."""

    def __init__(self, rule, weights, config, batch, length, device, table=None):
        self.rule, self.config, self.B, self.T, self.device = rule, config, batch, length, device
        self.weights = weights.to(device)
        self.S = len(weights)
        self.flat = self.weights.clone()
        self.model, self.parameters = self.build(self.flat)
        rule.start(self.flat, self.layout())
        data = corpus.tokens("train")
        self.data = (data if table is None else table[data.long()]).to(device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)

    def layout(self):
        return layout_of(self.config)

    def build(self, flat):
        model, parameters = stacked_decoder(flat, plain_product, 0, self.config)
        return model.to(self.device), parameters

    def losses(self, x, y):
        """[S] mean cross entropies of x, y [S*B, T]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda",
                            cache_enabled=False):
            logits = self.model(x)
        each = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
        return each.view(self.S, -1).mean(1)

    def gradient(self):
        """(losses [S], gradient [S, P] with each member's norm at most CLIP)."""
        starts = self.starts.index_select(0, self.index).view(-1, 1)
        window = self.data[starts + torch.arange(self.T + 1, device=self.device)].long()
        losses = self.losses(window[:, :-1], window[:, 1:])
        parts = torch.autograd.grad(losses.sum(), self.parameters)
        g = torch.cat([part.reshape(self.S, -1) for part in parts], 1)
        norm = g.square().sum(1, keepdim=True).sqrt()
        return losses.detach(), g * (CLIP / (norm + 1e-6)).clamp(max=1)

    def step(self):
        losses, g = self.gradient()
        with torch.no_grad():
            lr = self.lrs.index_select(0, self.index).view(-1, 1)
            self.rule.update(self.flat, g, lr, self.index + 1.0)
            self.curve.index_copy_(0, self.index, losses[None])
            self.index += 1

    @torch.no_grad()
    def reset(self):
        self.flat.copy_(self.weights)
        self.index.zero_()
        for t in self.rule.state:
            t.zero_()  # a code times a scale of 0 is 0 too

    def run(self, seeds, lrs):
        """lrs [steps, S]; returns (losses [steps, S], seconds of the steps alone)."""
        steps = len(lrs)
        self.starts = window_starts(self.data, seeds, steps, self.B, self.T).to(self.device)
        self.lrs = lrs.expand(-1, self.S).to(self.device)
        self.curve = torch.zeros(steps, self.S, device=self.device)
        step = self.captured() if self.device.type == "cuda" else self.step
        self.reset()
        self._wait()
        begun = time.perf_counter()
        for i in range(steps):
            if isinstance(self.rule, GaLore) and i % GaLore.gap == 0:
                self.rule.refresh(self.gradient()[1])
            step()
        self._wait()
        return self.curve.cpu(), time.perf_counter() - begun

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def captured(self):
        """One step as a CUDA graph's replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.index.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    @torch.no_grad()
    def held_out(self, limit=None, table=None, windows=64):
        """Held-out loss [S] in nats a byte."""
        data = corpus.tokens("heldout")[:limit]
        data = data if table is None else table[data.long()]
        inputs, targets = corpus.windows(data, self.T)
        total = torch.zeros(self.S, device=self.device)
        for x, y in zip(inputs.split(windows), targets.split(windows)):
            x, y = (t.to(self.device).repeat(self.S, 1) for t in (x, y))
            total += self.losses(x, y) * (y.numel() / self.S)
        return total / targets.numel()


def blocks(curve, size=20):
    """Mean losses of consecutive ``size`` steps: [steps // size][S], rounded."""
    n = len(curve) // size
    means = curve[:n * size].view(n, size, curve.shape[1]).mean(1)
    return [rounded(row, 4) for row in means.tolist()]


def last_loss(curve):
    """Mean loss [S] of the last tenth of the steps: text that is seen for the first time."""
    return curve[-max(1, len(curve) // 10):].mean(0)


def best_of(losses):
    scores = [v if math.isfinite(v) else math.inf for v in losses]
    return scores.index(min(scores))


def tune(name, o, device):
    """Losses of a ladder of rates, and the best; a second ladder where the best is an end."""
    rates = [LOWEST[name] * 2**k for k in range(o.rates)]
    losses = ladder(name, rates, o, device)
    best = best_of(losses)
    if best == o.rates - 1:
        more = [rates[-1] * 2**k for k in range(1, o.rates + 1)]
        rates, losses = rates + more, losses + ladder(name, more, o, device)
    elif best == 0:
        more = [rates[0] / 2**k for k in range(o.rates, 0, -1)]
        rates, losses = more + rates, ladder(name, more, o, device) + losses
    best = best_of(losses)
    return {"rates": rates, "loss": rounded(losses, 4), "best": rates[best],
            "inside": 0 < best < len(rates) - 1}


def ladder(name, rates, o, device):
    """Last training loss at each rate, all trained at once from the tuning seed."""
    n, config = len(rates), CONFIGS[o.model]
    weights = first_weights((TUNING_SEED,) * n, config)
    trainer = Trainer(rule(name), weights, config, o.batch, o.length, device)
    curve, _ = trainer.run([TUNING_SEED] * n, schedule(o.steps) * torch.tensor(rates))
    return last_loss(curve).tolist()


def train(name, lr, steps, o, device):
    """Fresh seeds at one rate: held-out losses, curve, bytes of state, ms a step."""
    config, seeds = CONFIGS[o.model], list(range(o.seeds))
    weights = first_weights(seeds, config)
    if "nudged" in name:
        weights = weights * (1 + 1e-6)
    trainer = Trainer(rule(name), weights, config, o.batch, o.length, device)
    curve, seconds = trainer.run(seeds, schedule(steps) * lr)
    state = sum(t.numel() * t.element_size() for t in trainer.rule.state)
    return {"lr": lr, "steps": steps, "heldout": rounded(trainer.held_out(o.held_out).tolist()),
            "last": rounded(last_loss(curve).tolist()), "curve": blocks(curve),
            "state_bytes": state // o.seeds, "ms": round(1e3 * seconds / steps, 4)}


# --- LoRA: what learning rate it wants, against all weights ----------------------------------

class LoraTrainer(Trainer):
    """Adapters of rank r on the linear layers of the blocks of the trained decoder.

    ``flat`` holds the adapters: for each matrix A [r, C], then B [R, r]; B starts at 0 and
    the weight is W + (32 / r) B A.
    """

    def __init__(self, rank, base, *rest):
        self.rank, self.base = rank, base  # base [P]
        super().__init__(*rest)

    def layout(self):
        found, begin = [], 0
        for name, b, shape in layout_of(self.config):
            if len(shape) == 2 and "blocks" in name:
                for part, side in ("A", (self.rank, shape[1])), ("B", (shape[0], self.rank)):
                    found.append((f"{name}.{part}", begin, side))
                    begin += math.prod(side)
        return found

    def build(self, flat):
        base = self.base.to(self.device).expand(self.S, -1)
        model, _ = stacked_decoder(base, plain_product, 0, self.config)
        for p in model.parameters():
            p.requires_grad_(False)
        parts = {name: torch.nn.Parameter(flat[:, b:b + math.prod(s)].unflatten(1, s))
                 for name, b, s in self.layout()}
        for name, module in model.named_modules():
            if f"{name}.weight.A" in parts:
                module.product = _with_adapter(
                    parts[f"{name}.weight.A"], parts[f"{name}.weight.B"], 32 / self.rank)
        return model.to(self.device), list(parts.values())


def _with_adapter(A, B, scale):
    def product(x_SNK, w_SFK):
        return plain_product(x_SNK, w_SFK) + scale * plain_product(plain_product(x_SNK, A), B)
    return product


def first_adapters(seeds, rank, config):
    rows = []
    for seed in seeds:
        generator, row = torch.Generator().manual_seed(seed), []
        for name, _, (R, *C) in layout_of(config):
            if C and "blocks" in name:
                A = (torch.rand(rank, C[0], generator=generator) * 2 - 1) / C[0] ** 0.5
                row += [A.flatten(), torch.zeros(R * rank)]
        rows.append(torch.cat(row))
    return torch.stack(rows)


def swapped_case():
    """The new text: every ASCII letter's case is the other one. [256] uint8."""
    return torch.tensor(list(bytes(range(256)).swapcase()), dtype=torch.uint8)


def fine_tune(o, device):
    """Held-out loss of each rate (rows) and seed, in full and with LoRA at ranks 8 and 64."""
    config, seeds = CONFIGS[o.model], list(range(o.seeds))
    if o.model == "small":
        base = torch.cat([p.detach().flatten() for p in gpt.load().parameters()])
    else:
        base = first_weights([0], config)[0]
    table, out = swapped_case(), {"steps": o.tune_steps, "runs": {}}
    ladders = {"full": 6.25e-5, "LoRA, rank 8": 2.5e-4, "LoRA, rank 64": 2.5e-4}
    for name, lowest in ladders.items():
        rates = [lowest * 2**k for k in range(o.rates)]
        rank = int(name.split()[-1]) if "rank" in name else None
        rows, last = [], []
        for seed in seeds[:o.tune_seeds]:
            if rank:
                weights = first_adapters([1000 + seed], rank, config).repeat(o.rates, 1)
                trainer = LoraTrainer(rank, base, rule("AdamW"), weights, config, o.batch, o.length,
                                      device, table)
            else:
                trainer = Trainer(rule("AdamW"), base.repeat(o.rates, 1), config, o.batch, o.length,
                                  device, table)
            lrs = schedule(o.tune_steps) * torch.tensor(rates)
            curve, _ = trainer.run([1000 + seed] * o.rates, lrs)
            rows.append(rounded(trainer.held_out(o.held_out, table).tolist(), 4))
            last.append(rounded(last_loss(curve).tolist(), 4))
        out["runs"][name] = {"rates": rates, "heldout": rows, "last": last,
                             "trained": trainer.flat.shape[1]}
        print(f"{name}: best rates {[rates[best_of(r)] for r in last]}, held out {rows[0]}",
              flush=True)
    return out


# --- the whole design -----------------------------------------------------------------------

def package():
    """Write what the chapter shows to companion/data."""
    stored = json.loads((RESULTS / "optimizers.json").read_text(encoding="utf-8"))
    target = Path(__file__).resolve().parents[1] / "companion/data/optimizers.json"
    target.write_text(json.dumps(stored, separators=(",", ":")) + "\n", encoding="utf-8")


def resumed(path, setting):
    """Results in ``path`` if they have this setting and device, else empty ones."""
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        now, then = provenance(__file__), stored["provenance"]
        same = all(stored["results"].get(k) == v for k, v in setting.items())
        if same and all(now[k] == then[k] for k in ("device", "script_sha256")):
            return stored["results"]
        print(f"{path} is of another setting, device or script: starting again", flush=True)
    return {**setting, "tuning": {}, "equal_steps": {}, "equal_time": {}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rates", type=int, default=8, help="of the ladder, a factor of 2 apart")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--model", choices=CONFIGS, default="small")
    parser.add_argument("--held-out", type=int, help="bytes of held-out text (default all)")
    parser.add_argument("--tune-steps", type=int, default=100, help="of fine-tuning")
    parser.add_argument("--tune-seeds", type=int, default=5, help="of fine-tuning")
    parser.add_argument("--only", nargs="*", help="names of optimizers, or LoRA")
    parser.add_argument("--fresh", action="store_true", help="do not go on from what is stored")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--package", action="store_true",
                        help="copy the stored results to companion/data and stop")
    o = parser.parse_args()
    if o.package:
        package()
        return
    device, started = pick_device(), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    setting = {k: getattr(o, k) for k in ("seeds", "steps", "batch", "length", "model", "held_out",
                                          "tune_steps", "tune_seeds", "rates")}
    setting["parameters"] = first_weights([0], CONFIGS[o.model]).shape[1]
    path = o.out / "optimizers.json"
    if o.fresh:
        path.unlink(missing_ok=True)
    results = resumed(path, setting)

    def kept(part, name, make, note):
        if name not in results[part]:
            results[part][name] = make()
            save("optimizers", __file__, results, o.out)
            seconds = time.perf_counter() - started
            print(f"{seconds:6.1f} s  {part}, {name}: {note(results[part][name])}", flush=True)
        return results[part][name]

    def shown(run):
        loss = [v for v in run["heldout"] if v is not None]
        return (f"{sum(loss) / max(1, len(loss)):.4f} ({len(loss)} seeds, {run['steps']} steps), "
                f"{run['ms']:.2f} ms a step, {run['state_bytes']} bytes of state")

    def wanted(name):
        return not o.only or name in o.only

    if "base_ms" not in results:
        results["base_ms"] = train("no update", 0.0, max(10, o.steps // 4), o, device)["ms"]
    def tuned_to(r):
        return f"best {r['best']:g}{'' if r['inside'] else ' AT THE EDGE'}, {r['loss']}"

    for name in LOWEST:
        if not wanted(name) and name != "AdamW":
            continue
        lr = kept("tuning", name, lambda: tune(name, o, device), tuned_to)["best"]
        run = kept("equal_steps", name, lambda: train(name, lr, o.steps, o, device), shown)
        if name != "AdamW":
            steps = round(o.steps * results["equal_steps"]["AdamW"]["ms"] / run["ms"])
            kept("equal_time", name, lambda: train(name, lr, steps, o, device), shown)
    lr = results["tuning"]["AdamW"]["best"]
    for name in VARIANTS:
        if wanted(name):
            kept("equal_steps", name, lambda: train(name, lr, o.steps, o, device), shown)
    if "lora" not in results and wanted("LoRA"):
        results["lora"] = fine_tune(o, device)
    save("optimizers", __file__, results, o.out)
    print(f"{time.perf_counter() - started:6.1f} s  all", flush=True)


if __name__ == "__main__":
    main()
