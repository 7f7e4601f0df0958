"""companion.optimizers and its benchmark: members that never meet, rules that are torch's."""
import json
import sys
import types
from pathlib import Path

import jupytext
import pytest
import torch
import torch.nn.functional as F

import companion.optimizers
from companion import corpus
from companion.gpt import Config, Decoder
from companion.optimizers import adafactor, adamw, decode, dynamic_levels, encode, lion, muon, newton_schulz
from notebooks import CHAPTERS, code_cells
from test_counting import definitions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import optimizers as bench  # noqa: E402

CPU = torch.device("cpu")
TINY = Config(width=32, layers=2, heads=2, kv_heads=1, hidden=64)


def test_the_chapters_definitions_are_the_packages():
    cells = code_cells(jupytext.read(CHAPTERS / "optimizers.md"))
    taught = definitions("\n".join(c.source for c in cells if not c.source.startswith("%%")))
    with open(companion.optimizers.__file__, encoding="utf-8") as file:
        packaged = definitions(file.read())
    for name, tree in packaged.items():
        assert tree == taught[name], f"{name} differs between chapter and package"


# ---- the package

# A stack of matrices is as many matrices alone. Catches a norm or a mean over the stack.
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (1, 7)])
def test_leading_dimensions_are_a_batch(shape):
    g = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([newton_schulz(part) for part in g])
    assert (newton_schulz(g).float() - alone.float()).abs().max() < 0.05  # bf16, summed in other orders
    w = g.roll(1, 0) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)

    def step(g, w):
        R, C = g.shape[-2:]
        state = g.new_zeros(*g.shape[:-2], R, 1), g.new_zeros(*g.shape[:-2], 1, C)
        return adafactor(g, w, state, 0.01, 1)

    torch.testing.assert_close(step(g, w), torch.stack([step(a, b) for a, b in zip(g, w)]))


def test_lion_takes_its_sign_before_the_momentum_moves():
    m = torch.tensor([1.0])
    assert lion(torch.tensor([-8.0]), m).item() == 1.0  # 0.9 - 0.8; after the update it would be 0.82 - 0.8
    assert m.item() == pytest.approx(0.91)
    m = torch.tensor([1.0])
    assert lion(torch.tensor([-9.5]), m).item() == -1.0


def test_moments_in_bf16_are_rounded_and_the_direction_is_not():
    g = torch.tensor([1.003])
    m, v = torch.zeros(2, 1, dtype=torch.bfloat16)
    d = adamw(g, m, v, 1)
    assert d.dtype == torch.float32 and d.item() == pytest.approx(1.0, abs=1e-6)
    assert m.item() == torch.tensor(0.1003).bfloat16().item()


@pytest.mark.parametrize("signed", [True, False])
def test_levels_come_back_and_the_rest_is_nearest(signed):
    levels = dynamic_levels(signed)
    assert len(levels) == 256 == levels.unique().numel() and levels.max() == 1 and 0 in levels
    x = levels.clone()  # its largest magnitude is 1: the scale
    assert torch.equal(decode(*encode(x, levels), levels), x)
    y = torch.rand(512, generator=torch.Generator().manual_seed(0)) - 0.5 * signed
    y[::256] = 1.0
    nearest = levels[(y[:, None] - levels).abs().argmin(1)]
    torch.testing.assert_close(decode(*encode(y, levels), levels), nearest, rtol=0, atol=1e-7)


def test_a_block_of_zeros_and_a_block_that_does_not_fit():
    levels = dynamic_levels(True)
    assert decode(*encode(torch.zeros(256), levels), levels).abs().max() == 0
    with pytest.raises(ValueError, match="256 do not divide 300"):
        encode(torch.zeros(300), levels)


def test_muon_keeps_the_shape_and_the_size():
    for shape in (64, 32), (32, 64), (2, 3, 16, 48):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        d = muon(g, torch.zeros_like(g))
        assert d.shape == g.shape and 0.1 < d.square().mean().sqrt() < 0.3


# ---- the benchmark

def stacked(name, rates, seeds=(0, 1), steps=4, config=TINY):
    trainer = bench.Trainer(bench.rule(name), bench.first_weights(seeds, config), config, 2, 16, CPU)
    lrs = torch.tensor(rates).expand(steps, -1)
    curve, _ = trainer.run(list(seeds), lrs)
    return curve, trainer.flat


def alone(make, seed, lr, steps=4):
    """The same run with torch's optimizers: losses and weights [P]."""
    torch.manual_seed(seed)
    model, draw = Decoder(TINY), torch.Generator().manual_seed(seed)
    optimizers, losses = make(model, lr), []
    for _ in range(steps):
        x, y = corpus.batch(corpus.tokens("train"), 2, 16, draw)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), bench.CLIP)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), torch.cat([p.detach().flatten() for p in model.parameters()])


def torch_adamw(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, betas=bench.BETAS, weight_decay=0)


