"""The benchmarks on ranks: what they count, that they check, and that one failure stays one."""
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
    pytest.skip("measured with today's PyTorch alone", allow_module_level=True)
import parallel_steps as steps  # noqa: E402
from companion import ranks  # noqa: E402
from companion.gpt import Config, Decoder  # noqa: E402


# ---------------------------------------------------------------- counting

@pytest.mark.parametrize("kv_heads, batch, length", [(2, 1, 8), (4, 3, 16)])
def test_flops_are_those_that_pytorch_counts(kv_heads, batch, length):
    """PyTorch's counter takes attention whole; the causal mask leaves (T + 1) / 2T of it."""
    c = Config(width=32, layers=2, heads=4, kv_heads=kv_heads, hidden=48, context=16, vocab=64)
    with torch.device("meta"):
        model, tokens = Decoder(c), torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    whole = 12 * c.layers * batch * c.width * length**2
    causal = whole * (length + 1) // (2 * length)
    by_name = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    matrices = sum(n for op, n in by_name.items() if op == "aten.mm")
    assert matrices == steps.flops(c, batch, length) - causal
    assert sum(by_name.values()) >= matrices + whole  # backward of attention recomputes some


def test_exposed_is_where_only_nccl_runs():
    #            0 1 2 3 4 5 6 7 8 9
    # compute    ----      ----        two kernels overlap from 6 to 7
    # nccl           ----------   --
    kernels = [("gemm", 0, 2), ("ncclDevKernel_AllReduce", 2, 7), ("gemm", 5, 7),
               ("softmax", 6, 7), ("ncclDevKernel_SendRecv", 8, 9)]
    assert steps.exposed(kernels) == (4, 6)
    assert steps.exposed(kernels[:1]) == (0, 0)
    assert steps.covered([(3, 4), (0, 2), (1, 2.5)]) == [[0, 2.5], [3, 4]]


def test_only_kernels_of_a_trace_count(tmp_path):
    events = [{"cat": "kernel", "name": "gemm", "ts": 5, "dur": 2},
              {"cat": "gpu_user_annotation", "name": "nccl:all_reduce", "ts": 0, "dur": 9},
              {"ph": "M", "name": "process_name"}]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert steps.kernels_of(tmp_path / "t.json") == [("gemm", 5, 7)]


# ---------------------------------------------------------------- on ranks

_MAIN = """
import sys
sys.path.insert(0, folder)
import parallel_bandwidth, parallel_steps as steps
import parallel_kit as kit
words = ["--device", "cpu", "--tiny", "--out", str(out)]
r = kit.Ranks("cpu")
if world_size == 2:
    parallel_bandwidth.main(kit.arguments("a test", words), r)
else:
    words += ["--only", "one GPU,FSDP2 x TP+SP,FSDP2 x 1F1B"]
steps.main(kit.arguments("a test", words), r)
"""


def launched(cell, nproc, out, **options):
    return ranks.run(cell, nproc, backend="gloo", bare=True, timeout=240, values={
        "folder": str(ROOT / "benchmarks"), "out": out}, **options)


