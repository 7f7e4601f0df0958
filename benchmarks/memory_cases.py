"""Public reports of memory, planned: memory_cases.csv, with the options that each one states.

    PYTHONPATH=. python benchmarks/memory_score.py --cases

What a report leaves open (``ambiguous`` in the file) is filled with the usual default of its
program and marked with a tilde; such rows are shown, and counted apart. Nothing is fitted to
them. Reports on models that are no decoders, or that lack batch, length or model, are listed
as not plannable with the reason. Standard library only.
"""
import csv
from pathlib import Path

from companion.memory import GB, GiB, MiB
from companion.planner import Device, Job, find, make_plan
from companion.planner_models import Model

FILE = Path(__file__).parent / "memory_cases.csv"


def _model(name, hidden, layers, heads, kv_heads, ffn, vocab, tied=False, family="llama",
           head_dim=None, qkv_bias=False, positions=0):
    return Model(name, family, layers, hidden, heads, kv_heads, head_dim or hidden // heads, ffn,
                 vocab, tied, qkv_bias, positions=positions)


POWERLM = _model("PowerLM-3b", 2304, 40, 36, 36, 9216, 49152, tied=True)
QWEN_7B = _model("Qwen-7B", 4096, 32, 32, 32, 11008, 151936, qkv_bias=True)
QWEN_18B = _model("Qwen-1.8B", 2048, 24, 16, 16, 5504, 151936, qkv_bias=True)
QWEN_72B = _model("Qwen-72B", 8192, 80, 64, 64, 24576, 152064, qkv_bias=True)
YI_34B = _model("Yi-34B", 7168, 60, 56, 8, 20480, 64000)
GLM_4 = _model("GLM-4-9B", 4096, 40, 32, 2, 13696, 151552, qkv_bias=True)
LLAMA_65B = _model("LLaMA-65B", 8192, 80, 64, 64, 22016, 32000)
LLAMA_30B = _model("LLaMA-30B", 6656, 60, 52, 52, 17920, 32000)
GEMMA_2B = _model("Gemma-2b", 2048, 18, 8, 1, 16384, 256000, tied=True, family="gemma",
                  head_dim=256)
OPT_13B = _model("OPT-1.3B", 2048, 24, 32, 32, 8192, 50272, tied=True, family="gpt2",
                 positions=2050)
FALCON = _model("Falcon-40B", 8192, 60, 128, 8, 32768, 65024, tied=True, family="gpt_neox")
GPT2_XL = _model("GPT-2 XL, padded", 1600, 48, 25, 25, 6400, 50304, tied=True, family="gpt2",
                 positions=1024)
PYTHIA_28B = _model("Pythia-2.8B", 2560, 32, 32, 32, 10240, 50304, family="gpt_neox")

_FLASH = {"attention": "flash", "checkpointing": True}
_Z3 = {"shard": 3, **_FLASH}
_LORA = {"method": "lora", **_FLASH}
_QLORA = {"method": "qlora", **_FLASH}
_FSDP = {"recipe": "fsdp", "optimizer": "adamw-fused", **_Z3}
_MEGATRON = {"recipe": "megatron", "optimizer": "adamw-fused", "attention": "flash",
             "kernels": "fused", "sequence": 4096}

