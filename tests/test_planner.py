"""The planner against published counts, hand counts and real tensors; never against itself."""
import contextlib
import csv
import functools
import io
import json
import os
import random
import subprocess
import sys
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from companion import cli, planner, planner_models, planner_steps
from companion.memory import (GB, GiB, LLAMA_2_7B, MiB, kv_bytes, llama_block_bytes,
                              lora_parameters)
from companion.planner import Job, find, format_size, make_plan, parse_size, plan
from companion.planner_allocator import SIDE, Pools
from companion.planner_models import Model, find_model, from_config, from_parameters, registry
from companion.planner_steps import Walk, count_parameters
from companion.planner_tape import KINDS, RecordingTape, Tape, sum_workspace

ROOT = Path(__file__).parents[1]
TINY = Model("tiny", "llama", 4, 256, 8, 4, 32, 704, 5000)


def run_cli(*arguments):
    """(exit status, stdout, stderr) of the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(list(arguments))
    return status, out.getvalue(), err.getvalue()


# --- models ------------------------------------------------------------------------------------

def _published():
    text = resources.files("companion").joinpath("data", "models.csv").read_text("utf-8")
    return [(r["name"], int(r["exact_params"])) for r in csv.DictReader(text.splitlines())]


# Every family adds its own: ties, biases, norms of q and k, experts, latents, padded tables.
@pytest.mark.parametrize("name, published", _published())
def test_parameters_are_the_published_ones(name, published):
    assert find_model(name).parameters == published


def test_a_beginning_is_enough_if_it_is_the_only_one():
    assert find_model("mistral-7b") is find_model("mistral-7b-v0.1")
    assert find_model("gpt2") is find_model("gpt-2 small")
    for many in ("llama", "qwen", "", "gemma-2"):
        with pytest.raises(ValueError, match="no model"):
            find_model(many)


@pytest.mark.parametrize("name", registry())
def test_the_walk_meets_every_parameter(name):
    """The operations of a step, written apart from the counts, use as many parameters."""
    model = find_model(name)
    biases = 58 * 256 if model.family == "deepseek_v3" else 0  # only the router's choice uses them
    met = count_parameters(model, Job(sequence=8))
    assert met == (model.parameters - biases,) * 2


def test_a_wrong_dimension_would_be_seen():
    model = find_model("qwen2.5-7b")
    for change in ({"tied": True}, {"qkv_bias": False}, {"kv_heads": 28}, {"vocab": 151936}):
        assert replace(model, **change).parameters != model.parameters


@pytest.mark.parametrize("written", ["llama-2-7b", "Llama 2 7B", "meta-llama/Llama-2-7b-hf",
                                     "llama-7b", "LLAMA-2-7B-chat"])
def test_names_are_found_however_written(written):
    assert find_model(written).parameters == 6_738_415_616


# Figures that other programs print: engines' logs, and the papers' own.
@pytest.mark.parametrize("name, tokens, bits, tensor, expected", [
    ("qwen3-30b-a3b", 262144, 16, 1, 24.00 * GiB),
    ("llama-2-7b", 1, 16, 1, 524288),
    ("deepseek-v3", 32768, 16, 1, 2196 * MiB),       # a latent: 576 numbers a layer
    ("deepseek-v3", 32768, 16, 8, 2196 * MiB),       # and no less over tensor parallel ranks
    ("llama-3-70b", 1000, 16, 8, 40960 * 1000),      # one of 8 heads on each
    ("llama-3-70b", 1000, 16, 16, 40960 * 1000),     # never less than one
    ("llama-2-7b", 1024, 8.5, 1, 524288 * 1024 * 8.5 / 16),
])
def test_caches_are_exact(name, tokens, bits, tensor, expected):
    assert find_model(name).kv_bytes(tokens, bits, tensor) == expected


def test_windows_bound_the_cache():
    gemma = find_model("gemma-3-1b")  # 26 layers, one in six full, windows of 512
    per_token = 2 * 1 * 256 * 2
    assert gemma.kv_bytes(4096, windows=True) == per_token * (4 * 4096 + 22 * 512)
    assert gemma.kv_bytes(4096) == per_token * 26 * 4096


LLAMA_CONFIG = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
                "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}


@pytest.mark.parametrize("config, published", [
    (LLAMA_CONFIG, 6_738_415_616),
    ({**LLAMA_CONFIG, "model_type": "mistral", "intermediate_size": 14336,
      "num_key_value_heads": 8}, 7_241_732_096),
    ({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
      "vocab_size": 50257}, 124_439_808),
    ({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
      "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28,
      "vocab_size": 151936, "tie_word_embeddings": True}, 596_049_920),
    ({"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192,
      "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50304}, 1_414_647_808),
    ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
      "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
      "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, 46_702_792_704),
    ({"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
      "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
      "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
      "num_hidden_layers": 24, "vocab_size": 151936}, 14_315_784_192),
    ({"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
      "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
      "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_attention_heads": 16,
      "num_key_value_heads": 16, "num_hidden_layers": 27, "vocab_size": 102400,
      "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
      "v_head_dim": 128}, 15_706_484_224),
    ({"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "num_hidden_layers": 34, "vocab_size": 262208, "sliding_window": 1024}}, 3_880_263_168),
])
def test_configurations_of_known_models(config, published, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert from_config(path).parameters == from_config(config).parameters == published


def test_a_count_alone_says_what_was_guessed():
    for count in (1e8, 1.3e9, 7e9, 34e9, 4e11):
        model = from_parameters(count)
        assert abs(model.parameters / count - 1) < 0.05
        assert model.guessed and str(model.layers) in model.guessed[0]


# --- the tape against real tensors -------------------------------------------------------------

@pytest.mark.parametrize("fused", [True, False])
def test_a_block_saves_what_the_chapter_counts(fused):
    """Batch 1: eager attention copies queries and keys for larger ones, which saves the same."""
    shape, seq = LLAMA_2_7B, 512
    job = Job(sequence=seq, attention="sdpa" if fused else "eager")
    tape = Tape()
    walk = Walk(find_model("llama-2-7b"), job, tape)
    walk.embedding_weight = walk.weight(1)
    x = tape.embedding(walk.embedding_weight, seq, shape.hidden)
    x.storage.name("activations")
    before = tape.live["activations"]
    y = walk.layer(x, [tape.tensor(seq * shape.head_dim, 2) for _ in range(2)], 0)
    kept = tape.live["activations"] - before
    expected = llama_block_bytes(shape, 1, seq, fused=fused, fused_norm=False)
    if not fused:  # Hugging Face computes the softmax in fp32 and keeps it beside the 16-bit copy
        expected += seq * seq * shape.heads * 4
    assert kept == pytest.approx(expected, rel=0.01)
    assert y.needs


def _torch_linear(batch, width, dtype_bytes):
    """Peak live bytes of two linear layers and a silu, forward and backward, by real storages."""
    torch = pytest.importorskip("torch")
    from companion.counting import Film
    dtype = {2: torch.bfloat16, 4: torch.float32}[dtype_bytes]
    w1, w2 = (torch.randn(width, width, dtype=dtype, requires_grad=True) for _ in "ab")
    x = torch.randn(batch, width, dtype=dtype, requires_grad=True)
    film = Film(parameters=[w1, w2], inputs=[x])
    with film, film.saving():
        y = torch.nn.functional.silu(x @ w1) @ w2
        y.backward(torch.ones_like(y))
    return film.peak()[0] - sum(t.untyped_storage().nbytes() for t in (x, w1, w2))


@pytest.mark.parametrize("item", [2, 4])
def test_the_tape_counts_what_torch_allocates(item):
    batch, width = 512, 256
    tape = Tape()
    w1, w2 = tape.parameter(width**2, item), tape.parameter(width**2, item)
    source = tape.parameter(batch * width, item)
    x = tape.op(tape.tensor(0, item), [source], lambda g: [g])
    x.n = batch * width
    tape.mark()
    y = tape.linear(tape.map(tape.linear(x, w1, batch * width), "input"), w2, batch * width)
    tape.backward(y)
    parts, _ = tape.phase_peak()
    assert sum(parts.values()) == pytest.approx(_torch_linear(batch, width, item), rel=0.2)


def _film(make, *residents):
    """Peak live bytes of ``make()`` and its backward pass beyond what was there, by storages."""
    pytest.importorskip("torch")
    from companion.counting import Film
    film = Film(inputs=residents)
    with film, film.saving():
        make().backward()
    return film.peak()[0] - sum(t.untyped_storage().nbytes() for t in residents)


@pytest.mark.parametrize("loss, copies", [("plain", 3), ("narrow", 3)])
def test_the_loss_takes_three_copies_of_the_logits_in_its_type(loss, copies):
    """Beside the logits, in backward: log softmax, its gradient, and the gradient before it."""
    torch = pytest.importorskip("torch")
    rows, vocab = 256, 4000
    logits = torch.randn(rows, vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (rows,))

    def cross_entropy():
        wide = logits.float() if loss == "plain" else logits
        return torch.nn.functional.cross_entropy(wide, labels)

    each = 4 if loss == "plain" else 2
    seen = _film(cross_entropy, logits, labels)
    assert seen == pytest.approx(copies * each * rows * vocab, rel=0.01)
    tape = Tape()
    walk = Walk(replace(TINY, vocab=vocab), Job(sequence=rows, loss=loss), tape)
    source = tape.parameter(rows * vocab, 2)
    x = tape.op(tape.tensor(0, 2), [source], lambda g: [g])
    x.n = rows * vocab
    tape.mark()
    tape.backward(walk.loss(x))
    assert sum(tape.phase_peak()[0].values()) == pytest.approx(seen, rel=0.01)


def test_dropout_keeps_a_mask_and_its_output():
    """As GPUs do it, which torch offers on the CPU too: a byte an element for the mask."""
    torch = pytest.importorskip("torch")
    n, r = 512, 8
    x = torch.randn(n, n, dtype=torch.bfloat16)
    pair = [torch.randn(n, r, dtype=torch.bfloat16, requires_grad=True)]
    held = {}

    def lora():
        dropped = torch.native_dropout(x, 0.1, True)[0]
        return (dropped @ pair[0]).sum()

    from companion.counting import Film
    film = Film(inputs=[x], parameters=pair)
    with film, film.saving():
        loss = lora()
    held = film.frames()["activations"][-1]
    assert loss.requires_grad and held == n * n * 2  # the mask is for x's gradient, and x has none
    x.requires_grad_()
    film = Film(inputs=[x], parameters=pair)
    with film, film.saving():
        loss = lora()
    assert film.frames()["activations"][-1] == n * n * 3


LORA = dict(method="lora", targets="qkvo", adapters="bf16", attention="flash", sequence=512)


def _kept(**options):
    """Bytes of activations when the forward pass of TINY ends."""
    tape = Tape()
    x = Walk(TINY, Job(**{**LORA, **options}), tape).hidden_states()
    return tape.live["activations"] * bool(x)


def test_dropout_costs_each_adapter_its_own_input():
    """q, k and v shared the norm's output; o had the output of attention, which stays.

    No gradient goes into the first layer, so its q, k and v keep no masks.
    """
    one = 512 * TINY.hidden
    n = TINY.layers * one
    assert _kept(dropout=0.1) - _kept() == n * (3 * 3 + 3 - 2) - 3 * one
    assert _kept(adapters="fp32", dropout=0.1) - _kept(adapters="fp32") == n * 4 - 3 * one


def test_old_bitsandbytes_keeps_every_input():
    """Of gate and up the norm's output, of down the product; the adapters keep the rest."""
    n = TINY.layers * 512
    more = _kept(method="qlora", hold_inputs=True) - _kept(method="qlora")
    assert more == n * 2 * (TINY.hidden + TINY.ffn)
    assert _kept(hold_inputs=True) == _kept()  # nothing to a weight that is not packed