def rows_of(path):
    return json.loads(path.read_text())["results"]["rows"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, outcome) of all that two ranks can show, in one launch."""
    out = tmp_path_factory.mktemp("two")
    return out, launched(_MAIN + _FAILING, 2, out, get=["halves"])


def test_bandwidth(two):
    rows = rows_of(two[0] / "parallel_bandwidth_2.json")
    assert [r["name"] for r in rows if "error" in r] == []
    assert len({(r["collective"], r["bytes"]) for r in rows}) == len(rows) == 8
    for r in rows:
        assert r["sent"] == r["bytes"] / 2 * (2 if r["collective"] == "all_reduce" else 1)
        assert 0 < r["low"] <= r["seconds"] <= r["high"]
        assert r["bus_bytes_per_s"] == r["sent"] / r["seconds"]


def check(rows, forms):
    assert {name: r["error"] for name, r in rows.items() if "error" in r} == {}
    for name in forms:
        assert rows[name]["equal"]["largest_relative_difference"] < 1e-5
        assert rows[name]["equal"]["losses"][2] < rows[name]["equal"]["losses"][0] - 0.2
        assert rows[name]["flops"] == rows["one GPU"]["flops"]


def test_every_form_equals_one_process_and_is_timed(two):
    rows = {r["name"]: r for r in rows_of(two[0] / "parallel_steps_2.json")}
    forms = [name for name, (_, fewest) in steps.FORMS.items() if fewest <= 2]
    assert list(rows) == [*forms, "experts", "ring 1", "ring 1 longest", "ring 2",
                          "ring 2 longest"]
    check(rows, forms[1:])
    for one, both in zip(rows["ring 1"]["rows"], rows["ring 2"]["rows"]):
        assert both["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_forms_in_two_dimensions(tmp_path):
    launched(_MAIN, 4, tmp_path)
    rows = {r["name"]: r for r in rows_of(tmp_path / "parallel_steps_4.json")}
    forms = [name for name, (_, fewest) in steps.FORMS.items() if fewest == 4]
    assert list(rows) == ["one GPU", *forms]
    check(rows, forms)


_FAILING = """
import types

def too_large(ranks, model, make):      # gradients of the sum, not of the mean
    step = steps.fsdp2(ranks, model, make)
    real = steps.cross_entropy
    def wrong(x, y):
        steps.cross_entropy = lambda *a: real(*a) * 2
        try:
            return step(x, y) / 2
        finally:
            steps.cross_entropy = real
    return wrong

def on_one_rank():
    if r.rank == 1:
        raise MemoryError("no room")
    return {}

steps.FORMS["too large"] = (too_large, 2)
o = types.SimpleNamespace(tiny=True)
ledger = kit.Ledger(r, "failing", steps.__file__, out, {}, 99)
ledger.run("too large", lambda: steps.measure(r, "too large", o))
ledger.run("on one rank", on_one_rank)
ledger.run("fine", lambda: {"x": r.size})
late = kit.Ledger(r, "late", steps.__file__, out, {}, -1)
late.run("late", lambda: 1 / 0)
split = steps.train.split_tensors(steps.decoder(r, steps.small(r), torch.float32),
                                  r.mesh(tensor=2), False)
halves = {k: p.to_local().numel() * 2 == p.numel() for k, p in split.named_parameters()
          if "norm" not in k}
"""


def test_a_failure_is_recorded_and_the_next_one_runs(two):
    out, outcome = two
    rows = rows_of(out / "failing.json")
    assert [r["name"] for r in rows] == ["too large", "on one rank", "fine"]
    assert "but one process has" in rows[0]["error"]
    assert rows[1]["error"].startswith("rank 1: MemoryError: no room")
    assert rows[2]["x"] == 2 and "error" not in rows[2]
    assert rows_of(out / "late.json")[0]["error"] == "not run: the budget of time was spent"
    assert all(all(h.values()) and len(h) == 4 * 7 + 1 for h in outcome.values["halves"])


_RESTARTED = """
import os, sys
sys.path.insert(0, folder)
os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
import parallel_kit as kit
ledger = kit.Ledger(kit.Ranks("cpu"), "parallel_steps_1", kit.__file__, out, {}, 99)
for name in "DDP", "FSDP2", "TP":
    ledger.run(name, lambda: {"seconds": 2})
"""


def test_after_a_restart_what_is_done_stays_and_what_hung_failed(tmp_path):
    rows = [{"name": "DDP", "seconds": 1}, {"name": "FSDP2", "begun": True}]
    (tmp_path / "parallel_steps_1.json").write_text(json.dumps({"results": {"rows": rows}}))
    launched(_RESTARTED, 1, tmp_path)
    rows = rows_of(tmp_path / "parallel_steps_1.json")
    assert [(r["name"], r.get("seconds")) for r in rows] == [("DDP", 1), ("FSDP2", None), ("TP", 2)]
    assert rows[1]["error"] == "a rank died or hung"