# id: (model, options); kind of figure: a allocated, r reserved, d device, o ran out or not
PLANNED = {
    "fms-03": ("mistral-7b-v0.1", "a", dict(_Z3, gpus=2, batch=2, sequence=4096)),
    "fms-05": ("mistral-7b-v0.1", "a", dict(_LORA, batch=4, sequence=4096, adapters="bf16")),
    "fms-09": ("mistral-7b-v0.1", "a", dict(_QLORA, batch=4, sequence=4096, adapters="bf16")),
    "fms-10": ("mistral-7b-v0.1", "a", dict(_QLORA, batch=8, sequence=4096, adapters="bf16")),
    "fms-17": ("mixtral-8x7b-v0.1", "o", dict(_Z3, gpus=2, batch=2, sequence=4096)),
    "fms-18": (POWERLM, "a", dict(_FLASH, batch=4, sequence=4096)),
    "fms-19": (POWERLM, "a", dict(_FLASH, batch=8, sequence=4096)),
    "fms-21": ("llama-3-8b", "a", dict(_FLASH, batch=4, sequence=4096, loss="chunked",
                                       kernels="fused")),
    "fms-25": ("mistral-7b-v0.1", "a", dict(_Z3, gpus=8, batch=2, sequence=4096)),
    "lit-01": ("llama-2-7b", "a", dict(method="lora", rank=8, targets="qv", sequence=1304)),
    "lit-03": ("llama-2-7b", "o", dict(method="lora", rank=8, targets="qv", batch=4,
                                       sequence=1304)),
    "lit-05": ("llama-2-7b", "a", dict(method="qlora", rank=8, targets="qv", sequence=1304)),
    "lit-08": ("llama-2-13b", "a", dict(method="lora", rank=8, targets="qv", sequence=1304,
                                        gpus=4, shard=3)),
    "lit-09": (FALCON, "o", dict(method="qlora", rank=8, targets="qv", sequence=1079)),
    "lit-14": ("llama-3-8b", "o", dict(_FLASH, batch=4, sequence=512)),
    "lit-15": (GEMMA_2B, "a", dict(method="lora", rank=8, targets="all", batch=2, sequence=512)),
    "lit-18": ("llama-3.2-1b", "a", dict(_FLASH, batch=4, sequence=512)),
    "tune-11": ("llama-3-8b", "a", dict(_FLASH, batch=2, sequence=2048,
                                        optimizer="adamw-8bit")),
    "qwen-lora7b-2048": (QWEN_7B, "d", dict(_LORA, rank=64, targets="all", sequence=2048)),
    "qwen-full1.8b-8192": (QWEN_18B, "d", dict(_FLASH, recipe="megatron", sequence=8192)),
    "qwen-full7b-1024": (QWEN_7B, "d", dict(_Z3, recipe="mixed", gpus=2, sequence=1024)),
    "qwen-72b-lora-z3": (QWEN_72B, "d", dict(_LORA, shard=3, gpus=4, rank=64, targets="all",
                                             sequence=2048)),
    "swift-02": (QWEN_7B, "r", dict(method="lora", rank=8, targets="qv", attention="flash")),
    "swift-03": (QWEN_7B, "r", dict(method="lora", rank=8, targets="qv", attention="eager")),
    "swift-07": (QWEN_7B, "r", dict(_FLASH, sequence=512)),
    "swift-10": (QWEN_72B, "o", dict(_LORA, rank=8, sequence=4096, gpus=2, pipeline=2)),
    "fq-02": ("llama-2-7b", "r", dict(_QLORA, shard=3, gpus=2, rank=64, targets="all")),
    "fq-05": ("llama-2-7b", "r", dict(_LORA, shard=3, gpus=2, rank=64, targets="all", batch=6)),
    "fq-07": (YI_34B, "r", dict(_QLORA, shard=3, gpus=2, rank=64, targets="all", batch=2)),
    "fq-09": ("mistral-7b-v0.1", "r", dict(_QLORA, shard=3, gpus=2, rank=64, targets="all",
                                           sequence=24576, offload="parameters")),
    "titan-05": ("llama-3-8b", "r", dict(_FSDP, gpus=8, sequence=32768)),
    "titan-06": ("llama-3-8b", "r", dict(_FSDP, gpus=64, context=8, sequence=262144)),
    "titan-07": ("llama-3-70b", "r", dict(_FSDP, gpus=256, tensor=8, batch=16, sequence=8192)),
    "mega-01": ("llama-2-7b", "a", dict(_MEGATRON, gpus=8, shard=1, batch=2)),
    "mega-02": ("llama-2-7b", "a", dict(_MEGATRON, gpus=8, tensor=2, shard=1, batch=4)),
    "mega-03": ("llama-2-7b", "a", dict(_MEGATRON, gpus=8, pipeline=2, shard=1, batch=2)),
    "mega-06": (GPT2_XL, "d", dict(_MEGATRON, sequence=1024)),
    "pr-14": ("llama-2-13b", "d", dict(_QLORA, batch=2, sequence=512, rank=64, targets="all",
                                       upcast=True)),
    "pr-16": (LLAMA_65B, "d", dict(_QLORA, batch=1, sequence=512, rank=64, targets="all",
                                   upcast=True)),
    "pr-17": (GLM_4, "d", dict(_LORA, targets="all", sequence=10240)),
    "pr-18": (GLM_4, "d", dict(_QLORA, targets="all", sequence=10240, upcast=True)),
    "pr-20": (OPT_13B, "a", dict(recipe="mixed", batch=128, sequence=512, checkpointing=True)),
    "lit-10": ("llama-2-70b", "a", dict(method="inference", weight_bits=4, sequence=64,
                                        new_tokens=50)),
    "lit-11": ("llama-2-7b", "a", dict(method="inference", sequence=64, new_tokens=50)),
    "qwen-gen-8192": (QWEN_7B, "d", dict(method="inference", sequence=1, new_tokens=8192)),
    "qwen-gen-bs32": (QWEN_7B, "d", dict(method="inference", sequence=1024, batch=32,
                                         new_tokens=1)),
    "qwen-gen-bs64": (QWEN_7B, "o", dict(method="inference", sequence=1024, batch=64,
                                         new_tokens=1024, all_logits=True)),
    "pr-08": ("llama-2-13b", "o", dict(sequence=2048)),
    "pr-09": ("llama-2-13b", "o", dict(_FLASH, gpus=2, tensor=2, sequence=512, recipe="mixed")),
    "pr-12": (YI_34B, "o", dict(_QLORA, sequence=1400, upcast=True, rank=64, targets="all")),
    "pr-37": ("llama-2-70b", "o", dict(_LORA, shard=3, gpus=16, sequence=4096)),
    "pr-39": ("llama-2-7b", "o", dict(method="inference", batch=8, sequence=2048,
                                      new_tokens=2048, attention="eager", all_logits=True)),
}