def test_packed_weights_are_written_out_again_in_backward():
    tape, n = Tape(), 2**20
    source = tape.parameter(256, 2)
    x = tape.op(tape.tensor(256, 2), [source], lambda g: [g])
    y = tape.linear(x, tape.parameter(n, 2, False), 256, unpacked=2 * n)
    assert tape.highest - tape.total == pytest.approx(2 * n, abs=2048)
    tape.mark()
    tape.backward(y)
    assert sum(tape.phase_peak()[0].values()) == pytest.approx(2 * n, abs=4096)


@pytest.mark.parametrize("single, bits", [(True, 4.5), (False, 4.127)])
def test_scales_cost_half_a_bit_or_an_eighth(single, bits):
    """fp32 a block of 64: 0.5 bit. Quantized to 8 bits, and fp32 for 256 of those: 0.127."""
    model = find("llama-2-7b")
    held = planner.state_bytes(model, Job(method="qlora", rank=1, targets="qv",
                                          single_quant=single))["weights"]
    outer = model.parameters - model.quantizable
    adapters = 2 * 32 * 2 * 4096 * 4
    packed = held - 2 * outer - adapters
    assert 8 * packed / model.quantizable == pytest.approx(bits, abs=0.001)


def test_everything_dies_but_gradients():
    """A storage that outlives its step would raise every later moment."""
    for job in (Job(), Job(checkpointing=True), Job(recipe="autocast"), Job(attention="eager"),
                Job(loss="narrow"), Job(loss="fused")):
        tape = Tape(job.autocast)
        walk = Walk(TINY, job, tape)
        x = walk.hidden_states()
        loss = walk.loss(walk.head(x))
        del x
        tape.end_autocast()
        walk.held = None
        tape.backward(loss)
        del loss
        left = {k: v for k, v in tape.live.items() if v and k != "gradients"}
        expected = TINY.parameters * job.gradient_bytes
        ghosts = getattr(walk, "ghost_casts", 0)
        assert tape.live["gradients"] == pytest.approx(expected, rel=1e-3)
        assert sum(left.values()) - ghosts == 0, left


# --- the measured truth ---------------------------------------------------------------------------

sys.path.insert(0, str(ROOT / "benchmarks"))
memory_score = __import__("memory_score")
TRUTH = json.loads((ROOT / "benchmarks/results/memory_truth.json").read_text())["results"]["rows"]


@functools.cache
def scored():
    return memory_score.score(TRUTH)


def test_the_truth_covers_what_it_should():
    """At least 60 rows of every method, recipe and kind of attention; half of them held out."""
    assert len(TRUTH) >= 60 and all(r["outcome"] in ("ok", "out of memory") for r in TRUTH)
    for key, least in (("method", 3), ("attention", 2), ("checkpointing", 2), ("optimizer", 4)):
        assert len({r[key] for r in TRUTH}) >= least
    assert {"bf16", "autocast", "fp32"} <= {r["recipe"] for r in TRUTH}
    assert sum(r["outcome"] == "out of memory" for r in TRUTH) >= 8
    held_out = [r["held_out"] for r in TRUTH]
    assert abs(sum(held_out) / len(held_out) - 0.5) < 0.05
    vocabularies = {r["config"].get("vocab_size", 0) for r in TRUTH}
    assert max(vocabularies) >= 150_000 and 32_000 in vocabularies


def test_rows_that_nothing_was_fitted_to_meet_the_goals():
    """Mean error 3 %, worst 8 %, reserved in its band for 9 of 10, no promise that was broken."""
    held = memory_score.summary([e for e in scored() if e["row"]["held_out"]])
    assert held["rows"] >= 30 and memory_score.missed(held) == [], held


PARALLEL = json.loads(
    (ROOT / "benchmarks/results/memory_truth_parallel.json").read_text())["results"]["rows"]
FITTED = [r for r in PARALLEL if not r["held_out"]]


def _misses(rows):
    """[(row, phase)] whose peak in the last step on two GPUs is not as planned, within 1 %.

    The first bucket of DDP is gone by then.
    """
    found = []
    for e in memory_score.score(rows):
        bucket = planner.gradient_bytes(e["plan"].model, e["plan"].job)
        for name in ("loss", "backward", "step"):
            planned = next(m.total for m in e["plan"].moments if m.name == name)
            if e["plan"].job.is_ddp and name != "step":
                planned -= bucket
            last = [m["peak"] for m in e["row"]["moments"] if m["moment"] == name][-1]
            if planned != pytest.approx(last, rel=0.01):
                found.append((e["row"]["id"], name))
    return found


