"""Every form of data parallelism against one process, with its bytes and its memory."""
import pytest

torch = pytest.importorskip("torch")
from companion import ranks  # noqa: E402
from companion.data_parallel import state_bytes, traffic  # noqa: E402

# What all cells below share: a random model, its batch, and what one process makes of it
COMMON = """
import copy, random, warnings
warnings.simplefilter("error")
import torch.nn.functional as F
from companion.data_parallel import Replicas, Zero, reduce_scatter
from companion import gpt
from companion.gpt import Config, Decoder
from companion.wire import all_gather, counted, recorded, ring_bytes


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


gpt.rotate = rotate  # the decoder's own rounds to float32
STEPS, ADAM = 3, dict(lr=0.01, weight_decay=0.1)


class Plain(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        widths = [draw.randint(1, 9) for _ in range(draw.randint(2, 4))] + [3]
        self.embedding = torch.nn.Embedding(7, widths[0])
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh())
            for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def case(seed, n):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    if draw.random() < 0.5:
        model, vocab = Plain(draw), 7
    else:
        kv = draw.choice([1, 2])
        model, vocab = Decoder(Config(vocab=11, width=8, layers=draw.randint(1, 3), heads=2,
                                      kv_heads=kv, hidden=draw.randint(1, 9), context=8)), 11
    shape = STEPS, n * draw.randint(1, 3), draw.randint(1, 6)
    return model.double(), torch.randint(vocab, shape)


def loss(model, x):
    y = model(x)
    return y, (y - 1).square().mean()


def backward(model, x, passes):
    y = None
    for _ in range(passes):  # gradients add up
        y, value = loss(model, x)
        value.backward()
    return y


def alone(model, batches, passes):
    model, seen = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for x in batches:
        y = backward(model, x, passes)
        seen.append((y.detach(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return seen, [p.detach() for p in model.parameters()]


def off(a, b):
    errors = [(x - y).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()]
    return max(errors) if all(e == e for e in errors) else float("inf")  # nan hides in max


worst = {}
groups = [dist.new_group(list(range(n))) for n in (1, 2, 3, 4)]


def note(form, seed, n, *errors):
    worst[form] = max(worst.get(form, (0.0, (0, 0))), (max(errors), (seed, n)))
"""

BY_HAND = COMMON + """
def whole(unit, flat):
    full = torch.empty(unit.n * unit.part).double()
    all_gather(full, flat.detach().clone(), unit.group)
    return unit._views(full)


def in_order(zero, model, tensors):
    got = {p: t for u in zero.units for p, t in zip(u.parameters, tensors(u))}
    return [got[p] for p in model.parameters()]


for seed in range(CASES):
    for n, group in enumerate(groups, 1):
        if rank >= n:
            continue
        start, batches = case(seed, n)
        passes = 1 + seed % 2
        seen, after = alone(start, batches, passes)
        mine = [x.chunk(n)[rank] for x in batches]

        model = copy.deepcopy(start)
        if rank:
            for p in model.parameters():
                p.data.add_(1)  # Replicas must make them equal
        size = random.Random(seed).choice([1, 200, 10**6])
        replicas = Replicas(model, bucket_bytes=size, group=group)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        for x, (y, grads) in zip(mine, seen):
            with replicas.no_sync():
                backward(model, x, passes - 1)
            out = backward(model, x, 1)
            replicas.finish()
            note("replicas", seed, n, off([out], [y.chunk(n)[rank]]),
                 off([p.grad for p in model.parameters()], grads))
            optimizer.step()
            optimizer.zero_grad()
        note("replicas", seed, n, off(model.parameters(), after))

        for stage in 1, 2, 3:
            model = copy.deepcopy(start)
            zero = Zero(model, model.blocks, stage, group=group, **ADAM)
            for x, (y, grads) in zip(mine, seen):
                out = backward(model, x, passes)
                now = in_order(zero, model, lambda u: whole(
                    u, u._reduced(u.gradients) if stage == 1 else u.shard.grad))
                note(f"zero {stage}", seed, n, off([out], [y.chunk(n)[rank]]), off(now, grads))
                zero.step()
            last = in_order(zero, model, lambda u: whole(u, u.shard))
            note(f"zero {stage}", seed, n, off(last, after))
"""

TORCHS = COMMON + """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


for seed in range(CASES):
    for n, group in enumerate(groups, 1):
        if rank >= n:
            continue
        start, batches = case(seed, n)
        passes = 1 + seed % 2
        seen, after = alone(start, batches, passes)
        for form in "ddp", "fsdp", "fsdp, kept":
            model = copy.deepcopy(start)
            if form == "ddp":
                run = DistributedDataParallel(model, process_group=group)
            else:
                mesh = DeviceMesh.from_group(group, "cpu")
                for module in [*model.blocks, model]:
                    fully_shard(module, mesh=mesh, reshard_after_forward=form == "fsdp")
                run = model
            optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
            for x, (y, grads) in zip(batches, seen):
                out = backward(run, x.chunk(n)[rank], passes)
                note(form, seed, n, off([out], [y.chunk(n)[rank]]),
                     off([full(p.grad) for p in model.parameters()], grads))
                optimizer.step()
                optimizer.zero_grad()
            note(form, seed, n, off([full(p).detach() for p in model.parameters()], after))
"""