# id: a figure that must agree to the digits printed, from the planner's own models
EXACT = {
    "kv-02": lambda: find("qwen3-30b-a3b").kv_bytes(262144) / GiB,
    "kv-07": lambda: 2 * (find("qwen3-235b-a22b").kv_bytes(367404, tensor_parallel=4) / GiB / 2),
    "kv-10": lambda: int(5.23 * GiB // find("llama-2-7b").kv_bytes(1)),
    "gg-01": lambda: PYTHIA_28B.kv_bytes(2048) / MiB,
    "gg-03": lambda: LLAMA_30B.kv_bytes(512, bits=32) / MiB,
    "gg-05": lambda: find("deepseek-v3").kv_bytes(32768) / MiB,
    "ex-03": lambda: 4 * 1024 * 50304 * 4 / MiB,
    "ex-04": lambda: 32 * 1024 * 50304 * 4 / GiB,
    "ex-07": lambda: 4 * 2048 * find("llama-2-7b").vocab * 4 / MiB,
    "ex-08": lambda: 64 * 512 * find("llama-2-7b").ffn * 2 / MiB,
    "ex-09": lambda: 2 * 256 * 151665 * 4 / 1e6,
    "mega-07": lambda: find("qwen3-4b").parameters * 18 / MiB,
}

LEFT_OUT = {
    "tune-06": "activation offload", "tune-17": "length not stated", "tune-18": "length not stated",
    "qwen-loraemb7b-256": "trainable embedding", "qwen-loraemb7b-8192": "trainable embedding",
    "swift-11": "GaLore", "pr-11": "GaLore",
    "titan-01": "selective checkpointing",
    "titan-03": "selective checkpointing", "titan-04": "selective checkpointing, compiled",
    "mega-08": "batch and length not stated", "pr-13": "batch and length not stated",
    "pr-21": "encoder and decoder", "pr-22": "encoder and decoder", "pr-24": "an encoder",
    "pr-25": "an encoder", "pr-27": "an encoder", "pr-29": "another framework (MLX)",
    "pr-34": "a diffusion model", "pr-38": "lengths not stated", "gg-07": "another engine (GGUF)",
    "kv-14": "dimensions not stated", "ex-11": "packed kernel's workspace",
    "pr-10": "state after offloading not stated", "pr-32": "a diffusion model",
}
_FIGURES = {"a": "allocated", "r": "reserved", "d": "device"}
_UNITS = {"GB": GB, "GB (1e9)": GB, "GiB": GiB, "MiB": MiB}


def cases():
    with FILE.open(encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def _measured(row):
    """Bytes per GPU; multi-GPU rows of one source state the sum over all GPUs."""
    value = float(row["value"].split("/")[-1].split("-")[-1])
    total = row["source"].startswith("QwenLM") and row["n_gpus"] not in ("", "1")
    return value * _UNITS[row["unit"]] / (int(row["n_gpus"]) if total else 1)


def report():
    """Print every case."""
    rows, errors, broken = cases(), {"clear": [], "open": []}, []
    counted = set(PLANNED) | set(EXACT) | set(LEFT_OUT)
    assert counted == set(rows), set(rows) ^ counted
    for id, (model, kind, options) in PLANNED.items():
        row = rows[id]
        size = float(row["gpu_gb"].split("+")[0]) if row["gpu_gb"] else None
        device = Device(row["gpu"], int(size * GiB)) if size else None
        plan = make_plan(find(model), Job(**options), device)
        mark = "~" if row["ambiguous"] else " "
        head = f"{id:<20}{mark}{plan.model.name:<19.19}{plan.job.method:<10}"
        if kind == "o":
            print(f"{head}{row['outcome'][:16]:<17} planned: {plan.verdict}, "
                  f"{plan.on_device[0] / GiB:.1f} of {size:g} GiB")
            broken += [id] * (plan.verdict == "fits")
            continue
        seen = _measured(row)
        low, high = {"a": (plan.allocated,) * 2, "r": plan.reserved, "d": plan.on_device}[kind]
        best = min(max(seen, low), high)  # a band is right if the figure lies in it
        error = best / seen - 1
        errors["open" if row["ambiguous"] else "clear"].append(abs(error))
        print(f"{head}{_FIGURES[kind]:<10}{low / GB:7.2f}..{high / GB:<7.2f} "
              f"seen {seen / GB:7.2f} GB {100 * error:+6.1f} % "
              f"{plan.verdict or ''}")
    for id, value in EXACT.items():
        print(f"{id:<20} {rows[id]['what_the_number_is'][:30]:<31} planned {value():,.2f}, "
              f"reported {rows[id]['value']} {rows[id]['unit']}")
    for id, why in LEFT_OUT.items():
        print(f"{id:<20} not planned: {why}")
    for name, found in errors.items():
        if found:
            found.sort()
            print(f"{name}: {len(found)} figures, "
                  f"median error {100 * found[len(found) // 2]:.1f} %, "
                  f"mean {100 * sum(found) / len(found):.1f} %, worst {100 * found[-1]:.1f} %")
    print(f"planned to fit, and ran out: {', '.join(broken) or 'none'}")
