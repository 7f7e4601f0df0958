"""Asks one public planner about rows of the truth set, inside the environment of that planner.

    ENV/bin/python benchmarks/memory_peers_ask.py fitcheck-llm < questions.json > answers.json

A question is a row of memory_truth.json without its measurements, with ``parameters``, which a
model hub states. An answer is one of

    {"bytes": the predicted peak, "lacks": [what the planner has no input for], "says": verdict}
    {"no": why it cannot be asked}

``says`` is "fits", "unsure" or "does not fit" where the row has a limit, else null. Each
planner is called through what it documents, at the setting nearest to the row: the functions
say which. memory_peers.py runs this file.
"""
import contextlib
import io
import json
import logging
import sys
import tempfile
from importlib import metadata
from pathlib import Path

GiB, MiB = 2**30, 2**20
ROOMY = 2**44  # bytes of a GPU on which nothing is refused
PLAIN = ("gpt2", "gpt_neox")  # MLPs of two matrices
TARGETS = {"qv": ["q_proj", "v_proj"], "qkvo": ["q_proj", "k_proj", "v_proj", "o_proj"]}
TARGETS["all"] = [*TARGETS["qkvo"], "gate_proj", "up_proj", "down_proj"]


class No(Exception):
    """The planner cannot be asked this; the text says why."""


def family(q):
    return q["config"]["model_type"]


def hugging_face(q):
    """The row's configuration, for tools that build the model; No for the book's decoder."""
    if family(q) == "companion":
        raise No("not a Hugging Face model")
    from transformers import AutoConfig
    return AutoConfig.for_model(**q["config"])


def dimension(q, *names, default=None):
    return next((q["config"][n] for n in names if q["config"].get(n)), default)


def slides(q):
    """Whether a window is shorter than the sequence."""
    window = q["config"].get("sliding_window")
    return bool(window) and window < q["sequence"] + q.get("new_tokens", 0)


def compared(total, q):
    """What a planner that gives one number says of the row's limit."""
    if not q.get("limit_GiB"):
        return None
    return "fits" if total <= q["limit_GiB"] * GiB else "does not fit"


# --- fitcheck-llm ---------------------------------------------------------------------------

def fitcheck(q):
    """``fitcheck.estimate`` and ``estimate_inference`` with a ``ModelConfig``.

    The peak is the sum of its five tensor terms, without its term for context and allocator.
    Its verdict counts its context of 500 MiB, so the limit on the allocator is raised by
    that; only "safe" counts as "fits". Autocast over fp32 weights is its bf16, which counts
    fp32 master weights: the same 16 bytes a parameter. So pure bf16 lacks an input.
    """
    from fitcheck import GpuSpec, ModelConfig, TrainingConfig, estimate, estimate_inference
    from fitcheck import ServingConfig
    if q.get("gpus", 1) > 1:
        raise No("one GPU only")
    if family(q) == "companion":
        raise No("not a Hugging Face model")
    if family(q) in PLAIN or family(q) == "mixtral":
        raise No("it refuses the architecture")
    if slides(q):
        raise No("sliding windows are outside its scope")
    c = q["config"]
    model = ModelConfig(
        name=q["model"], num_params=q["parameters"], hidden_size=c["hidden_size"],
        num_layers=c["num_hidden_layers"], num_attention_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"], intermediate_size=c["intermediate_size"],
        vocab_size=c["vocab_size"], tie_word_embeddings=c["tie_word_embeddings"],
        head_dim=c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]))
    usable = int(q.get("limit_GiB", ROOMY / GiB) * 1024) + 500
    gpu = GpuSpec("limit", usable, usable)
    precision = "fp32" if q["recipe"] == "fp32" else "bf16"
    if q["method"] == "inference":
        r = estimate_inference(model, ServingConfig(
            precision=precision, seq_len=q["sequence"] + q["new_tokens"],
            num_concurrent=q["batch"]), gpu)
        return {"bytes": (r.total_mib - r.overhead_mib) * MiB,
                "lacks": ["activations of the prompt"],
                "says": "fits" if r.fits else "does not fit"}
    pure = q["method"] == "full" and q["recipe"] == "bf16"
    r = estimate(model, TrainingConfig(
        precision=precision, optimizer=q["optimizer"].removesuffix("-fused"),
        optimizer_dtype="bf16" if q["recipe"] == "bf16" else "fp32", batch_size=q["batch"],
        seq_len=q["sequence"], grad_checkpoint=q["checkpointing"],
        flash_attn=q["attention"] == "sdpa", grad_accum_steps=q.get("accumulate", 1),
        lora_rank=q["rank"] if q["method"] == "lora" else None,
        lora_targets=TARGETS[q.get("targets", "qkvo")]), gpu)
    return {"bytes": (r.total_mib - r.overhead_mib) * MiB,
            "lacks": ["training without fp32 master weights"] if pure else [],
            "says": {"safe": "fits", "uncertain": "unsure"}.get(r.verdict, "does not fit")}