# Bytes on the wire and bytes held, of a model whose units do not divide by the ranks
COUNTED = COMMON + """
torch.manual_seed(0)
start = Decoder(Config(width=46, layers=3, heads=1, kv_heads=1, hidden=101, context=8)).double()
x = torch.randint(256, (2, 8))
report = {}
for stage in 1, 2, 3:
    for micro in 1, 3:
        model = copy.deepcopy(start)
        zero = Zero(model, model.blocks, stage)
        sizes = [sum(u.sizes) for u in zero.units]
        def backward():
            for _ in range(micro):
                loss(model, x)[1].backward()
        def step():
            backward()
            zero.step()
        step()  # the states are there from now on
        sent = counted(step)
        backward()
        report[stage, micro] = sent, zero.held()
report["sizes"] = sizes
for micro, held in (3, False), (3, True):
    model = copy.deepcopy(start)
    replicas = Replicas(model)
    def step():
        with replicas.no_sync():
            for _ in range(micro - 1 if held else 0):
                loss(model, x)[1].backward()
        for _ in range(1 if held else micro):
            loss(model, x)[1].backward()
            replicas.finish()
    step()
    report["replicas", held] = counted(step)
"""

MISTAKES = """
from companion.data_parallel import Replicas, Zero
said = []


def refused(f):
    try:
        f()
    except ValueError as error:
        said.append(str(error))


class Idle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


refused(lambda: Zero(Idle(), [], 4))
for make in Replicas, lambda m: Zero(m, [], 2), lambda m: Zero(m, [], 3):
    model = Idle()
    engine = make(model)
    model(torch.ones(1, 2)).sum().backward()
    refused(engine.finish if isinstance(engine, Replicas) else engine.step)
model = Idle().used
replicas = Replicas(model)
model(torch.ones(1, 2)).sum().backward()
refused(lambda: model(torch.ones(1, 2)).sum().backward())
model = Idle()
zero = Zero(model, [], 1)
model.zero_grad(set_to_none=True)
refused(zero.step)
"""


def run(cell, nproc=4, **options):
    options = {"timeout": 120, "backend": "gloo", **options}
    return ranks.run(cell, nproc, **options).values


@pytest.mark.parametrize("cell, cases, forms", [
    (BY_HAND, 6, {"replicas", "zero 1", "zero 2", "zero 3"}),
    (TORCHS, 4, {"ddp", "fsdp", "fsdp, kept"})])
def test_every_form_is_one_process(cell, cases, forms):
    # Outputs, gradients and weights after three steps; 1 to 4 ranks; sizes that do not divide
    for worst in run(cell, values={"CASES": cases}, get=["worst"])["worst"]:
        assert set(worst) == forms
        assert all(error < 1e-9 for error, _ in worst.values()), worst


SUMMED = """
from companion import data_parallel
def summed(unit, flat):
    out = torch.empty_like(unit.shard)
    reduce_scatter(out, flat, unit.group)
    return out
data_parallel._Stage1._reduced = summed
"""


def test_a_sum_in_place_of_the_mean_is_seen():
    worst = run(COMMON + SUMMED + BY_HAND[len(COMMON):], values={"CASES": 1}, get=["worst"])
    worst = worst["worst"][0]
    assert worst["replicas"][0] < 1e-9 and all(worst[f"zero {s}"][0] > 1e-3 for s in (1, 2, 3))


@pytest.fixture(scope="module")
def reports():
    return run(COUNTED, get=["report"])["report"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 3])
def test_bytes_and_memory_equal_their_formulas(reports, stage, micro):
    for report in reports:
        sent, held = report[stage, micro]
        sizes = report["sizes"]
        padded = [4 * -(-n // 4) for n in sizes]
        assert sizes != padded and len(sizes) == 4  # the padding is tested too
        want = sum(traffic(8 * n, 4, stage, micro) for n in padded)
        if stage == 3:  # the model's own unit stays whole from forward to backward
            want -= micro * 3 / 4 * 8 * padded[-1]
        assert want < sent < 1.02 * want + 6000
        parts = [state_bytes(n, 4, stage, 8, 8, 16) for n in sizes]
        want = {k: sum(p[k] for p in parts) for k in held}
        slack = {k: 8 * sum(p - n for p, n in zip(padded, sizes)) for k in held}  # whole, padded
        assert all(want[k] <= held[k] <= want[k] + slack[k] for k in held)
        assert held["states"] == want["states"]


def test_no_sync_sends_once(reports):
    size = 8 * sum(reports[0]["sizes"])
    for report in reports:
        for held in False, True:
            want = traffic(size, 4, 0, 3, no_sync=held)
            assert want < report["replicas", held] < 1.02 * want + 6000


def test_mistakes_are_refused():
    for said in run(MISTAKES, 2, get=["said"])["said"]:
        assert len(said) == 6
        assert "got 4" in said[0] and "idle.weight" in said[1] and "set to None" in said[5]
        assert "unused" in said[2] and "unused" in said[3] and "call finish()" in said[4]


def test_formulas():
    N = 7 * 10**9
    got = [sum(state_bytes(N, 8, stage).values()) / 1e9 for stage in range(4)]
    assert got == [112.0, 38.5, 26.25, 14.0]
    assert state_bytes(10, 4, 3) == {"weights": 6, "gradients": 6, "states": 36}
    assert [traffic(100, 4, s) for s in range(4)] == [150, 150, 150, 225]
    assert [traffic(100, 4, s, 4) for s in range(4)] == [150, 150, 375, 900]
    assert traffic(100, 4, 0, 4, no_sync=False) == 600 and traffic(100, 1, 3) == 0


@pytest.mark.parametrize("wrong", [(1, 1, 4), (1, 0, 1), (1, 2, "3")])
def test_formulas_refuse(wrong):
    for f in state_bytes, traffic:
        with pytest.raises(ValueError, match=repr(wrong[2 if wrong[1] else 1])):
            f(*wrong)
    with pytest.raises(ValueError, match="0 micro"):
        traffic(1, 2, 1, 0)
