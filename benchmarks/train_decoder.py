"""Train the small decoder of companion/gpt.py and state its held-out loss.

    PYTHONPATH=. python benchmarks/train_decoder.py --seeds 5 --out FOLDER

Writes decoder.json (losses of every seed, with provenance) and decoder.safetensors (the
weights of the seed in the middle, in bfloat16). bf16 autocast over fp32 weights, AdamW,
warm-up then cosine to a tenth.
"""
import argparse
import copy
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from companion import corpus, pick_device, pick_dtype
from companion.gpt import Config, Decoder
from provenance import save


def learning_rate(step, steps, peak, warmup=100):
    """Linear to ``peak`` over ``warmup`` steps, then half a cosine to ``peak / 10``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def adamw(model, lr, weight_decay=0.1):
    """AdamW with decay on matrices only: norms are gains around 1."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def held_out_loss(model, length, device, dtype, batch_size=64):
    """Mean cross entropy in nats a byte over all of the held-out text, in windows of ``length``."""
    model.eval()
    inputs, targets = corpus.windows(corpus.tokens("heldout"), length)
    total = 0.0
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size)):
        with torch.autocast(device.type, dtype):
            logits = model(x.to(device))
        total += F.cross_entropy(logits.float().flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
    model.train()
    return total / targets.numel()


def train(seed, steps, batch_size, length, peak, device, dtype, log=print):
    """One run: (weights on the CPU, list of (step, training loss), held-out loss, seconds)."""
    torch.manual_seed(seed)
    model = Decoder(Config())
    model.to(device)
    run = torch.compile(model) if device.type == "cuda" else model
    optimizer, generator = adamw(model, peak), torch.Generator().manual_seed(seed)
    data, curve, started = corpus.tokens("train").to(device), [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        x, y = corpus.batch(data, batch_size, length, generator)
        with torch.autocast(device.type, dtype):
            logits = run(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step < 10 or step % 100 == 0 or step == steps - 1:
            curve.append((step, round(loss.item(), 4)))
            if step % 500 == 0:
                log(f"seed {seed} step {step}: {curve[-1][1]:.4f}")
    seconds = time.perf_counter() - started
    weights = {k: v.detach().cpu().to(torch.bfloat16) for k, v in model.state_dict().items() if k != "head.weight"}
    rounded = copy.deepcopy(model)  # what is shipped: its loss, not that of the fp32 weights
    rounded.load_state_dict({**{k: v.to(device) for k, v in weights.items()},
                             "head.weight": weights["embedding.weight"].to(device)})
    return weights, curve, held_out_loss(rounded, length, device, dtype), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    device, dtype = pick_device(), pick_dtype()
    runs = []
    for seed in range(o.seeds):
        weights, curve, loss, seconds = train(seed, o.steps, o.batch, o.length, o.lr, device, dtype)
        runs.append({"seed": seed, "heldout": loss, "seconds": round(seconds, 1), "curve": curve, "weights": weights})
        print(f"seed {seed}: held out {loss:.4f} nats a byte, {seconds:.0f} s", flush=True)
    runs.sort(key=lambda run: run["heldout"])
    middle = runs[len(runs) // 2]
    o.out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in middle["weights"].items()}, o.out / "decoder.safetensors")
    results = {"config": vars(Config()), "steps": o.steps, "batch": o.batch, "length": o.length, "lr": o.lr,
               "shipped_seed": middle["seed"],
               "runs": [{k: v for k, v in run.items() if k != "weights"} for run in runs]}
    save("decoder", __file__, results, o.out)


if __name__ == "__main__":
    main()