def test_every_phase_on_two_gpus():
    assert len(FITTED) == 6 and _misses(FITTED) == []


def test_held_out_rows_on_two_gpus():
    """Bytes of tensors meet the goals. Reserved bytes do not: 5 of 6 are in their band."""
    held = memory_score.summary(memory_score.score([r for r in PARALLEL if r["held_out"]]))
    assert held["rows"] == 6 and not {"mean", "worst"} & set(memory_score.missed(held)), held


@pytest.mark.parametrize("name", ["_gather_again", "_reduce_layer", "reduce_root"])
def test_every_phase_needs_what_fsdp_does(monkeypatch, name):
    def nothing(walk, *_):
        walk.first_kept = len(walk.tape.kept)

    monkeypatch.setattr(Walk, name, nothing)
    assert _misses(FITTED)


def test_ddp_begins_with_one_bucket_and_may_keep_it():
    """Both kinds of buckets lived at the peak of parallel-03, in its second step."""
    row = next(r for r in FITTED if r["id"] == "parallel-03")
    p = memory_score.plan_of(row)
    sizes = [g for _, g, _ in planner_steps.resident(p.model, p.job)]
    small = planner_steps.buckets(sizes)
    seen = dict(map(tuple, row["fullest"]))
    assert seen[sum(sizes)] == 1 and sum(small) == sum(sizes)
    for nbytes in (546316288, 54534144, 33558528):  # sizes that no other tensor has
        assert small.count(nbytes) == seen[nbytes]
    assert p.peak.name == "backward" and p.peak.parts["communication"] == 2 * sum(sizes)
    assert p.allocated == pytest.approx(memory_score.peak_of(row), rel=0.01)
    assert p.moments[-1].parts["communication"] == sum(sizes)


def test_the_first_bucket_leaves_with_the_first_full_one():
    """With long sequences the fullest moment is among the layers, when it is gone."""
    p = plan("llama-2-7b", gpus=2, sequence=8192, checkpointing=True, attention="eager")
    backward = next(m for m in p.moments if m.name == "backward")
    assert backward.parts["communication"] == planner.gradient_bytes(p.model, p.job)


def test_reserved_on_two_gpus():
    """In the band, and nothing of the row before was left (see base's reserved bytes)."""
    entries = memory_score.score(FITTED)
    assert len(entries) == 6 and all(e["in_band"] for e in entries)
    assert not any(e["row"]["moments"][0]["reserved"] for e in entries)


def test_the_pools_of_streams_are_apart():
    pools = Pools()
    a = pools.malloc(20 * MiB)
    pools.free(a)
    b = pools.malloc(20 * MiB + SIDE)
    assert pools.reserved == 40 * MiB and pools.highest == pools.allocated == 20 * MiB
    pools.free(b)
    pools.malloc(20 * MiB)
    assert pools.reserved == 40 * MiB


def test_every_parameter_count_is_the_real_one():
    for e in scored():
        load = next(m for m in e["row"]["moments"] if m["moment"] == "load")
        adapters = 0
        if e["row"]["method"] == "lora":
            adapters = e["plan"].job.adapter_parameters(e["plan"].model, e["plan"].model.layers)
            assert load["trainable"] == adapters
        assert load["parameters"] == e["plan"].model.parameters + adapters, e["row"]["id"]


def test_the_score_sees_a_wrong_model(monkeypatch):
    """Without softmax's product in backward, as first written, eager rows miss the goals."""
    monkeypatch.setattr(Tape, "softmax", lambda self, x: self.map(x, "output"))
    summary = memory_score.summary(memory_score.score(TRUTH))
    assert summary["worst"] > memory_score.GOALS["worst"]
    monkeypatch.undo()
    monkeypatch.setattr(planner, "WORKSPACE", 2**32)
    assert "mean" in memory_score.missed(memory_score.summary(memory_score.score(TRUTH)))


def test_the_score_sees_a_broken_promise():
    row = next(r for r in TRUTH if r["outcome"] == "out of memory")
    wrong = {**row, "limit_GiB": 1000.0}
    assert memory_score.missed(memory_score.summary(
        memory_score.score([TRUTH[0], wrong]))) == ["broken"]


memory_cases = __import__("memory_cases")


@functools.cache
def judged():
    return {j.row["id"]: j for j in memory_cases.judged()}


def test_every_public_report_is_judged_by_the_rule():
    """Right is near, undecidable is enclosed by plans of other readings, the rest is wrong."""
    s = memory_cases.summary(list(judged().values()))
    assert sum(s[v] for v in ("right", "wrong", "undecidable", "not planned")) == 89
    assert s["right"] >= 45 and s["median"] <= 0.03
    for id, j in judged().items():
        if j.verdict == "undecidable":
            assert id in memory_cases.READINGS and j.why.count(":") >= 2
            assert j.error is None or abs(j.error) > memory_cases.TOLERANCE
        if j.verdict == "right" and j.error is not None:
            assert abs(j.error) <= memory_cases.TOLERANCE
        if j.verdict == "wrong":
            assert id in memory_cases.SUSPECTED
    assert s["promised"] == ["pr-39"]  # an engine's own workspace


def test_a_planner_without_the_terms_is_wrong_about_reports(monkeypatch):
    """Each report that a term was added for is off without it."""
    for id, without in {"lit-08": {"no_sync": False}, "lit-05": {"hold_inputs": False},
                        "fms-25": {"no_sync": False}, "lit-15": {"dropout": 0.0}}.items():
        model, kind, options = memory_cases.PLANNED[id]
        monkeypatch.setitem(memory_cases.PLANNED, id, (model, kind, {**options, **without}))
    now = {j.row["id"]: j for j in memory_cases.judged()}
    assert now["lit-08"].error < -0.3 and now["lit-05"].error < judged()["lit-05"].error - 0.03
    assert now["fms-25"].verdict == "wrong" and now["lit-15"].verdict == "wrong"
    monkeypatch.setitem(memory_cases.PLANNED, "mega-01", ("llama-2-7b", "a", dict(
        memory_cases.PLANNED["mega-01"][2], gpus=4)))  # readings that enclose nothing
    assert {j.row["id"]: j for j in memory_cases.judged()}["mega-01"].verdict == "wrong"


def test_a_broken_promise_is_told(monkeypatch):
    """Llama-2-7B in two bytes a weight is no fit for what ran out in its training."""
    monkeypatch.setitem(memory_cases.PLANNED, "lit-14", ("llama-3.2-1b", "o", {"sequence": 64}))
    found = memory_cases.judged()
    assert "lit-14" in memory_cases.summary(found)["promised"]
    assert {j.row["id"]: j for j in found}["lit-14"].verdict == "wrong"


def test_public_figures_are_exact_to_the_printed_digit():
    stored = memory_cases.cases()
    for id in ("kv-02", "gg-01", "gg-03", "gg-05", "ex-03", "ex-04", "ex-07", "ex-08"):
        printed = stored[id]["value"]
        digits = len(printed.partition(".")[2])
        assert f"{memory_cases.EXACT[id]():.{digits}f}" == printed, id


# --- properties ---------------------------------------------------------------------------------

MODELS = ["llama-3.2-1b", "qwen2.5-0.5b", "gemma-2-2b", "gpt-2 small", "pythia-160m", "qwen3-0.6b",
          "deepseek-v2-lite", "mixtral-8x7b-v0.1", "phi-2", "phi-3-mini-4k", "olmo-2-1124-7b"]
JOBS = st.fixed_dictionaries({
    "method": st.sampled_from(["full", "lora", "qlora"]),
    "recipe": st.sampled_from(list(planner.RECIPES)),
    "optimizer": st.sampled_from(planner.OPTIMIZERS),
    "attention": st.sampled_from(["eager", "sdpa"]), "checkpointing": st.booleans(),
    "loss": st.sampled_from(["plain", "narrow", "fused", "chunked"]),
    "batch": st.integers(1, 6), "sequence": st.sampled_from([64, 200, 512]),
    "accumulate": st.integers(1, 3), "rank": st.integers(1, 64),
    "adapters": st.sampled_from(["fp32", "bf16"]), "dropout": st.sampled_from([0.0, 0.1]),
    "upcast": st.booleans(), "single_quant": st.booleans(), "hold_inputs": st.booleans(),
    "in_backward": st.booleans()}).map(
        lambda o: {**o, "in_backward": o["in_backward"] and o["accumulate"] == 1
                   and o["recipe"] in ("bf16", "fp32", "autocast")})