# --- accelerate -----------------------------------------------------------------------------

BLIND = ["batch and sequence", "attention", "checkpointing"]


def accelerate(q):
    """What ``accelerate estimate-memory`` computes once it has the configuration from a hub.

    The model is built empty, with its head. Training: the row "float32" of the column
    "Training using Adam"; for autocast too, whose weights, gradients and moments are those
    (the row "float16" says half of it). Inference: "Total Size" and the 20 % that its
    documentation says to add.
    """
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModelForCausalLM
    if q.get("gpus", 1) > 1:
        raise No("one GPU only")
    if q["method"] == "lora":
        raise No("no LoRA")
    if q["method"] == "full" and not q["optimizer"].startswith("adamw"):
        raise No("no optimizer but Adam")
    if q["method"] == "full" and q["recipe"] == "bf16":
        raise No("no training in pure bf16")
    config = hugging_face(q)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size, _ = calculate_maximum_sizes(model)
    if q["method"] == "inference":
        total = 1.2 * (size if q["recipe"] == "fp32" else size / 2)
    else:
        total = max(estimate_training_usage(size, "float32").values())
    lacks = BLIND + ["autocast"] * (q["recipe"] == "autocast")
    return {"bytes": total, "lacks": lacks, "says": compared(total, q)}


# --- hf-vram-calc ---------------------------------------------------------------------------

def hf_vram_calc(q):
    """The command ``hf-vram-calc --model_path DIR --dtype T ... --output_json FILE``.

    The columns "Training (Adam)", "LoRA" and "Inference Total"; autocast is asked as fp32,
    whose weights, gradients and moments it has. The sum of its weights, cache and activations
    is no nearer for inference.
    """
    if q["method"] == "full" and not q["optimizer"].startswith("adamw"):
        raise No("no optimizer but Adam")
    if q.get("gpus", 1) > 1:
        raise No("training on one GPU only")
    from hf_vram_calc import cli
    config = hugging_face(q)
    lora, inference = q["method"] == "lora", q["method"] == "inference"
    dtype = "bf16" if lora or q["recipe"] == "bf16" else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        out = Path(folder) / "out.json"
        sys.argv = ["hf-vram-calc", "--model", q["model"], "--model_path", folder, "--dtype", dtype,
                    "--max_batch_size", str(q["batch"]), "--output_json", str(out),
                    "--max_seq_len", str(q["sequence"] + q.get("new_tokens", 0)),
                    "--lora_rank", str(q.get("rank", 64))]
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main()
        r = json.loads(out.read_text())["memory_requirements"][0]
    total = r["inference_total_gib" if inference else "lora_size_gib" if lora else "training_gib"]
    lacks = BLIND + ["LoRA's targets"] * lora + ["autocast"] * (q["recipe"] == "autocast")
    return {"bytes": total * GiB, "lacks": lacks, "says": compared(total * GiB, q)}


# --- llm-analysis ---------------------------------------------------------------------------

