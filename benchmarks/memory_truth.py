"""What real training and inference steps hold on one GPU: the rows the planner is judged by.

Each row builds a model from its dimensions with random weights (Hugging Face's
implementations and the book's decoder), runs three steps of it, and stores what
PyTorch's allocator and the driver report at every moment:

    base, load                      before and after the model and its adapters exist
    forward, loss, backward, step   (three times) bytes at the end and the peak within;
                                    ``forward`` ends where the head begins
    prefill, decode                 the same for inference

in bytes: ``allocated``, ``reserved``, ``device`` (all that the driver has given out on the
device) and ``peak`` (max_memory_allocated within the phase). ``fullest`` lists the blocks
that lived at the highest peak, as [bytes, how many]. Outcome is ``ok``, ``out of memory``
(the phase and the message follow) or ``error``. Every second row of a group is held out:
decided here, before any measurement, and nothing is ever fitted to it.

Rows already in the results file are kept, unless their definition changed or they failed.
``--device cpu --tiny`` runs every row at toy sizes, without any memory figures.

PYTHONPATH=. python benchmarks/memory_truth.py --out benchmarks/results
"""
import argparse
import contextlib
import gc
import hashlib
import json
import logging
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from companion import pick_device
from companion.gpt import Config, Decoder
from companion.memory import GiB, MiB
from provenance import RESULTS, save

NAME = "memory_truth"
STEPS = 3

# --- models: Hugging Face configurations at real widths; rows choose the number of layers -----

_ROPE = {"max_position_embeddings": 8192}


def _llama(hidden, ffn, heads, kv_heads, vocab, tied=False, kind="llama", **extra):
    return {"model_type": kind, "hidden_size": hidden, "intermediate_size": ffn,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
            "tie_word_embeddings": tied, **_ROPE, **extra}


MODELS = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32000),
    "llama-3-8b": _llama(4096, 14336, 32, 8, 128256),
    "llama-3.2-1b": _llama(2048, 8192, 32, 8, 128256, tied=True, head_dim=64),
    "tinyllama-1.1b": _llama(2048, 5632, 32, 4, 32000),
    "smollm2-360m": _llama(960, 2560, 15, 5, 49152, tied=True),
    "mistral-7b": _llama(4096, 14336, 32, 8, 32000, kind="mistral", sliding_window=None),
    "mistral-7b-sliding": _llama(4096, 14336, 32, 8, 32000, kind="mistral", sliding_window=1024),
    "qwen2.5-0.5b": _llama(896, 4864, 14, 2, 151936, tied=True, kind="qwen2"),
    "qwen2.5-7b": _llama(3584, 18944, 28, 4, 152064, kind="qwen2"),
    "qwen3-0.6b": _llama(1024, 3072, 16, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen3-4b": _llama(2560, 9728, 32, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "phi-3-mini": _llama(3072, 8192, 32, 32, 32064, kind="phi3", pad_token_id=0),
    "gemma-2-2b": _llama(2304, 9216, 8, 4, 256000, tied=True, kind="gemma2", head_dim=256),
    "mixtral": _llama(2048, 7168, 32, 8, 32000, kind="mixtral", sliding_window=None,
                      num_local_experts=8, num_experts_per_tok=2),
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_positions": 1024,
                    "vocab_size": 50257},
    "pythia-1.4b": {"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192,
                    "num_attention_heads": 16, "vocab_size": 50304,
                    "max_position_embeddings": 4096, "tie_word_embeddings": False},
    "book": {"model_type": "companion", "width": 256, "heads": 8, "kv_heads": 4, "hidden": 768,
             "vocab": 256},
    "book-wide": {"model_type": "companion", "width": 2048, "heads": 16, "kv_heads": 16,
                   "hidden": 5632, "vocab": 32000},
}

# --- rows ------------------------------------------------------------------------------------