# how 16 GPUs are used
SPLITS = st.fixed_dictionaries({
    "gpus": st.just(16), "tensor": st.sampled_from([1, 2, 4]), "pipeline": st.sampled_from([1, 2]),
    "context": st.sampled_from([1, 2]), "shard": st.sampled_from([0, 1, 2, 3]),
    "flat": st.booleans(), "no_sync": st.booleans(), "tensor_only": st.booleans(),
    "offload": st.sampled_from(["none", "optimizer", "parameters"])}).map(
        lambda o: {**o, "shard": o["shard"] * (o["tensor"] * o["pipeline"] * o["context"] < 16)})


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), JOBS)
def test_components_add_up_at_each_moment(name, options):
    p = plan(name, **options)
    for moment in p.moments:
        assert set(moment.parts) <= set(KINDS)
        assert all(v >= 0 for v in moment.parts.values()), moment
        assert moment.total == sum(moment.parts.values())
    assert p.allocated == max(m.total for m in p.moments)
    assert p.allocated <= p.reserved[0] <= p.reserved[1] < p.on_device[1]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["llama-3.2-1b", "gemma-2-2b", "llama-2-7b"]), JOBS, SPLITS)
def test_components_add_up_on_several_gpus(name, options, split):
    p = plan(name, **{**options, **split, "in_backward": False})
    for moment in p.moments:
        assert set(moment.parts) <= set(KINDS)
        assert all(v >= 0 for v in moment.parts.values()), moment
        assert moment.total == sum(moment.parts.values())
    assert p.allocated == max(m.total for m in p.moments)
    assert p.allocated <= p.reserved[0] <= p.reserved[1] < p.on_device[1]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), JOBS, st.sampled_from(["batch", "sequence", "rank"]))
def test_more_of_anything_that_costs_is_never_less(name, options, what):
    less, more = (plan(name, **{**options, what: options[what] * n}) for n in (1, 2))
    for a, b in zip(less.moments, more.moments):
        assert b.total >= a.total, (a.name, what)


COSTLY = [("dropout", 0.0, 0.1), ("upcast", False, True), ("single_quant", False, True),
          ("hold_inputs", False, True), ("adapters", "bf16", "fp32"), ("no_sync", False, True),
          ("flat", False, True), ("accumulate", 1, 2), ("accumulate", 2, 5),
          ("loss", "narrow", "plain"), ("loss", "fused", "plain"),
          ("checkpointing", True, False), ("optimizer", "adamw-8bit", "adamw-fused"),
          ("optimizer", "adamw-fused", "adamw"), ("offload", "parameters", "optimizer"),
          ("offload", "optimizer", "none")]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["llama-3.2-1b", "gemma-2-2b", "llama-2-7b"]), JOBS, SPLITS,
       st.booleans(), st.sampled_from(COSTLY))
def test_what_costs_memory_is_never_less(name, options, split, several, change):
    what, cheap, dear = change
    options = {**options, **(split if several else {}), "in_backward": False}
    less, more = (plan(name, **{**options, what: value}).allocated for value in (cheap, dear))
    if what == "checkpointing":  # layers that run again hold rotary tables and masks till then
        batch, sequence = options["batch"], options["sequence"]
        masks = 2 if name == "gemma-2-2b" else 1
        eager = options["attention"] == "eager" or masks > 1
        more += 2 * _block(sequence * find_model(name).head_dim * 4)
        more += masks * _block(batch * sequence * sequence * 4) * eager
    assert more >= less


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["llama-3.2-1b", "gpt-2 small"]), st.sampled_from([64, 512]),
       st.sampled_from([1, 4]), st.booleans())
def test_cached_bytes_of_varied_lengths_are_never_less(name, sequence, batch, checkpointing):
    options = dict(sequence=sequence, batch=batch, checkpointing=checkpointing)
    one, all_lengths = (plan(name, **options, varied=v) for v in (False, True))
    assert one.moments == all_lengths.moments and one.reserved[0] == all_lengths.reserved[0]
    assert all_lengths.reserved[1] >= one.reserved[1]


def test_varied_lengths_leave_blocks_that_longer_ones_cannot_use():
    """A large vocabulary and long sequences: more than half again as much."""
    options = dict(method="lora", checkpointing=True, sequence=8192)
    one, varied = (plan("llama-3-8b", **options, varied=v).reserved[1] for v in (False, True))
    assert varied > 1.5 * one


