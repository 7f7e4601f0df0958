"""Cuts along several axes equal one process; the cost model, failures, and published runs."""
import json
from collections import Counter
from dataclasses import replace
from importlib import resources

import pytest
import torch
from torch.distributed.pipelining import _backward as torch_backward
from torch.utils._python_dispatch import TorchDispatchMode

from companion import costs, failures, memory, ranks, schedules
from companion.gpt import Config, Decoder
from companion.hardware import gpu
from companion.pipeline import Stage

# One launch, many cases: every shape of the mesh with 1 to 4 ranks, random sizes
EQUAL = """
import itertools, math, random, warnings
warnings.simplefilter("error")
from torch.distributed.device_mesh import DeviceMesh
from companion.mesh import Stack, cut, pipeline, whole

AXES = ("dp", "pp", "tp")
SHAPES = shapes or [s for s in itertools.product((1, 2, 3, 4), repeat=3) if math.prod(s) <= 4]
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)  # cuts evenly or not at all
draw, worst, ran = random.Random(0), 0.0, []


def optimizer(model):
    # Norms live on one axis of the mesh and matrices on two: no fused list can hold both
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def gap(a, b):
    return (a - b).abs().max().item() / max(1e-3, b.abs().max().item())


for shape in SHAPES:
    n = math.prod(shape)
    mesh = DeviceMesh("cpu", torch.arange(n).view(shape), mesh_dim_names=AXES)
    split = shape[2] * (shape[0] if OLD else 1)
    heads = split * draw.choice([1, 2])
    width, hidden = heads * draw.choice([4, 5, 6]), split * draw.randint(1, 6)
    micro, steps = shape[1] * draw.choice([1, 2]), 3
    layers = shape[1] * draw.choice([1, 2])
    each, length = draw.randint(1, 2), draw.randint(1, 7)
    torch.manual_seed(draw.randint(0, 999))
    if rank >= n:
        continue
    one = Stack(width, heads, hidden, layers).double()
    torch.manual_seed(0)
    mine = Stack(width, heads, hidden, layers).double()
    mine.load_state_dict(one.state_dict())
    mine = cut(mine, mesh)
    step, dp = pipeline(mine, mesh, micro), mesh["dp"]
    first, second = optimizer(one), optimizer(mine)
    batch = each * micro * dp.size()
    for i in range(steps):
        data = torch.Generator().manual_seed(i)
        x, y = (torch.randn(batch, length, width, generator=data, dtype=torch.float64)
                for _ in range(2))
        loss = torch.nn.functional.mse_loss(one(x), y)
        loss.backward()
        here = dp.get_local_rank()
        got = step(x.chunk(dp.size())[here], y.chunk(dp.size())[here])
        if got is not None:
            total = got.clone()
            torch.distributed.all_reduce(total, group=dp.get_group())
            worst = max(worst, gap(total / dp.size(), loss.detach()))
        theirs = dict(one.named_parameters())
        for name, p in mine.named_parameters() if i == 0 else ():
            worst = max(worst, gap(whole(p.grad).detach(), theirs[name].grad))
        for o in (first, second):
            o.step()
            o.zero_grad()
    for name, p in mine.named_parameters():
        worst = max(worst, gap(whole(p).detach(), theirs[name].detach()))
    ran.append(shape)
"""


def test_cuts_along_two_and_three_axes_equal_one_process():
    got = ranks.run(EQUAL, 4, values={"shapes": None}, get=["worst", "ran"], backend="gloo",
                    timeout=120).values
    assert [len(r) for r in got["ran"]] == [13, 12, 9, 6]  # meshes that hold rank 0, 1, 2, 3
    assert max(got["worst"]) < 1e-9, got["worst"]


def test_three_axes_of_two_on_eight_ranks_equal_one_process():
    got = ranks.run(EQUAL, 8, values={"shapes": [(2, 2, 2)]}, get=["worst", "ran"],
                    backend="gloo", timeout=120).values
    assert got["ran"] == 8 * [[(2, 2, 2)]]
    assert max(got["worst"]) < 1e-9, got["worst"]