def llm_analysis(q):
    """``LLMAnalysis.training`` and ``.inference`` with configurations made from the row.

    Its MLP has two matrices; a gated one is given 1.5 times the width, as its own
    configurations of Llama are. Autocast over fp32 weights is its default, 16-bit weights
    beside fp32 master weights and gradients; for pure bf16 master_weights_dtype_bytes and
    other_op_bytes are set so that weights, gradients and moments have 2 bytes each.
    """
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig
    if q["method"] == "lora":
        raise No("no LoRA")
    if q["recipe"] == "fp32":
        raise No("no fp32 weights")
    heads = dimension(q, "num_attention_heads", "n_head", "heads")
    hidden = dimension(q, "hidden_size", "n_embd", "width")
    ffn = dimension(q, "intermediate_size", "hidden", default=4 * hidden)
    wide = ffn if family(q) in PLAIN else 3 * ffn // 2
    model = ModelConfig(
        name=q["model"], num_layers=dimension(q, "num_hidden_layers", "n_layer", "layers"),
        n_head=heads, hidden_dim=hidden, vocab_size=dimension(q, "vocab_size", "vocab"),
        max_seq_len=q["sequence"] + q.get("new_tokens", 0), ffn_embed_dim=wide,
        expansion_ratio=wide / hidden,
        num_key_value_heads=dimension(q, "num_key_value_heads", "kv_heads", default=heads),
        moe_num_experts=q["config"].get("num_local_experts", 1),
        moe_top_k=q["config"].get("num_experts_per_tok", 1))
    tied = q["config"].get("tie_word_embeddings", family(q) in ("gpt2", "companion"))
    lacks = ["an untied head"] * (not tied) + ["a window"] * slides(q)
    if dimension(q, "head_dim", default=hidden // heads) * heads != hidden:
        lacks.append("the size of a head")
    state = 2 if q["recipe"] == "bf16" else 4  # bytes of a gradient or of one moment
    gpu = GPUConfig("roomy", ROOMY / GiB, 4800, 450, 8e-6, 989)
    lacks += ["DDP's buckets"] * (q.get("shard") == 0) + ["gathered layers"] * (q.get("shard") == 3)
    analysis = LLMAnalysis(model, gpu, DtypeConfig("row", 16, 16, 16),
                           ParallelismConfig(dp_size=q.get("gpus", 1)))
    if q["method"] == "inference":
        r = analysis.inference(batch_size_per_gpu=q["batch"], seq_len=q["sequence"],
                               num_tokens_to_generate=q["new_tokens"])
        total = r["weight_memory_per_gpu"] + r["kv_cache_memory_per_gpu"] + max(
            r["prefill_activation_memory_per_gpu"], r["decode_activation_memory_per_gpu"])
        lacks = lacks + ["attention", "logits of the last position only"]
    else:
        moments = {"adamw": 2, "adamw-fused": 2, "sgd-momentum": 1, "sgd": 0}[q["optimizer"]]
        copies = moments - (q["recipe"] == "bf16")  # beside master weights, or one for them
        recompute = ActivationRecomputation.FULL if q["checkpointing"] \
            else ActivationRecomputation.NONE
        r = analysis.training(
            batch_size_per_gpu=q["batch"], gradient_accumulation_steps=q.get("accumulate", 1),
            seq_len=q["sequence"], activation_recomputation=recompute,
            master_weights_dtype_bytes=state, other_op_bytes=copies * state,
            ds_zero=DSZeRO(q.get("shard", 0)), flash_attn=q["attention"] == "sdpa")
        total = r["(weight+op_state+grad+act)_memory_per_gpu"]
    return {"bytes": total, "lacks": lacks, "says": compared(total, q)}


# --- DeepSpeed ------------------------------------------------------------------------------

def deepspeed(q):
    """The formulas of "Memory Requirements" in DeepSpeed's documentation, without offload.

    ZeRO-2 on one GPU, for autocast: 4 + 16 bytes a parameter. ZeRO-3, for FSDP of fp32 shards:
    18 bytes a parameter over the GPUs, and 4 a parameter of the largest layer. States only,
    as it says itself. ``estimate_zero2_model_states_mem_needs_all_cold`` computes the same.
    """
    if q["method"] != "full":
        raise No("only full training")
    if not q["optimizer"].startswith("adamw"):
        raise No("no optimizer but Adam")
    if q["recipe"] not in ("autocast", "fsdp"):
        raise No("only mixed precision")
    gpus, n = q.get("gpus", 1), q["parameters"]
    if gpus > 1 and q["shard"] != 3:
        raise No("no data parallel training without ZeRO")
    largest = dimension(q, "vocab_size", "vocab") * dimension(q, "hidden_size", "n_embd", "width")
    total = 20 * n if gpus == 1 else 18 * n // gpus + 4 * largest
    return {"bytes": total, "lacks": ["any activation"], "says": compared(total, q)}


TOOLS = {"fitcheck-llm": fitcheck, "accelerate": accelerate, "hf-vram-calc": hf_vram_calc,
         "llm-analysis": llm_analysis, "deepspeed": deepspeed}


def ask(tool, questions):
    """{id of a row: answer}"""
    answers = {}
    for q in questions:
        try:
            answer = TOOLS[tool](q)
            answers[q["id"]] = {**answer, "bytes": round(answer["bytes"])}
        except No as reason:
            answers[q["id"]] = {"no": str(reason)}
    return answers


def main():
    logging.disable(logging.WARNING)
    tool = sys.argv[1]
    questions = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answers
        answers = ask(tool, questions)
    version = None if tool == "deepspeed" else metadata.version(tool)
    json.dump({"version": version, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