def _block(nbytes):
    return -(-nbytes // 512) * 512


def _packed(model=TINY, packing=True, **options):
    """(bytes of activations, of masks and position ids) when the forward pass ends."""
    tape = Tape()
    walk = Walk(model, Job(**{"sequence": 512, "batch": 3, "packing": packing, **options}), tape)
    x = walk.hidden_states()
    kept, before = tape.live["activations"], tape.total
    walk.held[1].clear()
    return kept * bool(x), before - tape.total


@pytest.mark.parametrize("attention, item", [("eager", 2), ("flash", 0)])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_checkpointed_layer_holds_its_mask_through_backward(
        attention, item, checkpointing, monkeypatch):
    """[b, 1, T, T] of the model's forward, which else has returned when the head runs."""
    batch, sequence = 3, 512
    job = Job(batch=batch, sequence=sequence, attention=attention, checkpointing=checkpointing)
    seen = []
    for masks in (Walk._masks, lambda walk: []):
        monkeypatch.setattr(Walk, "_masks", masks)
        tape, ends = Tape(), {}
        walk = Walk(TINY, job, tape)

        def arrived(w, tape=tape, ends=ends):
            ends.setdefault("backward", tape.total)  # within it: the first gradient

        tape.arrived = arrived
        planner_steps.forward_backward(
            walk, lambda name, tape=tape, ends=ends: ends.setdefault(name, tape.total))
        seen.append(ends)
    with_mask, without = seen
    mask = batch * sequence * sequence * item * checkpointing
    assert {k: with_mask[k] - without[k] for k in without} == {
        "forward": mask, "loss": mask, "backward": mask}


@pytest.mark.parametrize("recipe, item", [("bf16", 2), ("fp32", 4)])
def test_a_window_is_kept_as_numbers_by_each_layer(recipe, item):
    """[b, 1, T, T] of the query's type beside PyTorch's attention; flash knows windows."""
    model = replace(TINY, kv_heads=TINY.heads)
    kept = {(a, w): _packed(replace(model, window=w), False, attention=a, recipe=recipe)[0]
            for a in ("sdpa", "flash") for w in (128, None)}
    more = {a: kept[a, 128] - kept[a, None] for a in ("sdpa", "flash")}
    assert more == {"flash": 0, "sdpa": TINY.layers * 3 * 512 * 512 * item}


# As the allocator's history shows on an H200: Llama's, Gemma's and Pythia's norms and biases.
@pytest.mark.parametrize("outputs, rows, mebibytes", [
    (4096, 4096, 128), (2304, 2048, 36), (2048, 8192, 128), (8192, 4096, 132), (4096, 128, 0)])
def test_a_sum_over_rows_takes_a_workspace(outputs, rows, mebibytes):
    assert sum_workspace(outputs, rows) == mebibytes * MiB
    tape = RecordingTape()
    gain = tape.parameter(outputs, 2)
    y = tape.mul(gain, tape.tensor(rows * outputs, 2), rows)
    tape.take()
    tape.backward(y)
    assert (mebibytes * MiB in tape.events) == (mebibytes > 0)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_a_product_come_in_the_order_of_names(bias):
    """mm has mat2, the weight, before self; addmm has mat1, the input, before mat2."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if function is torch.ops.aten.mm.default:
                made.append(out.numel())
            return out

    rows, n, m = 24, 16, 8
    x = torch.randn(rows, n, requires_grad=True)
    w, b = torch.randn(m, n, requires_grad=True), torch.randn(m, requires_grad=True)
    y = torch.addmm(b, x, w.t()) if bias else torch.mm(x, w.t())
    with Watch():
        y.sum().backward()
    tape = RecordingTape()
    source = tape.map(tape.op(tape.tensor(rows * n, 4), [tape.parameter(1, 4)], lambda g: [None]))
    y = tape.linear(source, tape.parameter(n * m, 4), rows * m,
                    tape.parameter(m, 4) if bias else None)
    tape.take()
    tape.backward(y)
    sizes = [e for e in tape.events if e in (4 * rows * n, 4 * n * m)][:2]
    assert sizes == [4 * n for n in made]


def test_two_products_gradients_meet_in_a_third_tensor():
    """Both are views, so the first sum is a new tensor; the third is added to it in place."""
    for products, tensors in ((1, 1), (2, 3), (3, 4)):
        tape = RecordingTape()
        x = tape.op(tape.tensor(5000, 2), [tape.parameter(1, 2)], lambda g: [None])
        loss = tape.tensor(1, 2)
        loss = tape.op(loss, [tape.linear(x, tape.parameter(7, 2), 9) for _ in range(products)],
                       lambda g: [g] * products)
        tape.take()
        tape.backward(loss)
        assert tape.events.count(5000 * 2) == tensors


def test_many_rows_of_a_table_are_sorted_for_their_gradient():
    """16384 tokens and a tenth more, 4096 numbers in fp32: 281.6 MiB in a recorded history."""
    for tokens, extra in ((16384, 18022 * 4096 * 4), (3072, 0)):
        tape = RecordingTape()
        x = tape.embedding(tape.parameter(32000 * 4096, 2), tokens, 4096)
        tape.take()
        tape.backward(x)
        sizes = [e for e in tape.events if e > MiB]
        assert sizes == [32000 * 4096 * 2] + [extra] * (extra > 0)


def test_attention_without_a_kernel_looks_for_rows_of_minus_infinity():
    """A byte a score beside the scores and their softmax; the causal mask is in numbers."""
    tape = RecordingTape()
    tape.grad = False
    b, s, scores = 2, 96, 2 * TINY.heads * 96 * 96
    walk = Walk(TINY, Job(recipe="fp32", batch=b, sequence=s), tape)
    q, k, v = (tape.tensor(b * s * n * TINY.head_dim, 4) for n in (8, 4, 4))
    walk.attend(q, k, v, False)
    live, held = {}, []
    for event in tape.events:
        if event > 0:
            live[len(live) + 1] = event
            held.append(len(live))
        else:
            held.remove(-event)
        sizes = [live[i] for i in held]
        if sizes and sizes[-1] == scores and event > 0:
            break
    assert sizes.count(4 * scores) == 2 and sizes.count(scores) == 1
    assert 4 * s * s in sizes
    assert s * s not in sizes  # the bool triangle and the ones that it was cut from are gone


def test_rotary_positions_keep_both_tables():
    """Cosines and sines are saved for backward: their model's forward lets go of nothing."""
    tape = Tape()
    walk = Walk(TINY, Job(sequence=512, attention="flash"), tape)
    x, before = walk.hidden_states(), tape.total
    walk.held = None
    assert x.needs and tape.total == before


@pytest.mark.parametrize("sequence, padded", [(512, 512), (200, 208), (1, 16)])
@pytest.mark.parametrize("recipe, item", [("bf16", 2), ("fp32", 4)])
def test_each_layer_keeps_its_mask_as_numbers(sequence, padded, recipe, item):
    """[b, 1, s, s] for all heads, rows padded to 16; eager attention and flash keep none."""
    model, b = replace(TINY, kv_heads=TINY.heads), 3
    options = dict(recipe=recipe, sequence=sequence, batch=b)
    kept = {(a, p): _packed(model, p, attention=a, **options)[0]
            for a in ("eager", "sdpa", "flash") for p in (True, False)}
    positions = 2 * (_block(b * sequence * TINY.head_dim * item) - _block(sequence * 32 * item))
    more = {a: kept[a, True] - kept[a, False] - positions for a in ("eager", "sdpa", "flash")}
    assert more == {"eager": 0, "flash": 0,
                    "sdpa": TINY.layers * _block(b * sequence * padded * item)}


@pytest.mark.parametrize("family, masks", [("llama", 1), ("gemma2", 2)])
@pytest.mark.parametrize("attention, item", [("sdpa", 1), ("eager", 2)])
def test_masks_that_layers_share(family, masks, attention, item):
    """[b, 1, s, s]: a byte each, or two to be added to scores. Position ids are int64."""
    model = replace(TINY, family=family)
    ids = 3 * 512 * 8
    assert _packed(model, attention=attention)[1] == ids + masks * 3 * 512 * 512 * item
    assert _packed(model, attention="flash")[1] == ids + 512


def test_flash_attention_needs_ends_of_documents_only():
    """Ids and positions, nothing that grows with the square of the length."""
    for sequence in (512, 4096):
        options = dict(method="lora", attention="flash", batch=2, sequence=sequence)
        plans = [plan("llama-3-8b", **options, packing=p) for p in (False, True)]
        more = 2 * sequence * 8 + 2 * sequence * 128 * 2 + 512
        for a, b in zip(*(p.moments for p in plans)):
            assert 0 <= b.total - a.total <= more


def test_checkpointed_layers_hold_the_mask_once():
    """It lives through the backward pass, in which each layer makes its own numbers of it."""
    options = dict(method="lora", batch=2, sequence=4096)
    for checkpointing, layers in ((True, 1), (False, 32)):
        plans = [plan("llama-2-7b", **options, checkpointing=checkpointing, packing=p)
                 for p in (False, True)]
        less, more = (p.moments[1].total for p in plans)
        mask = 2 * 4096 * 4096
        expected = mask + 2 * mask * (layers if not checkpointing else 0)
        assert more - less == pytest.approx(expected, rel=0.2)
    less, more = (plan("llama-2-7b", **options, checkpointing=True, packing=p).moments[3]
                  for p in (False, True))
    assert more.name == "backward" and more.total - less.total >= mask


def test_the_mask_of_a_packed_row_is_what_torch_saves():
    """Each call makes numbers of the bool mask, for all heads, and keeps them."""
    torch = pytest.importorskip("torch")
    b, s, heads, d = 2, 64, 4, 32
    mask = torch.ones(b, 1, s, s, dtype=torch.bool).tril()
    for dtype, item in ((torch.bfloat16, 2), (torch.float32, 4)):
        q, k, v = (torch.randn(b, heads, s, d, dtype=dtype, requires_grad=True) for _ in "qkv")
        saved = []

        def keep(x):
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        masks = [x for x in saved if x.shape[-2:] == (s, s)]
        walk = Walk(TINY, Job(batch=b, sequence=s, packing=True), Tape())
        assert [x.untyped_storage().nbytes() for x in masks] == [walk._bias(item, s).storage.bytes]
        assert masks[0].dtype == dtype and masks[0].data_ptr() != mask.data_ptr()


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*MODELS, "gemma-3-1b"]), JOBS, st.sampled_from([64, 200, 512, 1024]),
       st.sampled_from(["eager", "sdpa", "flash"]))
def test_packing_never_takes_less(name, options, sequence, attention):
    """But where it is what makes a kernel possible: see the next test.

    FlashAttention knows windows; unpacked, a mask is planned for them.
    """
    options = {**options, "sequence": sequence, "attention": attention}
    model = find(name)
    if attention == "flash":
        model = replace(model, window=None)
    wide = options["recipe"] == "fp32" if options["method"] == "full" else \
        options["method"] == "qlora" and options["upcast"]
    assume(not (attention == "sdpa" and wide and model.kv_heads < model.heads))
    plans = [plan(model, **options, packing=p) for p in (False, True)]
    for a, b in zip(*(p.moments for p in plans)):
        assert b.total >= a.total, a.name


def test_a_mask_can_save_what_grouped_queries_cost_in_fp32():
    """Without a mask PyTorch computes all scores; beside one key heads are repeated."""
    options = dict(recipe="fp32", sequence=1024, batch=2)
    grouped, single = ([plan(name, **options, packing=p).moments[1].total for p in (False, True)]
                       for name in ("llama-3-8b", "llama-2-7b"))
    assert grouped[1] < grouped[0] and single[1] > single[0]