# The same stack, cut wrongly: each must be seen by what the test above compares
BROKEN = """
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from companion import mesh as m
from companion.wire import counted


def undivided(stage, mesh, n, loss):
    return lambda x, y: [loss(stage(a), b).backward() for a, b in zip(x.chunk(n), y.chunk(n))]


def off(build, loss):
    torch.manual_seed(0)
    one = m.Stack(8, 4, 16, 2).double()
    torch.manual_seed(0)
    mine = m.cut(m.Stack(8, 4, 16, 2).double(), mesh)
    x, y = torch.randn(2, 4, 3, 8, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(1))
    mse_loss(one(x), y).backward()
    here = mesh["dp"].get_local_rank()
    build(mine, mesh, 2, loss=loss)(x.chunk(2)[here], y.chunk(2)[here])
    full = dict(one.named_parameters())
    return max((m.whole(p.grad).detach() - full[n].grad).abs().max().item()
               / full[n].grad.abs().max().item()
               for n, p in mine.named_parameters() if not n.endswith(".k.bias"))  # theirs is 0


AXES = ("dp", "pp", "tp")
mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)
gaps = {"right": off(m.pipeline, mse_loss),
        "a sum over a micro-batch": off(
            m.pipeline, lambda a, b: mse_loss(a, b, reduction="sum")),
        "not divided by the micro-batches": off(undivided, mse_loss),
        "tensor ranks disagree": off(
            m.pipeline, lambda a, b: mse_loss(a, b) * (1 + mesh["tp"].get_local_rank()))}

line = init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=AXES)
net = m.cut(m.Stack(64, 4, 128, 2).double(), line)
step, x = m.pipeline(net, line, 1), torch.randn(8, 64, 64, dtype=torch.float64)
step(x, x)
sent = counted(step, x, x)
"""


@pytest.fixture(scope="module")
def seen():
    return ranks.run(BROKEN, 4, get=["gaps", "sent"], backend="gloo", timeout=60).values


def test_what_the_comparison_catches(seen):
    gaps = {name: max(g[name] for g in seen["gaps"]) for name in seen["gaps"][0]}
    assert gaps.pop("right") < 1e-9
    assert len(gaps) == 3 and min(gaps.values()) > 1e-3, gaps


def test_tensor_parallel_sends_four_all_reduces_a_layer_through_tcp(seen):
    want = 2 * 4 * 2 * 3 / 4 * (8 * 64 * 64 * 8)  # layers, all-reduces, ring of 4, activations
    assert all(want <= s < 1.03 * want for s in seen["sent"]), (seen["sent"], want)


# ---------------------------------------------------------------- the cost model

def row(name, gpus):
    return next(r for r in costs.runs() if r.name.startswith(name) and r.cluster.gpus == gpus)


def test_the_rows_are_what_the_reports_print():
    assert len(costs.runs()) == 15 and sum(r.held_out for r in costs.runs()) == 3
    assert len(costs.runs(later=True)) == 13
    for r in costs.runs() + costs.runs(later=True):
        costs.check(r.network, r.cluster, r.layout, r.batch)
    sizes = {"Megatron-LM 145.6B": 145.6e9, "Megatron-LM 1008B": 1008e9, "MT-NLG": 530e9,
             "BLOOM": 176.2e9, "Llama 3": 405.9e9, "Nemotron-4": 341e9,
             "Megatron-LM 7.5B": 7.5e9, "Megatron-LM 76.1B": 76.1e9, "GPT 22B": 22e9}
    for r in costs.runs() + costs.runs(later=True):
        for name, size in sizes.items():
            if r.name.startswith(name):
                assert r.network.parameters == pytest.approx(size, rel=0.01), r.name
    # printed as a share of the peak by the report itself, recomputation left out
    assert row("GPT 530B", 280).network.model_flops(2048, causal=False) * 280 * 2048 / (
        280 * 312e12 * 37.83) == pytest.approx(0.560, abs=0.002)
    assert row("GPT-3", 64).network.model_flops(2048, causal=False) * 64 * 2048 / (
        64 * 312e12 * 13.75) == pytest.approx(0.514, abs=0.002)
    nemotron = row("Nemotron", 6144)
    assert nemotron.network.model_flops(4096, causal=False) * 2304 * 4096 / (
        6144 * 989.5e12 * 8.0) == pytest.approx(0.410, abs=0.005)
    bloom = row("BLOOM", 384)  # 149.77 TFLOP/s per GPU is printed beside 104.7 s
    again = replace(bloom, printed=("FLOP/s", 149.77e12),
                    counts="full attention with recomputation")
    assert again.seconds == pytest.approx(104.7, rel=0.01)
    mt = row("MT-NLG", 2240)  # 126 TFLOP/s per GPU is printed beside 60.1 s
    again = replace(mt, printed=("FLOP/s", 126e12), counts="full attention with recomputation")
    assert again.seconds == pytest.approx(60.1, rel=0.02)