def torch_muon(model, lr):
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "blocks" not in n]
    return [torch.optim.Muon(hidden, lr=lr, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
            torch_adamw(others, lr)]


MAKE = {
    "AdamW": lambda model, lr: [torch_adamw(model.parameters(), lr)],
    "SGD + momentum": lambda model, lr: [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)],
    "Adafactor": lambda model, lr: [torch.optim.Adafactor(model.parameters(), lr=lr)],
    "Muon": torch_muon,
}


# Catches members that share a norm, a rate, a batch or a moment, and rules that are not torch's.
@pytest.mark.parametrize("name", MAKE)
def test_a_member_is_torchs_run_alone(name):
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    rates = [1e-2, 2e-3]
    curve, flat = stacked(name, rates)
    for member, lr in enumerate(rates):
        losses, weights = alone(MAKE[name], member, lr)
        assert (losses - curve[:, member]).abs().max() < 1e-3
        assert (weights - flat[member]).abs().max() < (2e-3 if name == "Muon" else 1e-4)  # bf16 products


@pytest.mark.parametrize("name", [*bench.LOWEST, *bench.VARIANTS])
def test_a_member_that_diverges_leaves_the_others_alone(name):
    calm, _ = stacked(name, [1e-4, 1e-4])
    wild, _ = stacked(name, [1e-4, 1e12])
    torch.testing.assert_close(calm[:, 0], wild[:, 0], rtol=1e-3, atol=1e-3)


def test_state_is_what_the_chapter_counts():
    P = bench.first_weights([0], TINY).shape[1]
    for name, each in ("AdamW", 8), ("AdamW, bf16 moments", 4), ("Lion", 4), ("SGD + momentum", 4):
        rule = bench.rule(name)
        rule.start(torch.zeros(1, P), bench.layout_of(TINY))
        assert sum(t.nbytes for t in rule.state) == each * P
    rule = bench.rule("AdamW, 8-bit moments")
    rule.start(torch.zeros(1, P), bench.layout_of(TINY))
    assert rule.block == 32 and sum(t.nbytes for t in rule.state) == 2 * P + 8 * P // 32


# With all directions kept, GaLore is Adam in another basis: one step moves the projected
# gradient's span only. Catches a projection on the long side.
def test_galore_moves_along_its_projection_only():
    rule, P = bench.rule("GaLore"), bench.first_weights([0], TINY).shape[1]
    layout = bench.layout_of(TINY)
    w = torch.zeros(1, P)
    rule.start(w, layout)
    g = torch.randn(1, P, generator=torch.Generator().manual_seed(0))
    rule.refresh(g)
    rule.update(w, g, torch.tensor([[1.0]]), torch.tensor([1.0]))
    for name, begin, shape in layout:
        if len(shape) == 2 and "blocks" in name:
            step = w[0, begin:begin + shape[0] * shape[1]].view(shape)
            assert torch.linalg.matrix_rank(step, atol=1e-4) == min(shape) // 4


def test_lora_starts_at_the_base_and_trains_adapters_only():
    base = bench.first_weights([3], TINY)[0]
    weights = bench.first_adapters([1, 2], 4, TINY)
    trainer = bench.LoraTrainer(4, base, bench.rule("AdamW"), weights, TINY, 2, 16, CPU)
    torch.manual_seed(3)
    want = F.cross_entropy(Decoder(TINY)(torch.zeros(1, 8, dtype=torch.long))[0], torch.ones(8).long())
    got = trainer.losses(torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))
    torch.testing.assert_close(got, want.expand(2), rtol=1e-5, atol=1e-5)
    curve, _ = trainer.run([5, 5], torch.full((12, 1), 1e-2))
    assert (curve[-1] < curve[0]).all() and not torch.equal(trainer.flat[0], trainer.flat[1])


def test_the_schedule_ends_near_zero_and_never_exceeds_one():
    for steps in 40, 400:
        s = bench.schedule(steps)
        assert s.shape == (steps, 1) and s.max() == 1 and 0 < s[-1] < 0.6 and (s > 0).all()
    assert bench.schedule(400)[40:320].unique().tolist() == [1.0]


def test_a_best_rate_at_the_end_gets_a_second_ladder(monkeypatch):
    def losses(name, rates, o, device):
        return [abs(rate - best) for rate in rates]

    monkeypatch.setattr(bench, "ladder", losses)
    o = types.SimpleNamespace(rates=4)
    low = bench.LOWEST["AdamW"]
    for best, count in ((low * 2, 4), (low * 32, 8), (low / 4, 8)):
        tuned = bench.tune("AdamW", o, CPU)
        assert tuned["best"] == best and tuned["inside"] and len(tuned["rates"]) == count
        assert tuned["rates"] == sorted(tuned["rates"])


def test_swapped_case_is_its_own_inverse():
    table = bench.swapped_case()
    assert bytes(table[list(b"aZ 9\n")].tolist()) == b"Az 9\n"
    assert torch.equal(table[table.long()], torch.arange(256, dtype=torch.uint8))


def test_the_chapter_shows_what_was_measured():
    shown = json.loads((ROOT / "companion/data/optimizers.json").read_text(encoding="utf-8"))
    stored = json.loads((bench.RESULTS / "optimizers.json").read_text(encoding="utf-8"))
    assert shown == stored