def test_heads_of_odd_sizes_have_no_kernel_beside_a_mask():
    """Then each layer keeps the shares of all heads, in fp32."""
    odd, even = (replace(TINY, head_dim=d, kv_heads=TINY.heads) for d in (20, 24))
    scores = TINY.layers * 3 * 512 * 512 * TINY.heads * 4
    less, more = (_packed(m)[0] for m in (even, odd))
    assert more - less > 0.8 * scores
    assert abs(_packed(odd, False)[0] - _packed(even, False)[0]) < 0.2 * scores


def test_packed_rows_have_one_length():
    """What the allocator keeps is that of one length."""
    options = dict(method="lora", checkpointing=True, sequence=8192, loss="chunked")
    packed, varied = (plan("llama-3-8b", **options, **{kind: True})
                      for kind in ("packing", "varied"))
    assert packed.reserved[1] < varied.reserved[1] and packed.allocated > varied.allocated
    assert "packed documents" in str(packed)


def test_what_masks_take_too_much_flash_attention_saves():
    options = dict(method="lora", sequence=8192, loss="chunked", packing=True)
    p = plan("llama-3-8b", "80GiB", **options)
    assert p.verdict == "tight" and ("attention", "flash") in p.advice[0].options
    assert plan("llama-3-8b", "80GiB", **options, attention="flash").verdict == "fits"


@pytest.mark.parametrize("what", ["layers", "hidden", "ffn", "vocab", "heads"])
@pytest.mark.parametrize("method", ["full", "lora", "inference"])
def test_larger_models_are_never_less(what, method):
    more = {what: getattr(TINY, what) * 2}
    if what == "heads":
        more["kv_heads"] = TINY.kv_heads * 2
    plans = [make_plan(m, Job(method=method)) for m in (TINY, replace(TINY, **more))]
    for a, b in zip(*(p.moments for p in plans)):
        assert b.total >= a.total


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["llama-3.2-1b", "qwen2.5-0.5b", "llama-2-7b"]), st.sampled_from([2, 8, 64]),
       st.sampled_from(["bf16", "mixed", "megatron"]), st.booleans())
def test_sharding_never_takes_more(name, gpus, recipe, checkpointing):
    options = {"recipe": recipe, "checkpointing": checkpointing, "sequence": 512}
    model = find(name)
    states = [sum(planner.state_bytes(model, Job(gpus=gpus, shard=s, **options)).values())
              for s in (0, 1, 2, 3)]
    assert states == sorted(states, reverse=True)
    wider = [plan(name, gpus=n, shard=3, **options).allocated for n in (gpus, 2 * gpus)]
    assert wider[1] <= wider[0]


@settings(max_examples=60, deadline=None)
@given(JOBS, st.sampled_from([1, 2, 3]), st.sampled_from([2, 4, 16]), st.booleans(),
       st.booleans(), st.integers(2, 8))
def test_sharding_over_more_never_takes_more(options, shard, gpus, flat, no_sync, times):
    """Every method and recipe, every stage, FSDP1 and whole gradients too."""
    options = {**options, "shard": shard, "flat": flat, "no_sync": no_sync}
    few, many = (plan("llama-3.2-1b", gpus=n, **options) for n in (gpus, gpus * times))
    for a, b in zip(few.moments, many.moments):
        assert b.total <= a.total, a.name


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4]), JOBS)
def test_tensor_parallel_never_takes_more(tensor, options):
    one, more = (plan("llama-3.2-1b", gpus=n, tensor=n, **options).allocated
                 for n in (tensor, 2 * tensor))
    assert more <= one


def test_checkpointing_chunks_and_fused_kernels_save():
    base = dict(batch=4, attention="eager", optimizer="adamw")
    start = plan("llama-3.2-1b", **base)
    for change in ({"attention": "sdpa"}, {"checkpointing": True}, {"kernels": "fused"}):
        assert plan("llama-3.2-1b", **{**base, **change}).moments[1].total < start.moments[1].total
    losses = [plan("llama-3.2-1b", batch=4, checkpointing=True, loss=loss).allocated
              for loss in ("plain", "fused", "chunked")]
    assert losses == sorted(losses, reverse=True) and losses[0] > 1.5 * losses[2]


def test_the_peak_of_pure_bf16_adamw_is_its_step():
    """Ten bytes a parameter, whatever the (small) batch: foreach keeps square roots."""
    p = plan("llama-2-7b", sequence=128, checkpointing=True)
    assert p.peak.name == "step"
    assert p.allocated == pytest.approx(10 * 6_738_415_616, rel=0.002)
    fused = plan("llama-2-7b", sequence=128, checkpointing=True, optimizer="adamw-fused")
    assert fused.allocated == pytest.approx(8 * 6_738_415_616, rel=0.03)


def test_a_pipeline_keeps_as_many_batches_as_it_has_stages():
    """Its first stage holds activations of all of them, so halving layers does not halve those."""
    options = dict(recipe="mixed", batch=2, sequence=4096, optimizer="adamw-fused")
    one = plan("llama-2-7b", **options)
    four = plan("llama-2-7b", gpus=4, pipeline=4, **options)
    kept = four.moments[1].parts["activations"]
    assert 0.95 < kept / one.moments[1].parts["activations"] < 1.05
    assert four.moments[0].total < 0.3 * one.moments[0].total


def test_whole_gradients_wait_for_the_last_micro_batch():
    """FSDP without reduction: two bytes of every weight on each GPU, as fms-25 reports it.

    7.26 GB were allocated between steps and 22.5 at the peak, by texts of some hundred tokens.
    """
    options = dict(gpus=8, shard=3, checkpointing=True, attention="flash", sequence=256, batch=2,
                   accumulate=2)
    reduced, whole = (plan("mistral-7b-v0.1", **options, no_sync=n) for n in (False, True))
    assert whole.allocated == pytest.approx(22.5 * GB, rel=0.03)
    assert whole.moments[1].parts["gradients"] - reduced.moments[1].parts["gradients"] \
        == pytest.approx(7.242e9 * 2 * 7 / 8, rel=0.001)
    assert whole.moments[-1].total == reduced.moments[-1].total  # the step has this rank's part
    assert plan("mistral-7b-v0.1", **{**options, "accumulate": 1}, no_sync=True).moments \
        == plan("mistral-7b-v0.1", **{**options, "accumulate": 1}).moments


# LitGPT's tutorials/resource-tables.md: LoRA of rank 8 on q and v, FSDP1, batch of 128.
@pytest.mark.parametrize("name, gpus, batch, seen", [
    ("llama-2-7b", 2, 1, 22.18), ("llama-2-7b", 2, 2, 22.47), ("llama-2-7b", 2, 4, 23.39),
    ("llama-2-13b", 4, 1, 35.57)])
def test_frozen_weights_of_flat_units_have_gradients(name, gpus, batch, seen):
    model = memory_cases._litgpt(find(name))
    options = dict(memory_cases._LITGPT_FSDP, gpus=gpus, batch=batch, sequence=1304)
    assert make_plan(model, Job(**options)).allocated == pytest.approx(seen * GB, rel=0.04)
    apart = make_plan(model, Job(**{**options, "flat": False})).allocated
    assert apart < 0.55 * seen * GB


def test_an_update_in_backward_keeps_no_gradients():
    """Llama-3.1-8B with 8-bit AdamW: 37.4 GiB in torchtune's table, on a card of 48."""
    options = dict(checkpointing=True, batch=2, sequence=2048, attention="flash",
                   optimizer="adamw-8bit")
    p = plan("llama-3-8b", **options, in_backward=True)
    assert p.allocated == pytest.approx(37.4 * GiB, rel=0.02)
    assert p.moments[-1].parts["gradients"] == 0
    after = plan("llama-3-8b", **options)
    assert after.allocated - p.allocated > p.model.parameters
    sharded = plan("llama-3-8b", **options, in_backward=True, gpus=2, shard=3)
    assert sharded.moments[-1].parts["gradients"] == 0
    tied = plan("llama-3.2-1b", **options, in_backward=True)
    table = 2 * tied.model.table  # its gradient has two parts, far apart
    assert tied.moments[-1].parts["gradients"] == pytest.approx(table, rel=0.001)