def test_saved_bytes_are_the_published_formulas():
    for t, s, a, h in (1, 2048, 96, 12288), (8, 2048, 96, 12288), (4, 1024, 16, 1024):
        net = costs.Network(1, h, a, a, 4 * h, 1, gated=False, dropout=True)
        scores = 5 * a * s / h / t
        for sequence, want in (False, 10 + 24 / t + scores), (True, 34 / t + scores):
            got = costs.saved_bytes(net, costs.Layout(tp=t, sequence=sequence, fused=False), s)
            assert sum(got) == pytest.approx(h * want)


def test_saved_bytes_on_one_gpu_are_those_of_the_memory_chapter():
    shape = memory.LLAMA_3_8B
    net = costs.Network(32, 4096, 32, 8, 14336, 128256)
    assert net.parameters == memory.count_parameters(shape) - (2 * 32 + 1) * 4096
    mine = sum(costs.saved_bytes(net, costs.Layout(), 4096))
    theirs = memory.llama_block_bytes(shape, 1, 1)
    # theirs also keeps silu(gate), which a fused SwiGLU makes again, and one number a norm
    assert theirs - mine == 2 * 14336 + 2 * 4


@pytest.mark.parametrize("p, m, v", [(2, 2, 1), (4, 8, 1), (4, 8, 2), (8, 8, 4), (3, 9, 3)])
def test_bubble_and_memory_are_the_simulator_s(p, m, v):
    lists = schedules.interleaved(p, m, v) if v > 1 else schedules.one_f_one_b(p, m)
    line = schedules.simulate(lists)
    net = costs.Network(p * v, 64, 4, 4, 256, 1, gated=False)
    s = costs.step(net, costs.Cluster("H100", p, 1e15, inside=1e15),
                   costs.Layout(pp=p, chunks=v), m, 8)
    each = s.parts["bubble"] * v / (p - 1)  # one micro-batch through the slowest stage
    assert s.parts["bubble"] / (m * each) == pytest.approx(line.overhead)
    plain = sum(costs.saved_bytes(net, costs.Layout(), 8))
    assert s.memory["activations"] == pytest.approx(8 * plain * v * line.in_flight[0] / v)


def test_each_axis_changes_what_it_should():
    net, fast = costs.NETWORKS["Llama 3 8B"], dict(between=50e9)

    def parts(**layout):
        layout = costs.Layout(**layout)
        return costs.step(net, costs.Cluster("H100", layout.ranks, **fast), layout, 64, 4096)
    one, tp, wide = parts(dp=8), parts(tp=8), parts(tp=16)
    assert one.parts["tp"] == one.parts["bubble"] == one.parts["cp"] == 0 < tp.parts["tp"]
    per_gpu = [s.parts["tp"] / (n - 1) for s, n in ((tp, 8), (wide, 16))]
    assert per_gpu[1] / per_gpu[0] == pytest.approx(450 / 50 * 8 / 16)  # out of the node
    assert tp.parts["products"] == pytest.approx(one.parts["products"])
    assert parts(pp=8, chunks=4).parts["bubble"] == pytest.approx(parts(pp=8).parts["bubble"] / 4)
    full = parts(dp=8, recompute="full")
    assert full.parts["recompute"] - one.parts["recompute"] == pytest.approx(
        one.parts["products"] / 3 * (1 - 6 * 128256 * 4096 / net.model_flops(4096)), rel=1e-6)
    assert full.memory["activations"] < one.memory["activations"] / 4
    states = [parts(dp=8, zero=z).memory["states"] for z in (0, 1)]
    assert states[0] - states[1] == pytest.approx(net.parameters * 12 * 7 / 8)
    moe = replace(net, experts=8, top_k=2)
    cluster = costs.Cluster("H100", 8, **fast)
    here = costs.step(moe, cluster, costs.Layout(dp=8, ep=8), 64, 4096)
    assert here.parts["ep"] > 0 == one.parts["ep"]
    assert here.memory["gradients"] == pytest.approx(one.memory["gradients"])  # one expert each


