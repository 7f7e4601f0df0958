"""Train the small decoder with every recipe of chapters/precision, all seeds at once.

    PYTHONPATH=. python benchmarks/precision_recipes.py --out FOLDER [--seeds 8 --steps 1000]
    PYTHONPATH=. python benchmarks/precision_recipes.py --out FOLDER --resume FILE --only NAME...

Writes precision_recipes.json after each recipe, so that a run cut short keeps what it has;
``--package`` copies the small part that the chapter shows to companion/data.

Seeds are stacked: each weight is [S, ...] and a batch is [S*B, T], so one step trains S
models that never meet. Seed s has the weights that ``torch.manual_seed(s); Decoder()`` has
and the batches that ``corpus.batch`` draws from a generator seeded with s, in every recipe:
recipes are compared in pairs. On a GPU a step is one CUDA graph.

Low-bit products are emulated: operands are rounded to values of the format (exact in
bfloat16, per-tensor fp32 scales apart) and multiplied in bfloat16 with fp32 accumulation.
Only the linear layers of the blocks are quantized, forward and backward.

Letters: S seeds, B batch, T positions, N = B*T tokens, P parameters, K contraction.
"""
import argparse
import copy
import functools
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from companion import corpus, pick_device
from companion.formats import (BF16, E2M1, E4M3, E5M2, E8M0, fake_blocks, random_hadamard,
                               stochastic_bf16, tensor_scale)
from companion.gpt import Config, Decoder
from provenance import RESULTS, save
from train_decoder import learning_rate

BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
PEAK = 1e-3
CONFIGS = {"small": Config(), "tiny": Config(width=128, heads=4, kv_heads=2, hidden=384)}


# --- a decoder with its seeds stacked -------------------------------------------------------

class SeedLinear(nn.Module):
    """x [S*B, T, K] times weight [S, F, K], each seed with its own."""

    def __init__(self, weight, product):
        super().__init__()
        self.weight, self.product = weight, product

    def forward(self, x):
        S = self.weight.shape[0]
        y_SNF = self.product(x.reshape(S, -1, x.shape[-1]), self.weight)
        return y_SNF.view(*x.shape[:-1], -1)


class SeedNorm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        S, D = self.weight.shape
        y = F.rms_norm(x, (D,), eps=self.eps)
        return (y.view(S, -1, D) * self.weight[:, None]).view(x.shape)


class _Lookup(torch.autograd.Function):
    """Rows of weight [S, V, D]; backward is a product, so it is the same in every run."""

    @staticmethod
    def forward(ctx, tokens_SN, weight):
        ctx.save_for_backward(tokens_SN)
        ctx.vocab = weight.shape[1]
        return weight.gather(1, tokens_SN[..., None].expand(-1, -1, weight.shape[2]))

    @staticmethod
    def backward(ctx, g_SND):
        one_hot = F.one_hot(ctx.saved_tensors[0], ctx.vocab).to(g_SND.dtype)
        return None, one_hot.transpose(1, 2) @ g_SND


class SeedEmbedding(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, tokens):
        S, _, D = self.weight.shape
        return _Lookup.apply(tokens.reshape(S, -1), self.weight).view(*tokens.shape, D)


def plain_product(x_SNK, w_SFK):
    return torch.bmm(x_SNK, w_SFK.transpose(1, 2))


def stacked_decoder(flat, product, whole_blocks, config):
    """(model, parameters as views of ``flat`` [S, P]); the last ``whole_blocks`` blocks and the
    head keep plain products."""
    S, start, parameters = flat.shape[0], 0, {}
    model = Decoder(config)
    for name, p in model.named_parameters():
        view = flat[:, start:start + p.numel()].view(S, *p.shape)
        parameters[name] = nn.Parameter(view)
        start += p.numel()
    quantized = [f"blocks.{i}." for i in range(model.config.layers - whole_blocks)]
    for name, module in list(model.named_modules()):
        weight = parameters.get("embedding.weight" if name == "head" else f"{name}.weight")
        if isinstance(module, nn.Linear):
            low = any(name.startswith(block) for block in quantized)
            new = SeedLinear(weight, product if low else plain_product)
        elif isinstance(module, nn.Embedding):
            new = SeedEmbedding(weight)
        elif isinstance(module, nn.RMSNorm):
            new = SeedNorm(weight, module.eps)
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model, list(parameters.values())