FULL, LORA, INFERENCE = "full", "lora", "inference"
# Recipes: "bf16" stores everything in bf16; "autocast" multiplies in bf16 over fp32 weights
# (over bf16 weights and fp32 adapters with LoRA, as trainers do); "fp32"; "bf16+fp32-adapters"
# is LoRA without autocast. Optimizers: adamw (foreach, torch's choice on a GPU), adamw-fused,
# sgd, sgd-momentum. limit_GiB: what the allocator may reserve.
_TABLE = """
model              layers method recipe attention checkpointing batch x sequence, more
[full]
llama-2-7b          4 full      bf16     sdpa  -    1x1024
llama-2-7b          4 full      bf16     sdpa  -    4x1024
llama-2-7b          2 full      bf16     sdpa  -    8x2048
llama-2-7b          3 full      bf16     sdpa  -    6x2048 optimizer=adamw-fused
llama-2-7b          4 full      bf16     eager -    2x2048
llama-2-7b          3 full      bf16     eager -    2x3072
llama-3-8b          2 full      bf16     sdpa  -    4x2048
llama-3-8b          2 full      bf16     sdpa  ckpt 8x2048
llama-3.2-1b       16 full      bf16     sdpa  ckpt 4x2048 optimizer=adamw-fused
llama-3.2-1b       16 full      bf16     sdpa  ckpt 8x2048
llama-3.2-1b        8 full      bf16     eager ckpt 4x2048 optimizer=sgd
tinyllama-1.1b     22 full      bf16     sdpa  -    8x1024 optimizer=sgd
tinyllama-1.1b     11 full      bf16     eager -    4x1024 optimizer=sgd-momentum
qwen2.5-0.5b       24 full      bf16     sdpa  -    4x1024
qwen2.5-0.5b       12 full      bf16     eager -    4x1024
qwen2.5-7b          2 full      bf16     sdpa  ckpt 4x2048 optimizer=sgd
qwen3-0.6b         14 full      bf16     sdpa  -    4x1024 optimizer=adamw-fused
qwen3-4b            6 full      bf16     sdpa  -    4x2048
qwen3-0.6b         14 full      bf16     eager ckpt 8x1024
mistral-7b          3 full      bf16     sdpa  ckpt 4x4096 optimizer=adamw-fused
mistral-7b-sliding  3 full      bf16     sdpa  -    2x4096
mistral-7b          2 full      bf16     eager ckpt 2x4096
phi-3-mini          4 full      bf16     sdpa  -    4x2048
phi-3-mini          4 full      bf16     eager -    2x1024 optimizer=sgd
gemma-2-2b          4 full      bf16     eager -    2x1024
gemma-2-2b          4 full      bf16     eager ckpt 4x2048 optimizer=sgd
gpt2-medium        12 full      bf16     sdpa  -    8x1024
gpt2-medium        12 full      bf16     eager -    8x1024
pythia-1.4b         8 full      bf16     sdpa  -    4x2048
pythia-1.4b         8 full      bf16     eager -    2x2048 optimizer=sgd
mixtral             2 full      bf16     sdpa  -    2x2048
mixtral             2 full      bf16     sdpa  ckpt 4x2048 optimizer=sgd
llama-2-7b          3 full      bf16     sdpa  -    4x1024 accumulate=2
llama-3.2-1b        8 full      bf16     sdpa  ckpt 8x2048 accumulate=2 optimizer=adamw-fused

[autocast]
llama-2-7b          2 full      autocast sdpa  -    2x1024
llama-2-7b          2 full      autocast sdpa  -    8x2048 optimizer=adamw-fused
llama-2-7b          2 full      autocast eager -    4x2048 optimizer=sgd
llama-3.2-1b       16 full      autocast sdpa  ckpt 4x2048 optimizer=adamw-fused
llama-3.2-1b       16 full      autocast sdpa  ckpt 1x1024
llama-3.2-1b        4 full      autocast sdpa  -    4x2048 optimizer=sgd
qwen2.5-0.5b       12 full      autocast sdpa  -    4x1024 optimizer=adamw-fused
qwen2.5-0.5b       24 full      autocast eager ckpt 4x1024
qwen3-0.6b         14 full      autocast sdpa  -    4x1024
qwen3-0.6b         14 full      autocast sdpa  ckpt 8x2048 optimizer=sgd
mistral-7b          2 full      autocast sdpa  ckpt 4x4096 optimizer=sgd-momentum
gpt2-medium        12 full      autocast sdpa  -    8x1024 optimizer=adamw-fused
pythia-1.4b         6 full      autocast sdpa  -    4x2048
book                4 full      autocast sdpa  -    32x1024 optimizer=adamw-fused
book-wide           6 full      autocast sdpa  -    4x1024 optimizer=adamw-fused
smollm2-360m       16 full      autocast eager -    4x1024 accumulate=2

[fp32]
llama-2-7b          2 full      fp32     sdpa  -    2x1024
llama-2-7b          2 full      fp32     eager -    4x1024 optimizer=adamw-fused
llama-3.2-1b        8 full      fp32     sdpa  ckpt 4x1024 optimizer=adamw-fused
smollm2-360m       16 full      fp32     sdpa  -    4x1024
smollm2-360m       32 full      fp32     sdpa  ckpt 8x1024 optimizer=sgd
qwen2.5-0.5b       12 full      fp32     eager ckpt 2x1024
gpt2-medium        12 full      fp32     eager -    4x512
gpt2-medium        12 full      fp32     sdpa  -    4x1024 optimizer=sgd
book-wide           6 full      fp32     sdpa  -    2x1024
book                4 full      fp32     sdpa  -    8x1024

[lora]
llama-2-7b          8 lora      bf16     sdpa  -    2x2048 rank=8 targets=qv
llama-2-7b          8 lora      bf16     sdpa  -    4x1024 rank=16 targets=all
llama-2-7b          8 lora      bf16     sdpa  ckpt 4x2048 rank=16 targets=qkvo
llama-2-7b          8 lora      autocast sdpa  -    2x2048 rank=8 targets=qv
llama-2-7b          8 lora      autocast sdpa  ckpt 4x2048 rank=16 targets=all
llama-3-8b          4 lora      autocast sdpa  -    2x1024 rank=16 targets=all
llama-3-8b          4 lora      bf16+fp32-adapters sdpa  -    2x2048 rank=16 targets=qv
llama-3-8b          8 lora      bf16+fp32-adapters sdpa  ckpt 4x2048 rank=64 targets=all
qwen2.5-7b          4 lora      bf16     sdpa  ckpt 4x2048 rank=8 targets=all
qwen2.5-7b          4 lora      autocast eager -    2x1024 rank=8 targets=qkvo
mistral-7b          6 lora      bf16     eager ckpt 2x2048 rank=16 targets=qkvo
mistral-7b          6 lora      bf16     eager -    1x2048 rank=16 targets=all

[inference]
llama-2-7b          8 inference bf16     sdpa  -    8x2048 new_tokens=16
llama-2-7b          8 inference bf16     eager -    2x2048 new_tokens=16
llama-3-8b          8 inference bf16     sdpa  -    16x2048 new_tokens=16
llama-3-8b          4 inference fp32     sdpa  -    4x1024 new_tokens=16
qwen2.5-0.5b       24 inference bf16     sdpa  -    32x1024 new_tokens=32
qwen2.5-7b          8 inference bf16     sdpa  -    1x8192 new_tokens=8
qwen3-4b           12 inference bf16     sdpa  -    8x1024 new_tokens=16 all_logits=1
mistral-7b-sliding  8 inference bf16     sdpa  -    8x2048 new_tokens=16
gemma-2-2b          8 inference bf16     eager -    4x1024 new_tokens=16
mixtral             4 inference bf16     sdpa  -    4x1024 new_tokens=16

[limited]
llama-3.2-1b       16 full      bf16     sdpa  ckpt 4x2048 limit_GiB=11.0
llama-3.2-1b       16 full      bf16     sdpa  ckpt 1x1024 limit_GiB=11.2
llama-3.2-1b       16 full      bf16     sdpa  ckpt 1x1024 limit_GiB=13.0
llama-2-7b          4 full      bf16     sdpa  -    1x1024 limit_GiB=9.5
llama-3-8b          2 full      bf16     sdpa  ckpt 8x2048 limit_GiB=22.0
llama-2-7b          2 full      autocast sdpa  -    2x1024 limit_GiB=10.0
qwen2.5-0.5b       24 full      bf16     sdpa  -    4x1024 limit_GiB=9.0
qwen2.5-0.5b       24 full      bf16     sdpa  -    4x1024 limit_GiB=14.0
qwen2.5-0.5b       24 full      bf16     sdpa  -    4x1024 limit_GiB=20.0
llama-2-7b          8 lora      bf16     sdpa  -    4x2048 rank=8 targets=qv limit_GiB=12.0
llama-2-7b          8 lora      bf16     sdpa  ckpt 4x2048 rank=8 targets=qv limit_GiB=8.0
llama-2-7b          4 full      bf16     eager -    4x2048 limit_GiB=24.0
llama-3-8b          8 inference bf16     sdpa  -    32x2048 new_tokens=16 limit_GiB=7.0
llama-3-8b          8 inference bf16     sdpa  -    4x2048 new_tokens=16 limit_GiB=7.5
gpt2-medium        12 full      bf16     eager -    8x1024 limit_GiB=12.0
"""
_NUMBERS = {"accumulate": int, "rank": int, "new_tokens": int, "limit_GiB": float,
            "all_logits": int}


