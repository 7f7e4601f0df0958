"""benchmarks/precision_recipes.py: seeds that never meet, products that are what they say."""
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import precision_recipes as pr  # noqa: E402
from companion import corpus  # noqa: E402
from companion.gpt import Config, Decoder  # noqa: E402

CPU = torch.device("cpu")
TINY = Config(width=32, layers=2, heads=2, kv_heads=1, hidden=64)


def trained(recipe, seeds=2, rates=(1e-3,) * 3):
    trainer = pr.Trainer(recipe, seeds, 2, 16, CPU, TINY)
    curve = trainer.run(pr.first_weights(seeds, TINY)[0], list(rates))
    return curve, trainer.flat.float().clone()


# Catches seeds that share a mean, a norm or a batch; and an AdamW that is not torch's.
@pytest.mark.parametrize("seed", [0, 1])
def test_a_stacked_seed_is_the_run_alone(seed):
    curve, flat = trained(pr.Recipe())
    torch.manual_seed(seed)
    model, draw = Decoder(TINY), torch.Generator().manual_seed(seed)
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": pr.DECAY},
              {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=pr.BETAS)
    for step in range(3):
        x, y = corpus.batch(corpus.tokens("train"), 2, 16, draw)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), pr.CLIP)
        optimizer.step()
        assert abs(loss.item() - curve[step, seed].item()) < 1e-4
    alone = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (alone - flat[seed]).abs().max() < 1e-4


# A rate that most weights do not feel. Catches a cure that rounds to nearest after all.
def test_how_an_update_lands_in_bf16():
    start = pr.first_weights(2, TINY)[0].bfloat16().float()
    moved = {}
    for keep in "nearest", "stochastic", "kahan", "master":
        trainer = pr.Trainer(pr.Recipe(store=torch.bfloat16, keep=keep), 2, 2, 16, CPU, TINY)
        trainer.run(start, [1e-5] * 8)
        moved[keep] = (trainer.flat.float() != start).double().mean().item()
    assert moved["nearest"] < 0.4
    assert all(moved[keep] > moved["nearest"] + 0.2 for keep in ("stochastic", "kahan", "master"))


def test_the_scaler_skips_and_halves_for_one_seed_alone():
    trainer = pr.Trainer(pr.Recipe(torch.float16, scaler=True), 2, 2, 16, CPU, TINY)
    weights = pr.first_weights(2, TINY)[0]
    trainer.reset(weights, [1e-3])
    trainer.scale[1] = 2.0**60  # overflows in fp16
    trainer.step()
    assert trainer.skipped.tolist() == [0, 1] and trainer.scale.tolist() == [2.0**16, 2.0**59]
    assert torch.equal(trainer.flat[1], weights[1]) and not torch.equal(trainer.flat[0], weights[0])


class Unquantized:
    def operand(self, x, kind, use):
        return x.bfloat16(), 1.0


class OnlyTurned(Unquantized):
    """The Hadamard transform of NVFP4, without its rounding."""
    hadamard = pr.random_hadamard(16, torch.Generator().manual_seed(0)).bfloat16()

    def operand(self, x, kind, use):
        if use == "dw":
            x = (x.view(*x.shape[:-1], -1, 16) @ self.hadamard).view(x.shape)
        return x, 1.0


def gradients(product):
    torch.manual_seed(0)
    x, w = torch.randn(2, 32, 64).requires_grad_(), torch.randn(2, 48, 64).requires_grad_()
    y = product(x, w)
    return [y.detach().float()] + [g.float() for g in torch.autograd.grad(
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), [x, w])]


# Catches an operand quantized along the wrong dimension's layout, or a transpose lost.
@pytest.mark.parametrize("rule, tolerance", [
    (Unquantized(), 0.01), (OnlyTurned(), 0.01), (pr.Tensorwise(), 0.1), (pr.MXFP8(), 0.06),
    (pr.NVFP4(CPU), 0.35), (pr.NVFP4(CPU, False, False, False), 0.3)])
def test_low_products_approach_the_exact_ones(rule, tolerance):
    for exact, low in zip(gradients(pr.plain_product), gradients(lambda x, w: pr._LowProduct.apply(x, w, rule))):
        error = ((low - exact).norm() / exact.norm()).item()
        assert error < tolerance
        assert error > tolerance / 20  # and it is quantized


@pytest.mark.parametrize("part", ["stochastic", "hadamard", "squares", "two_level"])
def test_each_part_of_the_four_bit_recipe_does_something(part):
    def run(**parts):
        torch.manual_seed(1)
        return gradients(lambda x, w: pr._LowProduct.apply(x, w, pr.NVFP4(CPU, **parts)))
    assert any(not torch.equal(a, b) for a, b in zip(run(), run(**{part: False})))


def test_the_chapter_shows_what_was_measured():
    shown = json.loads((ROOT / "companion/data/precision_recipes.json").read_text(encoding="utf-8"))
    stored = json.loads((pr.RESULTS / "precision_recipes.json").read_text(encoding="utf-8"))
    assert shown["provenance"] == stored["provenance"]
    scratch = shown["results"]["scratch"]
    assert scratch.keys() == stored["results"]["scratch"].keys()
    for recipe, run in stored["results"]["scratch"].items():
        assert scratch[recipe]["heldout"] == run["heldout"]