def test_the_shares_are_the_fit_and_the_fit_can_fail():
    kept = [r for r in costs.runs() if not r.held_out]
    assert costs.fit(kept) == costs.SHARES
    slower = [replace(r, printed=("seconds", 2 * r.seconds)) for r in kept]
    assert costs.fit(slower)["Ampere"] < 0.7 * costs.SHARES["Ampere"]


# Catches a short cut of the fit that leaves out what a prediction has.
def test_a_fit_and_a_prediction_count_the_same_seconds():
    for run in [*costs.runs(), *costs.runs(later=True)]:
        shares = {"link": 0.7, run.cluster.gpu.architecture: 0.6}
        assert run.predicted_seconds(shares) == run.predict(shares).seconds


def test_bad_layouts_are_said():
    net, cluster = costs.NETWORKS["Llama 3 8B"], costs.Cluster("H100", 16, 50e9)
    for layout, batch, message in [
            (costs.Layout(tp=8), 8, "is 8 ranks, not 16"), (costs.Layout(dp=16), 8, "a batch of 8"),
            (costs.Layout(pp=16, chunks=4), 8, "32 layers do not fill"),
            (costs.Layout(dp=16, recompute="some"), 16, "not 'some'"),
            (costs.Layout(dp=16, chunks=2), 16, "nothing to interleave"),
            (costs.Layout(dp=16, ep=16), 16, "ep 16 must divide 1 experts")]:
        with pytest.raises(ValueError, match=message):
            costs.step(net, cluster, layout, batch, 4096)
    with pytest.raises(KeyError):
        costs.step(net, costs.Cluster("B200", 16, 50e9), costs.Layout(dp=16), 16, 4096)


def test_search_is_the_best_of_all_that_fit():
    net, cluster = costs.NETWORKS["Llama 3 70B"], costs.Cluster("H100", 64, 50e9)
    found = costs.search(net, cluster, 128, 8192)
    every = [costs.step(net, cluster, l, 128, 8192) for l in costs.layouts(net, cluster, 128)]
    assert found[0].seconds == min(s.seconds for s in every if s.fits)
    assert len(found) == sum(s.fits for s in every) < len(every)
    room = cluster.gpu.memory_bytes
    assert all(sum(s.memory.values()) < room for s in found)


# ---------------------------------------------------------------- failures

def test_the_formula_is_what_happens():
    cases = (1156, 60, 11135, 0), (300, 60, 3000, 600), (50, 5, 90, 10)
    for interval, save, mtbf, restart in cases:
        exact = failures.lost_share(interval, save, mtbf, restart)
        played = failures.simulate(interval, save, mtbf, restart, failures=40_000)
        assert played == pytest.approx(exact, abs=0.006)
    best = failures.best_interval(60, 11135)
    at_best = failures.lost_share(best, 60, 11135)
    assert all(at_best < failures.lost_share(best * k, 60, 11135) for k in (0.6, 1.6))


@pytest.mark.parametrize("wrong", [(0, 60, 1), (60, -1, 1), (60, 60, 0), (float("nan"), 60, 1)])
def test_times_must_be_positive(wrong):
    for f in failures.lost_share, failures.simulate:
        with pytest.raises(ValueError, match="must be above 0 s"):
            f(*wrong)


