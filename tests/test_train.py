"""The training script: equal on any ranks, and nothing lost when it is killed."""
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from companion import corpus, ranks, train  # noqa: E402
from companion.gpt import Config, Decoder  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64}
OPTIONS = train.Options(Path("run"), steps=6, batch=8, length=32, dtype="float64", warmup=2,
                        clip=0.5, save_every=3, device="cpu", model=Config(**SIZES, context=32))
TIGHT = {"rtol": 1e-9, "atol": 1e-12}  # float64: another order of sums, nothing else


def line(o):
    """The command line that says ``o``."""
    words = ["--out", str(o.out), "--device", "cpu"]
    for name in ("steps", "batch", "length", "dtype", "warmup", "clip", "save_every", "keep", "tp"):
        words += ["--" + name.replace("_", "-"), str(getattr(o, name))]
    for name, size in SIZES.items():
        words += ["--" + name.replace("_", "-"), str(size)]
    words += ["--trace", str(o.trace)] if o.trace else []
    return words + ["--resume"] * o.resume


def plain(o):
    """The definition: one process, no sharding. Losses of the steps, and the weights."""
    torch.manual_seed(o.seed)
    model = Decoder(o.model).double()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": gains, "weight_decay": 0.0}], betas=(0.9, 0.95))
    inputs, targets = corpus.windows(corpus.tokens("train"), o.length)
    losses = []
    for step in range(o.steps):
        which = train.indices(step, o.batch, len(inputs), o.seed)
        for group in optimizer.param_groups:
            group["lr"] = o.lr * min(1, (step + 1) / o.warmup)
        loss = F.cross_entropy(model(inputs[which]).flatten(0, 1), targets[which].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


@pytest.fixture(scope="module")
def truth():
    return plain(OPTIONS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


def read(into, checkpoint):
    """Fill the dict of tensors ``into`` from a checkpoint of any ranks, without any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        alone = {"no_dist": True} if "no_dist" in signature(dcp.load).parameters else {}
        dcp.load(into, checkpoint_id=checkpoint, **alone)  # torch 2.6 finds out by itself
    return into


def stored(checkpoint):
    return read({"model": Decoder(OPTIONS.model).double().state_dict()}, checkpoint)["model"]


def losses(text):
    return [float(x.split("loss ")[1].split(",")[0]) for x in text.splitlines()
            if x.startswith("step ")]


def same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m: f"{name}: {m}",
                                   **(tolerance or {"rtol": 0, "atol": 0}))


def alone(o):
    """``o`` on one rank, in this process. Its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train.main(line(o))


# ---------------------------------------------------------------- the data's order

def test_every_window_comes_once_before_any_comes_twice():
    seen = torch.cat([train.indices(step, 6, 20, seed=1) for step in range(10)]).view(3, 20)
    assert all(sorted(epoch.tolist()) == list(range(20)) for epoch in seen)
    assert not torch.equal(seen[0], seen[1])  # each epoch has an order of its own
    assert not torch.equal(train.indices(0, 6, 20, seed=2), train.indices(0, 6, 20, seed=1))


def test_windows_are_the_corpus_cut_up():
    data = corpus.tokens("heldout")
    inputs, targets = corpus.windows(data, 100)
    last = len(inputs) - 1
    x, y = train.windows(data, torch.tensor([7, 0, last]), 100)
    assert torch.equal(x, inputs[[7, 0, last]]) and torch.equal(y, targets[[7, 0, last]])


# ---------------------------------------------------------------- equal to one process

def test_one_rank_is_the_plain_loop(truth, shared, capsys):
    assert alone(replace(OPTIONS, out=shared / "one")) == 0
    torch.testing.assert_close(losses(capsys.readouterr().out), truth[0], rtol=0, atol=1e-6)
    same(stored(shared / "one" / "step-00000006"), truth[1], **TIGHT)


_EQUAL = """
import warnings
from dataclasses import replace
from inspect import signature
from companion import train
warnings.simplefilter("error")
whole = {}
for tp, micro in grids:
    o = replace(options, out=folder / f"{world_size}-{tp}-{micro}", tp=tp, micro=micro)
    model, optimizer, *_ = train.train(o)
    whole[tp, micro] = {k: p.full_tensor().detach() for k, p in model.named_parameters()}
    mine = sum(p.to_local().numel() for p in model.parameters())
"""


GRIDS = {2: [(1, 1), (2, None)], 4: [(1, None), (2, 2)]}  # ranks: (tp, micro) of each run


def launched(cell, nproc, **values):
    return ranks.run(cell, nproc, values=values, backend="gloo", timeout=120,
                     get=["whole", "mine"])


@pytest.fixture(scope="module")
def equal(shared):
    """What all runs on so many ranks left, launched once."""
    return functools.cache(lambda nproc: launched(
        _EQUAL, nproc, options=OPTIONS, folder=shared, grids=GRIDS[nproc]))


@pytest.mark.parametrize("nproc", GRIDS)
def test_ranks_equal_one_process(truth, equal, nproc):
    outcome = equal(nproc)
    text = outcome.stdout[0].split("ranks, ")[1:]  # one part a run
    for part, grid in zip(text, GRIDS[nproc], strict=True):
        torch.testing.assert_close(losses(part), truth[0], rtol=0, atol=1e-6)
        for whole in outcome.values["whole"]:
            same(whole[grid], {k: truth[1][k] for k in whole[grid]}, **TIGHT)
    parameters = sum(p.numel() for p in Decoder(OPTIONS.model).parameters())
    assert sum(outcome.values["mine"]) >= parameters  # what is whole on some ranks counts twice
    assert max(outcome.values["mine"]) < 1.1 * parameters / nproc


_RESUME = """
import warnings
from dataclasses import replace
from inspect import signature
from companion import train
from companion.gpt import Decoder
warnings.simplefilter("error")
whole = []
for tp in 1, 2:
    mesh = train.init_device_mesh("cpu", (2 // tp, tp), mesh_dim_names=("data", "tensor"))
    model = train.shard(Decoder(options.model).double(), mesh)
    optimizer = train.adamw(model, 1.0)
    facts = train.load(checkpoint, model, optimizer)
    weights, moments = train.get_state_dict(model, optimizer)
    whole.append((facts["step"], {k: p.full_tensor().detach() for k, p in model.named_parameters()},
                  {k: {n: m.full_tensor() if hasattr(m, "full_tensor") else m for n, m in s.items()}
                   for k, s in moments["state"].items()}))
mine = train.train(replace(options, out=checkpoint.parent, steps=6, resume=True, tp=2))[2]
"""


def test_saved_on_four_resumed_on_two(truth, shared, equal):
    """Bit for bit, moments too; then on to where the undisturbed run got."""
    equal(4)
    checkpoint = shared / "resumed" / "step-00000003"
    shutil.copytree(shared / "4-2-2" / checkpoint.name, checkpoint)
    weights = stored(checkpoint)
    outcome = launched(_RESUME, 2, options=OPTIONS, checkpoint=checkpoint)
    for step, whole, moments in outcome.values["whole"][0]:
        assert step == 3
        same(whole, {k: weights[k] for k in whole})
        empty = {k: {n: torch.zeros_like(m) for n, m in s.items()} for k, s in moments.items()}
        into = read({"optimizer": {"state": empty}}, checkpoint)
        for name, state in into["optimizer"]["state"].items():
            same(state, moments[name])
            assert state["step"] == 3 and state["exp_avg_sq"].max() > 0
    assert outcome.values["mine"] == [6, 6]
    assert "from step 3" in outcome.stdout[0]
    same(stored(checkpoint.parent / "step-00000006"), truth[1], **TIGHT)


# ---------------------------------------------------------------- killed and stopped

_KILLED = """
import os, signal
from companion import train

if rank == dying:
    places = {"while its part is written": (train.dcp.filesystem, "_write_item"),
              "before the list of parts": (train.dcp.FileSystemWriter, "finish"),
              "while an old one is deleted": (train.shutil, "rmtree")}
    owner, name = places[place]
    real = getattr(owner, name)

    def dies_at_the_second_save(*a, **k):
        if list(folder.glob("*step-00000006")):
            folder.with_suffix(".killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*a, **k)

    setattr(owner, name, dies_at_the_second_save)
train.train(options)
"""


@pytest.mark.parametrize("place, dying, left", [
    ("while its part is written", 1, 3), ("before the list of parts", 0, 3),
    ("while an old one is deleted", 0, 6)])
def test_killed_during_a_save(truth, shared, place, dying, left):
    """The second save never ends, but the newest checkpoint is whole, and training goes on."""
    o = replace(OPTIONS, out=shared / place.replace(" ", "-"), keep=1)
    with pytest.raises(ranks.RanksFailed):  # by the kill, or first by the peer that it leaves alone
        ranks.run(_KILLED, 2, values={"options": o, "folder": o.out, "place": place,
                                      "dying": dying}, backend="gloo", timeout=120)
    assert o.out.with_suffix(".killed").exists()
    assert [p.name for p in o.out.glob("step-*")] == [f"step-{left:08d}"]
    assert list(o.out.glob(".step-*"))  # what the kill interrupted lies beside it
    assert alone(replace(o, steps=7, resume=True)) == 0
    assert [p.name for p in o.out.iterdir()] == ["step-00000007"]
    same(stored(o.out / "step-00000007"), plain(replace(o, steps=7))[1], **TIGHT)


def torchrun(o, *options):
    """``torchrun`` on two ranks, warnings from torch being errors."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options,
               "-m", "companion.train", *line(o)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
           "PYTHONWARNINGS": "error::FutureWarning,error::DeprecationWarning"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, start_new_session=True)


@pytest.fixture
def started():
    """Starts ``torchrun``; kills whatever is left of it."""
    running = []

    def start(*arguments):
        running.append(torchrun(*arguments))
        return running[-1]
    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def traced(folder):
    """What each rank noted: {rank: list of lines}."""
    return {p.stem: [json.loads(x) for x in p.read_text().splitlines() if x.endswith("}")]
            for p in folder.glob("rank-*.jsonl")}


def until(holds, seconds=120):
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
    return found


def trajectory(folder):
    """{step: windows of all ranks} of the run that survived: of a step's notes the last."""
    steps = {}
    for rank, lines in sorted(traced(folder).items()):
        last = {x["step"]: x["windows"] for x in lines}
        for step, windows in last.items():
            steps.setdefault(step, []).extend(windows)
    return steps


def test_a_killed_rank_is_restarted_and_loses_nothing(shared, started):
    """SIGKILL in mid-run: torchrun starts both anew, from the last checkpoint."""
    o = replace(OPTIONS, out=shared / "killed", trace=shared / "trace", steps=24, save_every=5,
                resume=True)
    process = started(o, "--max-restarts", "1", "--monitor-interval", "0.1")
    victim = until(lambda: [x["pid"] for x in traced(o.trace).get("rank-1", []) if x["step"] == 8])
    os.kill(victim[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    notes = traced(o.trace)["rank-1"]
    before = [x["step"] for x in notes if x["attempt"] == 0]
    after = [x["step"] for x in notes if x["attempt"] == 1]
    assert before == list(range(1, len(before) + 1)) and 8 <= len(before) < 24
    assert after == list(range(after[0], 25)) and after[0] % 5 == 1 and after[0] > 1
    undisturbed = {step: train.indices(step - 1, o.batch, (len(corpus.tokens("train")) - 1)
                                       // o.length, o.seed).tolist() for step in range(1, 25)}
    assert trajectory(o.trace) == undisturbed
    lost, weights = plain(o)
    torch.testing.assert_close(losses(out)[-1], lost[-1], rtol=0, atol=1e-6)
    same(stored(o.out / "step-00000024"), weights, **TIGHT)
    facts = json.loads((o.out / "step-00000024" / "facts.json").read_text())
    assert facts["step"] == 24 and facts["windows"] == 24 * o.batch


def test_sigterm_saves_and_stops(shared, started):
    o = replace(OPTIONS, out=shared / "term", trace=shared / "term-trace", steps=10**6,
                save_every=10**6)
    process = started(o)
    until(lambda: len(traced(o.trace).get("rank-0", [])) >= 3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    notes = traced(o.trace)
    last = notes["rank-0"][-1]["step"]
    assert notes["rank-1"][-1]["step"] == last  # both stopped after the same step
    assert [p.name for p in o.out.iterdir()] == [f"step-{last:08d}"]
    assert f"stopped by SIGTERM after step {last}" in out


def test_ctrl_c_saves_and_stops(shared, monkeypatch, capsys):
    o = replace(OPTIONS, out=shared / "interrupt", trace=shared / "interrupt-trace")
    real = train._trace

    def note(folder, rank, step, mine):
        real(folder, rank, step, mine)
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # as torchrun repeats a terminal's
    monkeypatch.setattr(train, "_trace", note)
    before = signal.getsignal(signal.SIGINT)
    assert alone(o) == 128 + signal.SIGINT
    assert capsys.readouterr().out.endswith("stopped by SIGINT after step 5\n")
    assert train.newest(o.out)[1] == 5 and signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------- one clear line

@pytest.mark.parametrize("words, message", [
    (["--tp", "2"], "--tp 2 does not divide the 1 ranks"),
    (["--batch", "0"], "--batch must be above 0, got 0"),
    (["--lr", "nan"], "--lr must be above 0, got nan"),
    (["--micro", "3"], "--micro 3 does not divide a rank's 8 sequences"),
    (["--dtype", "float8"], "--dtype must be one of float32, float64, bfloat16, got float8"),
    (["--heads", "3"], "heads 3 must divide width 32"),
    (["--length", "20000000"], "--length 20000000, but the text has"),
    (["--device", "tpu"], "--device must be cpu or cuda, got tpu"),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (["--speed"], "unrecognized arguments: --speed")])
def test_a_mistake_is_one_line(shared, capsys, words, message):
    assert train.main([*line(replace(OPTIONS, out=shared / "mistake")), *words]) == 2
    text = capsys.readouterr().err
    assert message in text and len(text.splitlines()) == 1
    assert not list(shared.glob("mistake/*"))


@pytest.mark.parametrize("ranks_, tp, message", [(3, 1, "--batch 8 does not divide over 3"),
                                                 (16, 4, "does not divide --kv-heads 2")])
def test_what_does_not_fit_the_ranks(ranks_, tp, message):
    with pytest.raises(ValueError, match=message):
        replace(OPTIONS, tp=tp).check(ranks_)


def test_going_on_with_another_run_is_refused(shared, capsys):
    o = replace(OPTIONS, out=shared / "going", steps=1)
    assert alone(o) == 0
    assert alone(o) == 2 and "give --resume, or another --out" in capsys.readouterr().err
    assert alone(replace(o, resume=True, batch=4)) == 2
    assert "was made with batch 8, not 4" in capsys.readouterr().err
    assert alone(replace(o, resume=True, steps=2)) == 0  # more steps are no other run


def test_bfloat16_learns_what_float32_does(shared, capsys):
    seen = {}
    for dtype in "float32", "bfloat16":
        assert alone(replace(OPTIONS, out=shared / dtype, dtype=dtype, micro=2)) == 0
        seen[dtype] = losses(capsys.readouterr().out)
    torch.testing.assert_close(seen["bfloat16"], seen["float32"], rtol=0, atol=0.02)
    assert seen["bfloat16"] != seen["float32"]
    assert stored(shared / "bfloat16" / "step-00000006")["norm.weight"].dtype == torch.float64