def rows():
    """All rows, with their ids and Hugging Face configurations; even ones of a group held out."""
    found = []
    for line in filter(None, _TABLE.splitlines()[2:]):
        if line.startswith("["):
            group, number = line.strip("[]"), 0
            continue
        model, layers, method, recipe, attention, checkpointing, size, *more = line.split()
        batch, sequence = map(int, size.split("x"))
        more = dict(pair.split("=") for pair in more)
        more = {key: _NUMBERS.get(key, str)(value) for key, value in more.items()}
        number += 1
        config = dict(MODELS[model])
        key = {"gpt2": "n_layer", "companion": "layers"}.get(config["model_type"],
                                                           "num_hidden_layers")
        config[key] = int(layers)
        found.append({
            "id": f"{group}-{number:02d}", "held_out": number % 2 == 0, "group": group,
            "model": model, "method": method, "recipe": recipe, "attention": attention,
            "checkpointing": checkpointing == "ckpt", "batch": batch, "sequence": sequence,
            "optimizer": "adamw", **more, "config": config})
    return found


def tiny(row):
    """The same row at toy sizes, for a run without a GPU."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "vocab_size": 199, "n_embd": 64, "n_head": 4, "width": 64, "hidden": 96,
             "vocab": 199, "head_dim": 16, "layers": 1, "num_hidden_layers": 1, "n_layer": 1,
             "n_positions": 64, "sliding_window": 16}
    config = {k: v if v is None else small.get(k, v) for k, v in row["config"].items()}
    for key in "num_key_value_heads", "kv_heads", "heads":
        if key in config:
            config[key] = min(config[key], 4 if key == "heads" else 2)
    return {**row, "config": config, "batch": 2, "sequence": 32, "limit_GiB": None, "new_tokens": 2}


# --- building --------------------------------------------------------------------------------

def build(row, device):
    """The row's model on ``device``, in training mode unless it only infers."""
    config, lora = dict(row["config"]), row["method"] == LORA
    dtype = torch.float32 if row["recipe"] in ("autocast", "fp32") and not lora else torch.bfloat16
    if config.pop("model_type") == "companion":
        with torch.device(device):
            model = Decoder(Config(**config, context=4096)).to(dtype)
        return model.train()
    from transformers import AutoConfig, AutoModelForCausalLM
    settings = AutoConfig.for_model(row["config"]["model_type"], **config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype,
                                                 attn_implementation=row["attention"])
    if row["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        model = with_adapters(model, row)
    return model.train(row["method"] != INFERENCE)


def with_adapters(model, row):
    """LoRA by the peft package; bf16 adapters where the recipe is bf16 throughout."""
    import peft
    names = {"qv": ["q_proj", "v_proj"], "qkvo": ["q_proj", "k_proj", "v_proj", "o_proj"],
             "all": "all-linear"}[row["targets"]]
    config = peft.LoraConfig(r=row["rank"], lora_alpha=2 * row["rank"], target_modules=names,
                             lora_dropout=0.0, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=row["recipe"] != "bf16")


def make_optimizer(row, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    kind = row["optimizer"]
    if kind.startswith("adamw"):
        return torch.optim.AdamW(parameters, lr=1e-5, fused=kind == "adamw-fused" or None)
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9 if kind == "sgd-momentum" else 0)


# --- measuring -------------------------------------------------------------------------------

class Meter:
    """What the allocator and the driver report, by moment; on a CPU there is nothing to read."""

    def __init__(self, device):
        self.device, self.record = device, []
        self.moment = "base"

    def read(self, moment, **more):
        """Close a phase that ends now: its last figures and the peak within it."""
        entry = {"moment": moment, **more}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            entry |= {"allocated": torch.cuda.memory_allocated(),
                      "reserved": torch.cuda.memory_reserved(), "device": total - free,
                      "peak": torch.cuda.max_memory_allocated()}
            torch.cuda.reset_peak_memory_stats()
        self.record.append(entry)

    def empty(self):
        """Nothing of an earlier row remains: neither tensors nor cached blocks nor workspaces."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=500_000)

    def fullest(self):
        """[[bytes, how many], ...] of the blocks of 1 MiB or more that lived at the peak."""
        if self.device.type != "cuda":
            return []
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        return at_peak(trace)


def at_peak(trace):
    """The blocks that lived when their sum was highest, from the allocator's own history."""
    live, total, peak, when = {}, 0, 0, 0
    for i, event in enumerate(trace):
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            total += event["size"]
            if total > peak:
                peak, when = total, i
        elif event["action"] == "free_completed":
            total -= live.pop(event["addr"], 0)
    live = {}
    for event in trace[:when + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    sizes = sorted((s for s in live.values() if s >= MiB), reverse=True)
    return [[size, sizes.count(size)] for size in dict.fromkeys(sizes)]


def limit(row, device):
    if row.get("limit_GiB") and device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(row["limit_GiB"] * GiB / total)


def autocast(row, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=row["recipe"] == "autocast")


def loss_of(model, row, tokens, meter, **where):
    """The loss of one batch; the head's entry ends the phase ``forward``."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.head

    def entered(*_):
        meter.read("forward", **where)
        meter.moment = "loss"

    hook = head.register_forward_pre_hook(entered)
    try:
        if row["config"]["model_type"] == "companion":
            logits = model(tokens[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss
    finally:
        hook.remove()


def train(row, device, meter):
    model = build(row, device)
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    meter.read("load", parameters=parameters, trainable=trainable)
    optimizer = make_optimizer(row, model)
    book = row["config"]["model_type"] == "companion"
    vocab = row["config"].get("vocab_size") or row["config"]["vocab"]
    for step in range(STEPS):
        for part in range(row.get("accumulate", 1)):
            where = {"step": step, "part": part}
            meter.moment = "forward"
            tokens = torch.randint(vocab, (row["batch"], row["sequence"] + book), device=device)
            with autocast(row, device):
                loss = loss_of(model, row, tokens, meter, **where)
            meter.read("loss", **where)
            meter.moment = "backward"
            loss.backward()
            del loss
            meter.read("backward", **where)
        meter.moment = "step"
        optimizer.step()
        meter.read("step", step=step)
        optimizer.zero_grad()


@torch.no_grad()
def infer(row, device, meter):
    model = build(row, device)
    meter.read("load", parameters=sum(p.numel() for p in model.parameters()), trainable=0)
    size = row["batch"], row["sequence"]
    tokens = torch.randint(row["config"]["vocab_size"], size, device=device)
    keep = {} if row.get("all_logits") else {"logits_to_keep": 1}
    meter.moment = "prefill"
    out = model(input_ids=tokens, use_cache=True, **keep)
    cache, last = out.past_key_values, out.logits[:, -1:].argmax(-1)
    del out
    meter.read("prefill")
    meter.moment = "decode"
    for _ in range(row["new_tokens"]):
        out = model(input_ids=last, past_key_values=cache, use_cache=True)
        last = out.logits[:, -1:].argmax(-1)
        del out
    meter.read("decode")


def measure(row, device):
    """The row with its outcome, moments and peaks. Whatever goes wrong is recorded, not raised."""
    meter, started, outcome, message = Meter(device), time.perf_counter(), "ok", None
    meter.empty()
    meter.read("base")
    limit(row, device)
    try:
        meter.moment = "load"
        (infer if row["method"] == INFERENCE else train)(row, device, meter)
    except torch.cuda.OutOfMemoryError as error:
        outcome, message = "out of memory", str(error).splitlines()[0][:400]
    except Exception as error:  # a row that fails must not take the others with it
        outcome, message = "error", f"{type(error).__name__}: {str(error)[:300]}"
        traceback.print_exc()
    if outcome != "ok":
        meter.read(meter.moment + ", failed")
    record = meter.record
    sources = {"allocated": "peak", "reserved": "reserved", "device": "device"}
    peaks = {f"peak_{key}": max((r.get(source, 0) for r in record[1:]), default=0)
             for key, source in sources.items()}
    if device.type == "cuda":
        peaks["peak_reserved"] = max(peaks["peak_reserved"], torch.cuda.max_memory_reserved())
    with contextlib.suppress(Exception):  # a diagnosis only; not every version can give it
        peaks["fullest"] = meter.fullest()
    return {**row, "outcome": outcome, **({"message": message} if message else {}), **peaks,
            "moments": record, "seconds": round(time.perf_counter() - started, 2)}


# --- command ---------------------------------------------------------------------------------

def definition(row):
    """A fingerprint of what the row asks for."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]


def kept(path):
    """Measured rows of an earlier run, by id."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))["results"]["rows"]
    return {r["id"]: r for r in stored if r["outcome"] != "error"}


def setting(device):
    """What the figures depend on beside the rows."""
    found = {"steps": STEPS}
    for name in "transformers", "peft":
        with contextlib.suppress(ImportError):
            found[name] = __import__(name).__version__
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context exists from here on
        free, total = torch.cuda.mem_get_info()
        found |= {"total": total, "context": total - free - torch.cuda.memory_reserved()}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--only", nargs="*", help="ids or groups of rows")
    parser.add_argument("--again", action="store_true", help="measure rows that are stored, too")
    o = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    device = torch.device(o.device) if o.device else pick_device()
    stored = kept(o.out / f"{NAME}.json")
    results = setting(device)
    todo = [r for r in rows() if not o.only or r["id"] in o.only or r["group"] in o.only]
    started = time.perf_counter()
    for i, row in enumerate(todo):
        row = {**row, "definition": definition(row)}
        old = None if o.again else stored.get(row["id"])
        if old is None or old["definition"] != row["definition"]:
            old = stored[row["id"]] = measure(tiny(row) if o.tiny else row, device)
            print(f"{i + 1}/{len(todo)} {row['id']} {row['model']} {row['method']} "
                  f"{row['recipe']}: {old['outcome']}, {old['peak_allocated'] / GiB:.2f} GiB "
                  f"allocated, {old['peak_reserved'] / GiB:.2f} reserved, {old['seconds']} s "
                  f"({time.perf_counter() - started:.0f} s in all)", flush=True)
        if i % 8 == 7 or i == len(todo) - 1:
            results["rows"] = [stored[r["id"]] for r in rows() if r["id"] in stored]
            save(NAME, __file__, results, o.out)


if __name__ == "__main__":
    main()