# Catches a fit that needs its own result: shares of chips that nobody has fitted yet.
def test_a_run_on_a_chip_without_a_fitted_share():
    run = next(r for r in costs.runs() if r.cluster.gpu.architecture == "Hopper" and r.open)
    new = replace(run, cluster=replace(run.cluster, chip="B200"))
    quick, slow = (new.predict({"Blackwell": share, "link": 0.9}).seconds for share in (0.9, 0.3))
    assert quick < slow
    assert costs.fit([new]).keys() == {"Blackwell", "link"}


# ---------------------------------------------------------------- beside two GPUs

def test_the_network_of_the_prediction_is_the_decoder_that_was_measured():
    path = resources.files("companion") / "data" / "parallel.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["2"]["steps"]
    one = next(r for r in rows if r["name"] == "one GPU")
    done = one["mfu"] * one["seconds"] * gpu("H200").peak("bf16")
    net = costs.Network(16, 3072, 24, 8, 8192, 256, tied=True)
    assert 8 * 2048 * net.model_flops(2048) == pytest.approx(done, rel=1e-3)
    assert abs(8 * 2048 * replace(net, kv_heads=24).model_flops(2048) / done - 1) > 0.1


class Kernels(TorchDispatchMode):
    """Counts what is run, but for operations that only make a view."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f.overloadpacket.__name__
        if name not in ("view", "_unsafe_view", "t", "transpose", "detach", "expand"):
            self.count[name] += 1
        return f(*args, **(kwargs or {}))


def test_the_halves_of_torch_run_the_kernels_of_one_backward():
    def at_once(x, y):
        torch_backward.stage_backward([y], [torch.ones_like(y)], [x])

    def in_halves(x, y):
        _, groups = torch_backward.stage_backward_input(
            [y], [torch.ones_like(y)], [x], stage.parameters())
        torch_backward.stage_backward_weight(stage.parameters(), groups)
    found = []
    for backward in at_once, in_halves:
        torch.manual_seed(0)
        decoder = Decoder(Config(width=32, layers=2, heads=4, kv_heads=2, hidden=64)).double()
        stage = Stage(decoder, decoder.blocks, first=False, last=False)
        x = torch.randn(1, 8, 32, dtype=torch.float64, requires_grad=True)
        y = stage(x)
        with Kernels() as kernels:
            backward(x, y)
        found.append((kernels.count, [p.grad for p in stage.parameters()]))
    (once, whole), (halves, parts) = found
    assert once == halves and once["mm"] == 2 * 7 * 2
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(whole, parts, strict=True))


LISTS = """
import torch.distributed.pipelining as pipelining
names, lists = dict(FORWARD="F", BACKWARD_INPUT="I", BACKWARD_WEIGHT="W", FULL_BACKWARD="B"), {}
for name in "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble":
    stages = [pipelining.PipelineStage(torch.nn.Linear(4, 4), s, 4, torch.device("cpu"))
              for s in (rank, rank + 2)]
    made = getattr(pipelining, name)(stages, 8, loss_fn=lambda y, t: y.sum())
    lists[name] = [[(names[a.computation_type.name], a.microbatch_index, a.stage_index)
                    for a in made.pipeline_order[r] if a is not None] for r in (0, 1)]
"""


def test_torch_s_order_for_zero_bubble_is_shorter_where_messages_and_hosts_are_free():
    lists = ranks.run(LISTS, 2, get=["lists"], backend="gloo", timeout=60).values["lists"][0]

    def seconds(name):
        actions = tuple(tuple(schedules.Action(*a) for a in row) for row in lists[name])
        return schedules.simulate(schedules.Schedule(name, actions, (0, 1, 0, 1), 4)).time
    whole = 2 * schedules.simulate(schedules.one_f_one_b(2, 8)).time  # stages twice as deep
    assert (seconds("ScheduleInterleavedZeroBubble"), seconds("ScheduleInterleaved1F1B"),
            whole) == (49, 51, 54)