def test_without_sequence_parallel_every_rank_norms_all_tokens():
    """Llama-2-7B over two ranks, 4 x 2048 tokens: 55.7 GB (Megatron-LM's pull request 482)."""
    options = dict(memory_cases._MEGATRON, gpus=8, tensor=2, shard=1, batch=4, sequence=2048)
    apart, together = (plan("llama-2-7b", **options, tensor_only=t) for t in (True, False))
    assert apart.allocated == pytest.approx(55.7 * GB, rel=0.05)
    assert together.allocated < 0.95 * apart.allocated
    one = [plan("llama-2-7b", recipe="megatron", tensor_only=t) for t in (False, True)]
    assert one[0].moments == one[1].moments
    split = dict(gpus=4, tensor=2, shard=3)  # tokens are gathered beside sharded weights
    with_tokens, without = (plan("llama-2-7b", **split, tensor_only=t).moments[1].parts["gathered"]
                            for t in (False, True))
    assert with_tokens - without == 2048 * 4096 * 2


def test_megatron_keeps_eighteen_bytes():
    """Qwen3-4B: 69,454.74 MiB were allocated between steps, in a run that a course logs."""
    p = plan("qwen3-4b", recipe="megatron", optimizer="adamw-fused", sequence=64)
    step = p.moments[-1]
    assert step.name == "step"
    assert step.total == pytest.approx(69_454.74 * MiB, rel=0.01)
    forward = p.moments[1]  # its gradients are one buffer that is there from the start
    assert forward.parts["gradients"] == 4 * p.model.parameters


def test_sharded_runs_as_reported():
    """Mistral-7B on two GPUs, all states sharded: 36.23 GB (fms-acceleration's a100_80gb.csv)."""
    p = plan("mistral-7b-v0.1", gpus=2, shard=3, attention="flash", checkpointing=True, batch=2,
             sequence=4096)
    assert p.allocated == pytest.approx(36.23 * GB, rel=0.01)


def test_an_engine_fills_its_share_with_pages():
    p = plan("llama-3-8b", "80GiB", method="inference", paged=True, batch=64, new_tokens=512)
    more = plan("llama-3-8b", "80GiB", method="inference", paged=True, batch=128, new_tokens=512)
    assert p.tokens == pytest.approx(more.tokens, rel=0.001)  # room does not depend on the load
    assert plan("llama-3-8b", "80GiB", method="inference", paged=True, new_tokens=512,
                batch=p.tokens // 2560 + 2).verdict == "does not fit"
    assert p.margin < plan("llama-3-8b", "80GiB", method="inference", paged=True, batch=64,
                           new_tokens=512, share=1.0).margin


def test_lora_counts_agree_with_the_chapter():
    job = Job(method="lora", rank=16, targets="qkvo")
    model = find("llama-2-7b")
    assert job.adapter_parameters(model, model.layers) == lora_parameters(LLAMA_2_7B, 16)
    assert model.kv_bytes(4096) == kv_bytes(LLAMA_2_7B, 4096)


# --- sizes --------------------------------------------------------------------------------------

@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**50))
def test_sizes_come_back(nbytes):
    assert parse_size(f"{nbytes} B") == nbytes
    for unit in ("GiB", "GB"):
        scale = {"GiB": GiB, "GB": GB}[unit]
        assert parse_size(format_size(nbytes, unit)) == pytest.approx(nbytes, abs=0.0051 * scale)


@pytest.mark.parametrize("text", ["", "24", "-1GiB", "24 G", "1e400GB", "GiB", "24 iB", "nanGB"])
def test_sizes_need_a_number_and_a_unit(text):
    with pytest.raises(ValueError, match="unit"):
        parse_size(text)


def test_a_gigabyte_is_no_gibibyte():
    assert planner.find_device("24GB").bytes == 24 * GB
    assert planner.find_device("24GiB").bytes == 24 * GiB
    assert planner.find_device("RTX 3090").bytes <= 24 * GiB


# --- verdict and advice -------------------------------------------------------------------------

def test_verdicts_follow_the_size():
    p = plan("llama-3.2-1b", checkpointing=True)
    low, high = p.allocated + p.overhead[0], p.on_device[1]
    for size, verdict in ((high, "fits"), (high - 1, "tight"), (low, "tight"),
                          (low - 1, "does not fit")):
        assert plan("llama-3.2-1b", f"{size}B", checkpointing=True).verdict == verdict


@pytest.mark.parametrize("name, gpu, options", [
    ("llama-2-7b", "24GiB", {}),
    ("llama-3-8b", "80GiB", {"batch": 8, "attention": "eager", "recipe": "autocast"}),
    ("llama-2-70b", "80GiB", {"method": "lora"}),
    ("llama-3-8b", "24GiB", {"method": "inference", "batch": 64, "new_tokens": 500}),
    ("qwen2.5-7b", "12GiB", {"method": "inference", "sequence": 512}),
])
def test_advice_makes_it_fit(name, gpu, options):
    p = plan(name, gpu, **options)
    assert p.verdict != "fits" and p.advice
    for change in p.advice:
        again = plan(name, gpu, **{**options, **dict(change.options)})
        assert again.verdict == "fits" and again.allocated == change.plan.allocated
        assert change.cost


def test_no_advice_where_it_fits_or_nothing_helps():
    assert plan("llama-3.2-1b", "80GiB").advice == []
    assert plan("llama-3.1-405b", "0.5GiB").advice == []


# --- the command --------------------------------------------------------------------------------

def test_the_answer_is_one_screen_and_quick():
    """Seconds of the processor, the best of several runs: other work counts little."""
    command = [sys.executable, "-m", "companion.cli", "plan", "--model", "llama-2-7b",
               "--method", "full", "--gpu", "24GiB"]
    seconds = []
    for _ in range(6):
        before = os.times()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert "does not fit" in done.stdout and "What would make it fit" in done.stdout
    assert min(seconds) < 0.3


def _decoding(name, prompt):
    walk = Walk(find(name), Job(method="inference", batch=2, sequence=prompt), RecordingTape(),
                True)
    walk.tape.grad, walk.cache = False, {}
    walk.head(walk.hidden_states(), 1)
    walk.tape.new_kind = walk.held = None
    walk.tape.take()
    walk.past, walk.s, walk.rows = prompt, 1, walk.b
    return walk


@pytest.mark.parametrize("name, prompt", [
    ("llama-3-8b", 100), ("gemma-2-2b", 100), ("gemma-2-2b", 4090), ("gemma-2-2b", 5000),
    ("gemma-3-1b", 505), ("mistral-7b", 4095), ("deepseek-v2-lite", 64)])
def test_steps_of_decoding_that_are_told_from_two_are_those_that_would_be_walked(name, prompt):
    """Also around a window: gemma-2's has 4096 tokens, gemma-3's 512."""
    walk, walked = _decoding(name, prompt), []
    for _ in range(12):
        walk.head(walk.hidden_states())
        walk.tape.new_kind = walk.held = None
        walk.past += 1
        walked.append(walk.tape.take())
    assert planner_steps._decoded(_decoding(name, prompt), 12) == walked


@pytest.mark.parametrize("options", [
    {}, {"method": "inference"}, {"method": "lora", "checkpointing": True, "batch": 4},
    {"method": "inference", "paged": True}, {"gpus": 2, "shard": 3}])
def test_a_verdict_without_the_allocator_is_the_one_with_it(options):
    """Sizes around the bound below which nothing is simulated."""
    p = plan("llama-2-7b", **options)
    for size in (p.allocated + p.overhead[0], p._least, *p.on_device):
        for more in range(-2, 3):
            device = planner.Device("d", int(size / (p.job.share if p.job.paged else 1)) + more)
            new = planner.Plan(p.model, p.job, device, p.moments)
            word = "fits" if new.on_device[1] <= new.room else "tight"
            assert new.verdict == ("does not fit" if new.margin < 0 else word)