@functools.cache
def first_weights(seeds, config=Config()):
    """([S, P] fp32 on the CPU, [P] weight decay)."""
    rows, decay = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        rows.append(torch.cat([p.detach().flatten() for p in Decoder(config).parameters()]))
    for p in Decoder(config).parameters():
        decay.append(torch.full((p.numel(),), DECAY if p.ndim == 2 else 0.0))
    return torch.stack(rows), torch.cat(decay)


# --- low-bit products -----------------------------------------------------------------------

_rows = fake_blocks  # compiled in main(); gets rows of one block each


def by_rows(x, element, block, rounding="nearest", scale=E8M0, ceil=False):
    """``fake_blocks`` along the last dimension (or in squares), as bfloat16."""
    if isinstance(block, int):
        flat = _rows(x.reshape(-1, block), element, block, scale, 1.0, rounding, ceil)
        return flat.view(x.shape).bfloat16()
    r, c = block
    S, R, C = x.shape
    squares = x.view(S, R // r, r, C // c, c).transpose(2, 3)
    flat = _rows(squares.reshape(-1, r * c), element, r * c, scale, 1.0, rounding, ceil)
    return flat.view(squares.shape).transpose(2, 3).reshape(x.shape).bfloat16()


def one_scale(x, dtype, largest, scaled=True):
    """A tensor per seed with one current scale (or none), through torch's own fp8 cast."""
    s = torch.ones_like(x[:, :1, :1]).float()
    if scaled:
        s = x.abs().amax((1, 2), keepdim=True).float() / largest
        s = torch.where(s > 0, s, 1.0)
    return (x / s).clamp(-largest, largest).to(dtype).bfloat16(), s


class Tensorwise:
    """fp8 with one scale a tensor: E4M3 forward, E5M2 for gradients."""

    def __init__(self, scaled=True):
        self.scaled = scaled

    def operand(self, x, kind, use):
        if kind == "gradient":
            return one_scale(x, torch.float8_e5m2, E5M2.max, self.scaled)
        return one_scale(x, torch.float8_e4m3fn, E4M3.max, self.scaled)


class Blockwise:
    """fp8 E4M3, power-of-two scales: 1 x 128 for activations and gradients, 128 x 128 for weights."""

    def operand(self, x, kind, use):
        block = (128, 128) if kind == "weight" else 128
        return by_rows(x, E4M3, block, ceil=True), 1.0


class MXFP8:
    """E4M3 in blocks of 32 along the contraction, E8M0 scales, for all three operands."""

    def __init__(self, ceil=True):
        self.ceil = ceil

    def operand(self, x, kind, use):
        return by_rows(x, E4M3, 32, ceil=self.ceil), 1.0


class NVFP4:
    """E2M1 in blocks of 16 with E4M3 scales below a per-tensor scale, and the recipe's parts."""

    def __init__(self, device, stochastic=True, hadamard=True, squares=True, two_level=True):
        self.stochastic, self.squares, self.two_level = stochastic, squares, two_level
        H = random_hadamard(16, torch.Generator().manual_seed(0))
        self.hadamard = H.to(device, torch.bfloat16) if hadamard else None

    def operand(self, x, kind, use):
        if use == "dw" and self.hadamard is not None:
            x = (x.view(*x.shape[:-1], -1, 16) @ self.hadamard).view(x.shape)
        rounding = "stochastic" if kind == "gradient" and self.stochastic else "nearest"
        block = (16, 16) if kind == "weight" and self.squares else 16
        s = tensor_scale(x, E2M1, E4M3, dim=(1, 2)) if self.two_level else 1.0
        return by_rows(x / s, E2M1, block, rounding, E4M3), s


class _LowProduct(torch.autograd.Function):
    """x [S, N, K] times w [S, F, K]: three products, each operand quantized along its contraction."""

    @staticmethod
    def forward(ctx, x, w, recipe):
        x, w = x.bfloat16(), w.bfloat16()
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        return _scaled_product(recipe.operand(x, "activation", "y"), recipe.operand(w, "weight", "y"))

    @staticmethod
    def backward(ctx, g):
        (x, w), quantize = ctx.saved_tensors, ctx.recipe.operand
        w_SKF, g_SFN, x_SKN = (t.transpose(1, 2).contiguous() for t in (w, g, x))
        dx = _scaled_product(quantize(g, "gradient", "dx"), quantize(w_SKF, "weight", "dx"))
        dw = _scaled_product(quantize(g_SFN, "gradient", "dw"), quantize(x_SKN, "activation", "dw"))
        return dx, dw.float(), None


def _scaled_product(a, b):
    """Two pairs (values, scale) -> bfloat16 [S, rows of a, rows of b]."""
    y = torch.bmm(a[0], b[0].transpose(1, 2))
    scale = a[1] * b[1]
    return y if isinstance(scale, float) else (y * scale).bfloat16()


# --- recipes --------------------------------------------------------------------------------

class Recipe:
    """What is stored how, and in which precision products run.

    autocast: None or a dtype; store: dtype of weights, gradients and moments; keep: how an
    update lands in 16-bit weights ("nearest", "stochastic", "kahan", "master"); scaler:
    the dynamic loss scale of fp16; shrink: the loss is divided by it before backward and the
    gradients multiplied by it after; low: a low-bit product; whole_blocks: blocks without it;
    nudge: a relative change of the first weights, to see what chance alone does.
    """

    def __init__(self, autocast=None, store=torch.float32, keep="nearest", scaler=False, shrink=1,
                 low=None, whole_blocks=0, nudge=0.0, betas=BETAS):
        self.autocast, self.store, self.keep, self.scaler = autocast, store, keep, scaler
        self.shrink, self.low, self.whole_blocks, self.nudge = shrink, low, whole_blocks, nudge
        self.betas = betas


def recipes(device):
    b, h = torch.bfloat16, torch.float16

    def low(product, whole_blocks=0):
        return Recipe(b, low=product, whole_blocks=whole_blocks)

    return {
        "fp32": Recipe(),
        "bf16 autocast": Recipe(b),
        "bf16 autocast, nudged start": Recipe(b, nudge=1e-6),
        "fp16 autocast, scaler": Recipe(h, scaler=True),
        "fp16 autocast, no scaler": Recipe(h),
        "fp16, no scaler, loss / 1024": Recipe(h, shrink=1024),
        "fp16, scaler, loss / 1024": Recipe(h, shrink=1024, scaler=True),
        "pure bf16": Recipe(store=b),
        "pure bf16 + stochastic rounding": Recipe(store=b, keep="stochastic"),
        "pure bf16 + Kahan": Recipe(store=b, keep="kahan"),
        "pure bf16 + fp32 master": Recipe(store=b, keep="master"),
        "bf16 autocast, beta2 0.999": Recipe(b, betas=(0.9, 0.999)),
        "pure bf16 + fp32 master, beta2 0.999": Recipe(store=b, keep="master", betas=(0.9, 0.999)),
        "fp8 tensorwise": low(Tensorwise()),
        "fp8 without scales": low(Tensorwise(scaled=False)),
        "fp8 blockwise": low(Blockwise()),
        "MXFP8": low(MXFP8()),
        "MXFP8, scale rounded down": low(MXFP8(ceil=False)),
        "NVFP4": low(NVFP4(device), 1),
        "NVFP4 - stochastic rounding": low(NVFP4(device, stochastic=False), 1),
        "NVFP4 - Hadamard": low(NVFP4(device, hadamard=False), 1),
        "NVFP4 - square weight blocks": low(NVFP4(device, squares=False), 1),
        "NVFP4 - second scale": low(NVFP4(device, two_level=False), 1),
        "NVFP4 - last block in bf16": low(NVFP4(device)),
        "NVFP4 - all of these but scales": low(NVFP4(device, False, False, False)),
    }


# --- training -------------------------------------------------------------------------------

class Trainer:
    """One recipe's S models, their optimizer and their data; ``run`` trains and returns losses."""

    def __init__(self, recipe, seeds, batch, length, device, config=Config()):
        self.recipe, self.S, self.B, self.T, self.device = recipe, seeds, batch, length, device
        self.config = config
        weights, decay = first_weights(seeds, config)
        self.decay = decay.to(device)
        S, P = weights.shape
        store = recipe.store
        self.flat = torch.zeros(S, P, dtype=store, device=device)
        self.model, self.parameters = stacked_decoder(self.flat, self._product(),
                                                       recipe.whole_blocks, config)
        self.model.to(device)
        self.m, self.v = (torch.zeros(S, P, dtype=store, device=device) for _ in "mv")
        extra = {"kahan": store, "master": torch.float32}.get(recipe.keep)
        self.extra = torch.zeros(S, P, dtype=extra, device=device) if extra else None
        self.scale = torch.ones(S, device=device)
        self.skipped, self.clean, self.t = (torch.zeros(S, device=device) for _ in range(3))
        self.data = corpus.tokens("train").to(device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.graph, self.starts = None, None

    def _product(self):
        low = self.recipe.low
        return plain_product if low is None else lambda x, w: _LowProduct.apply(x, w, low)

    @torch.no_grad()
    def reset(self, weights, lrs, skip_batches=0):
        """Start from ``weights`` [S, P] with fresh moments and one learning rate a step."""
        steps, old = len(lrs), self.starts
        self.flat.copy_(weights)
        for t in (self.m, self.v, self.skipped, self.clean, self.t, self.index):
            t.zero_()
        if self.extra is not None:
            self.extra.copy_(weights) if self.recipe.keep == "master" else self.extra.zero_()
        self.scale.fill_(2.0**16 if self.recipe.scaler else 1.0)
        starts = torch.empty(steps, self.S, self.B, dtype=torch.long)
        for s in range(self.S):
            generator = torch.Generator().manual_seed(s)
            for i in range(-skip_batches, steps):
                drawn = torch.randint(len(self.data) - self.T, (self.B, 1), generator=generator)
                if i >= 0:
                    starts[i, s] = drawn[:, 0]
        if old is None or len(old) != steps:
            self.graph = None
            self.starts, self.lrs = starts.to(self.device), torch.empty(steps, device=self.device)
            self.curve = torch.zeros(steps, self.S, device=self.device)
        self.starts.copy_(starts)
        self.lrs.copy_(torch.tensor(lrs))

    def _losses(self, model, x, y, autocast):
        with torch.autocast(self.device.type, autocast or torch.bfloat16, enabled=autocast is not None,
                            cache_enabled=False):
            logits = model(x)
        each = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
        return each.view(self.S, -1).mean(1)

    def step(self):
        r, S = self.recipe, self.S
        starts = self.starts.index_select(0, self.index).view(-1, 1)
        window = self.data[starts + torch.arange(self.T + 1, device=self.device)].long()
        losses = self._losses(self.model, window[:, :-1], window[:, 1:], r.autocast)
        total = (losses * self.scale).sum() / r.shrink
        grads = torch.autograd.grad(total, self.parameters)
        with torch.no_grad():
            g = torch.cat([t.reshape(S, -1) for t in grads], 1).float()
            g = g * (r.shrink / self.scale)[:, None]
            good = g.isfinite().all(1) if r.scaler else torch.ones_like(self.t, dtype=torch.bool)
            norm = g.square().sum(1).sqrt()
            g = g * (CLIP / (norm + 1e-6)).clamp(max=1)[:, None]
            self._update(g, good[:, None])
            if r.scaler:
                self._next_scale(good)
            self.curve.index_copy_(0, self.index, losses.detach()[None])
            self.index += 1

    def _next_scale(self, good):
        self.skipped += ~good
        self.clean.copy_(torch.where(good, self.clean + 1, 0.0))
        grown = self.clean >= 2000
        self.scale.mul_(torch.where(good, torch.where(grown, 2.0, 1.0), 0.5))
        self.clean.copy_(torch.where(grown, 0.0, self.clean))

    def _update(self, g, good):
        """AdamW in fp32 registers; what is stored is rounded, as the fused optimizer does."""
        keep, lr = self.recipe.keep, self.lrs.index_select(0, self.index)
        self.t += good[:, 0]
        b1, b2 = self.recipe.betas
        m = torch.lerp(self.m.float(), g, 1 - b1)
        v = torch.lerp(self.v.float(), g * g, 1 - b2)
        c1, c2 = (1 - b**self.t.clamp(min=1)[:, None] for b in (b1, b2))
        old = self.extra if keep == "master" else self.flat.float()
        change = -lr * (m / c1 / ((v / c2).sqrt() + EPS) + self.decay * old)
        for state, value in (self.m, m), (self.v, v):
            state.copy_(torch.where(good, value.to(state.dtype), state))
        if keep == "kahan":
            wanted = change + self.extra.float()
            new = (old + wanted).bfloat16()
            self.extra.copy_(torch.where(good, (wanted - (new.float() - old)).bfloat16(), self.extra))
        elif keep == "master":
            new = torch.where(good, old + change, old)
            self.extra.copy_(new)
        elif keep == "stochastic":
            new = stochastic_bf16(old + change)
        else:
            new = old + change
        self.flat.copy_(torch.where(good, new.to(self.flat.dtype), self.flat))

    def run(self, weights, lrs, skip_batches=0):
        """Train; returns losses [steps, S]. Weights are left in ``self.flat``."""
        self.reset(weights, lrs, skip_batches)
        if self.device.type != "cuda":
            for _ in lrs:
                self.step()
            return self.curve.clone()
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self.index.zero_()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            self.reset(weights, lrs, skip_batches)
        torch.cuda.manual_seed(0)
        for _ in lrs:
            self.graph.replay()
        torch.cuda.synchronize()
        return self.curve.clone()

    @torch.no_grad()
    def held_out(self, weights=None, windows=64, limit=None):
        """Held-out loss [S] in nats a byte, of the first ``limit`` bytes (default all): in the
        recipe's own arithmetic, or of ``weights`` in fp32."""
        model, autocast = self.model, self.recipe.autocast
        if weights is not None:
            model, _ = stacked_decoder(weights.float(), plain_product, 0, self.config)
            model.to(self.device)
            autocast = None
        inputs, targets = corpus.windows(corpus.tokens("heldout")[:limit], self.T)
        total = torch.zeros(self.S, device=self.device)
        for x, y in zip(inputs.split(windows), targets.split(windows)):
            x, y = (t.to(self.device).repeat(self.S, 1) for t in (x, y))
            total += self._losses(model, x, y, autocast) * (y.numel() / self.S)
        return total / targets.numel()


def rounded(values, digits=5):
    return [round(v, digits) if math.isfinite(v) else None for v in values]


def from_scratch(name, recipe, o, device):
    """One recipe from its first weights: held-out losses, curve, and the trained weights."""
    started = time.perf_counter()
    trainer = Trainer(recipe, o.seeds, o.batch, o.length, device, CONFIGS[o.model])
    weights = first_weights(o.seeds, CONFIGS[o.model])[0].to(device)
    if recipe.nudge:
        weights = weights * (1 + recipe.nudge)
    lrs = [learning_rate(i, o.steps, PEAK) for i in range(o.steps)]
    curve = trainer.run(weights, lrs)
    result = {"heldout": rounded(trainer.held_out(trainer.flat.clone(), limit=o.held_out).tolist()),
              "heldout_own": rounded(trainer.held_out(limit=o.held_out).tolist()),
              "curve": {i: rounded(curve[i].tolist(), 4) for i in range(0, o.steps, max(1, o.steps // 24))},
              "skipped": trainer.skipped.tolist(), "scale": trainer.scale.tolist(),
              "seconds": round(time.perf_counter() - started, 1)}
    loss = [v for v in result["heldout"] if v is not None]
    print(f"{name}: {sum(loss) / max(1, len(loss)):.4f} ({len(loss)} seeds), own "
          f"{result['heldout_own'][0]}, {result['seconds']} s", flush=True)
    return result


def late(o, device, rates):
    """Go on from one trained model at small constant rates, with each way to keep 16-bit weights."""
    base = Trainer(Recipe(torch.bfloat16), o.seeds, o.batch, o.length, device)
    lrs = [PEAK * min(1, (i + 1) / 100) for i in range(o.steps)]
    base.run(first_weights(o.seeds)[0].to(device), lrs)
    start = base.flat.bfloat16()
    out = {"before": rounded(base.held_out(start).tolist()), "rates": rates, "runs": {}}
    for name in ("fp32", "pure bf16", "pure bf16 + stochastic rounding", "pure bf16 + Kahan",
                 "pure bf16 + fp32 master"):
        trainer = Trainer(recipes(device)[name], o.seeds, o.batch, o.length, device)
        for lr in rates:
            trainer.run(start.float(), [lr] * o.late_steps, skip_batches=o.steps)
            same = (trainer.flat.bfloat16() == start).float().mean(1)
            out["runs"].setdefault(name, []).append(
                {"lr": lr, "heldout": rounded(trainer.held_out(trainer.flat.clone()).tolist()),
                 "unmoved": rounded(same.tolist())})
        print("late", name, [r["heldout"][0] for r in out["runs"][name]], flush=True)
    return out


SHORT = {"batch": 2, "length": 64, "steps": 25, "lr": 3e-5}


def short(seeds, device):
    """Runs small enough to be repeated in the chapter: training loss of each step and seed."""
    out = {**SHORT, "runs": {}}
    for name in ("fp32", "pure bf16", "pure bf16 + stochastic rounding", "pure bf16 + fp32 master"):
        trainer = Trainer(recipes(device)[name], seeds, SHORT["batch"], SHORT["length"], device)
        curve = trainer.run(first_weights(seeds)[0].to(device), [SHORT["lr"]] * SHORT["steps"])
        same = (trainer.flat.bfloat16().cpu() == first_weights(seeds)[0].bfloat16()).float().mean(1)
        out["runs"][name] = {"loss": [rounded(row, 5) for row in curve.t().tolist()],
                             "unmoved": rounded(same.tolist())}
    return out


def package():
    """Write the part of the stored results that the chapter shows to companion/data."""
    keep = "heldout", "heldout_own", "skipped", "scale"
    stored = json.loads((RESULTS / "precision_recipes.json").read_text(encoding="utf-8"))
    scratch = stored["results"]["scratch"].items()
    stored["results"]["scratch"] = {name: {k: run[k] for k in keep} for name, run in scratch}
    target = Path(__file__).resolve().parents[1] / "companion/data/precision_recipes.json"
    target.write_text(json.dumps(stored) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--late-steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--model", choices=CONFIGS, default="small")
    parser.add_argument("--held-out", type=int, help="bytes of held-out text (default all)")
    parser.add_argument("--only", nargs="*", help="names of recipes; late and short runs are left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", type=Path, help="a results file whose recipes are kept and not run again")
    parser.add_argument("--package", action="store_true", help="copy stored results to companion/data and stop")
    o = parser.parse_args()
    if o.package:
        package()
        return
    device = pick_device()
    global _rows
    if any(r.low for n, r in recipes(device).items() if not o.only or n in o.only):
        torch._dynamo.config.specialize_int = True  # formats are constants of the kernels
        torch._dynamo.config.recompile_limit = 64
        _rows = torch.compile(fake_blocks, dynamic=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    setting = {"seeds": o.seeds, "steps": o.steps, "batch": o.batch, "length": o.length, "peak": PEAK,
               "betas": list(BETAS), "weight_decay": DECAY, "late_steps": o.late_steps, "model": o.model,
               "parameters": first_weights(1, CONFIGS[o.model])[0].shape[1], "held_out": o.held_out}
    results = resumed(o.resume, setting) if o.resume else {**setting, "scratch": {}}
    if "short" not in results and not o.only:
        results["short"] = short(o.seeds, device)
    if "late" not in results and not o.only:
        results["late"] = late(o, device, [1e-4, 3e-5, 1e-5, 3e-6])
    for name, recipe in recipes(device).items():
        if name not in results["scratch"] and (not o.only or name in o.only):
            results["scratch"][name] = from_scratch(name, recipe, o, device)
            save("precision_recipes", __file__, results, o.out)


def resumed(path, setting):
    """The results in ``path``, with where they came from; they must have the same setting."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    results = stored["results"]
    if different := {k: results[k] for k in setting if k in results and results[k] != setting[k]}:
        raise ValueError(f"precision_recipes: {path} was run with {different}")
    results["earlier"] = [*results.get("earlier", []), stored["provenance"]]
    return results


if __name__ == "__main__":
    main()