def test_nothing_but_the_standard_library():
    code = ("import sys; from companion import plan; str(plan('llama-2-7b', gpu='24GiB'));"
            "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_json_holds_the_same_figures():
    status, out, _ = run_cli("plan", "--model", "llama-2-7b", "--gpu", "h100", "--json")
    stored, p = json.loads(out), plan("llama-2-7b", "h100")
    assert status == 0 and stored["allocated"] == p.allocated and stored["verdict"] == p.verdict
    for moment in stored["moments"]:
        assert sum(moment["parts"].values()) == moment["total"]
    assert [c["what"] for c in stored["advice"]] == [c.what for c in p.advice]


BAD = [
    (["--model", "lama-2-7b"], "Llama-2-7B"),
    (["--model", "llama-2-7b", "--gpu", "h1000"], "H100"),
    (["--model", "llama-2-7b", "--gpu", "24"], "unit"),
    (["--model", "llama-2-7b", "--gpu=-24GiB"], "unit"),
    (["--model", "llama-2-7b", "--gpu", "0GiB"], "GPU"),
    (["--model", "llama-2-7b", "--batch", "0"], "batch"),
    (["--model", "llama-2-7b", "--batch", "-3"], "batch"),
    (["--model", "llama-2-7b", "--sequence", "999999999999"], "sequence"),
    (["--model", "llama-2-7b", "--batch", "two"], "batch"),
    (["--model", "llama-2-7b", "--method", "magic"], "method"),
    (["--model", "llama-2-7b", "--gpus", "6", "--tensor", "6"], "heads"),
    (["--model", "llama-2-7b", "--gpus", "3", "--tensor", "2"], "split"),
    (["--model", "llama-3-8b", "--gpus", "12", "--tensor", "12"], "heads"),
    (["--model", "llama-2-7b", "--shard", "3"], "one process shards nothing"),
    (["--model", "llama-2-7b", "--shard", "4", "--gpus", "8"], "shard"),
    (["--model", "llama-2-7b", "--gpus", "2", "--expert", "2"], "experts"),
    (["--model", "llama-2-7b", "--method", "inference", "--checkpointing"], "inference"),
    (["--model", "llama-2-7b", "--new-tokens", "5"], "inference"),
    (["--model", "llama-2-7b", "--packing", "--varied"], "packing"),
    (["--model", "llama-2-7b", "--packing", "--method", "inference"], "packing"),
    (["--model", "llama-2-7b", "--packing", "512"], "512"),
    (["--model", "llama-2-7b", "--dropout", "1"], "dropout"),
    (["--model", "llama-2-7b", "--dropout", "nan"], "dropout"),
    (["--model", "llama-2-7b", "--in-backward", "--accumulate", "2"], "in_backward"),
    (["--model", "llama-2-7b", "--in-backward", "--recipe", "megatron"], "in_backward"),
    (["--model", "gpt-2 small", "--sequence", "4096"], "positions"),
    (["--model", "llama-2-7b", "--kv-bits", "nan"], "kv"),
    (["--model", "llama-2-7b", "--kv-bits", "1e999"], "kv"),
    (["--model", "0B"], "parameters"),
    (["--config", "missing.json"], "missing.json"),
    (["--config", "."], "cannot read"),
    (["--model", "llama-2-7b", "--unknown"], "unknown"),
    ([], "required"),
]


@pytest.mark.parametrize("arguments, word", BAD)
def test_mistakes_are_one_line_and_status_2(arguments, word):
    status, out, err = run_cli("plan", *arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and word in err


@pytest.mark.parametrize("content, word", [
    ("not json", "JSON"), ("", "JSON"), ("[1, 2]", "object"), ("{}", "model_type"),
    ('{"model_type": 3}', "model_type"),
    (json.dumps({k: v for k, v in LLAMA_CONFIG.items() if k != "vocab_size"}), "vocab_size"),
    (json.dumps({**LLAMA_CONFIG, "hidden_size": -4096}), "hidden_size"),
    (json.dumps({**LLAMA_CONFIG, "hidden_size": "4096"}), "hidden_size"),
    (json.dumps({**LLAMA_CONFIG, "num_attention_heads": 30}), "heads"),
    (json.dumps({**LLAMA_CONFIG, "num_key_value_heads": 5}), "heads"),
    (json.dumps({**LLAMA_CONFIG, "num_hidden_layers": 10**9}), "num_hidden_layers"),
    (b"\xff\xfe\x00", "read"),
])
def test_bad_configurations_are_one_line(content, word, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = run_cli("plan", "--config", str(path))
    assert status == 2 and out == "" and err.count("\n") == 1 and word in err


TRIES = int(os.environ.get("COMPANION_FUZZ", "1000"))  # more on demand
FLAGS = [f.name for f in fields(Job) if f.type is bool]
WORDS = ["0", "1", "2", "3", "7", "8", "64", "-1", "4096", "1e9", "nan", "inf", "0.5", "", "x",
         "full", "lora", "qlora", "inference", "bf16", "autocast", "mixed", "megatron", "fsdp",
         "sgd", "adamw-8bit", "eager", "flash", "narrow", "chunked", "none", "optimizer", "all",
         "24GiB", "h100", "80GB", "llama-2-7b", "7B", "é", "\0", "{}", "--"]


def _answered(arguments):
    """Whether a command was answered; else it must have been refused in one line."""
    status, out, err = run_cli("plan", *arguments)
    assert status in (0, 2), arguments
    assert (err.count("\n") == 1 and not out) if status else (out and not err), arguments
    return status == 0


def test_fuzzed_commands_never_raise():
    """Random words for random options, every one of Job's among them: an answer or a refusal."""
    rng = random.Random(0)
    options = [f.name for f in fields(Job) if f.type is not bool] + ["gpu", "model"]
    models = ["llama-2-7b", "gpt-2 small", "pythia-160m", "deepseek-v3", "mixtral-8x7b-v0.1",
              "gemma-2-2b", "7B", "é"]
    answers = 0
    for _ in range(TRIES):
        arguments = ["--model", rng.choice(models)]
        for option in rng.sample(options, rng.randint(0, 4)):
            arguments += ["--" + option.replace("_", "-"), rng.choice(WORDS)]
        flags = rng.sample(FLAGS, rng.choice([0, 0, 0, 1, 2]))
        arguments += ["--" + flag.replace("_", "-") for flag in flags]
        answers += _answered(arguments + ["--json"] * (rng.random() < 0.3))
    assert answers > TRIES // 20


def _broken(text, rng):
    """The text with a piece cut, doubled or replaced."""
    a = rng.randrange(len(text))
    b = rng.randrange(a, min(len(text), a + 20)) + 1
    return text[:a] + rng.choice(["", text[a:b] * 2, "9" * 40, "\0", "[", "NaN"]) + text[b:]


def test_fuzzed_configurations_never_raise(tmp_path):
    """Random values for random fields of every family, and files with broken places."""
    rng = random.Random(0)
    values = [0, 1, 2, 7, 64, 4096, -1, 2.5, True, None, "x", [], {}, 10**12, float("nan"), [1]]
    keys = [*LLAMA_CONFIG, "num_key_value_heads", "head_dim", "sliding_window", "layer_types",
            "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok",
            "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "n_shared_experts", "first_k_dense_replace",
            "shared_expert_intermediate_size", "text_config", "n_embd", "n_positions", "n_inner",
            "tie_word_embeddings", "attention_bias", "sliding_window_pattern"]
    small = dict(LLAMA_CONFIG, num_hidden_layers=2, hidden_size=256, intermediate_size=512,
                 num_attention_heads=8, vocab_size=1000)
    families = sorted(planner_models._FAMILIES)
    path, answers = tmp_path / "config.json", 0
    for _ in range(TRIES):
        config = dict(small, model_type=rng.choice(families))
        for key in rng.sample(keys, rng.randint(0, 2)):
            config[key] = rng.choice(values)
        if rng.random() < 0.2:
            config.pop(rng.choice([*config]))
        text = json.dumps(config)
        path.write_text(_broken(text, rng) if rng.random() < 0.3 else text)
        answers += _answered(["--config", str(path)])
    assert answers > TRIES // 20


def test_the_fuzz_would_see_a_traceback(monkeypatch):
    def broken(*_):
        raise KeyError("layers")

    monkeypatch.setattr(planner, "make_plan", broken)
    with pytest.raises(KeyError):
        _answered(["--model", "llama-2-7b"])
