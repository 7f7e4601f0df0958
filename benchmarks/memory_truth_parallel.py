"""The rows of memory_truth.py that need two GPUs: DDP and FSDP2.

Same moments and outcomes; the figures are rank 0's. FSDP2 wraps each layer and the root.
Recipe "fsdp" keeps fp32 shards and gathers them in bf16. Every second row is held out. Runs
without GPUs, at toy sizes, with ``--device cpu --tiny``.

PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/memory_truth_parallel.py
"""
import argparse
import gc
import logging
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import memory_truth
from companion import pick_device
from companion.memory import GiB
from memory_truth import MODELS, definition, measure, setting, tiny
from provenance import RESULTS, save

# model, layers, recipe, checkpointing, batch x sequence, ZeRO stage (3: FSDP2, 0: DDP), optimizer
_TABLE = """
llama-2-7b    3 bf16     -    2x1024 0 adamw
llama-2-7b    4 bf16     -    4x1024 0 adamw
llama-3.2-1b  8 bf16     ckpt 4x2048 0 adamw-fused
llama-3.2-1b  8 autocast -    2x1024 0 adamw-fused
llama-2-7b    4 bf16     -    2x1024 3 adamw
llama-2-7b    6 bf16     ckpt 4x2048 3 adamw
llama-2-7b    6 fsdp     ckpt 2x2048 3 adamw-fused
llama-3.2-1b 16 fsdp     ckpt 4x2048 3 adamw-fused
llama-3.2-1b 16 fsdp     -    2x1024 3 adamw
llama-2-7b    8 fsdp     ckpt 1x1024 3 adamw
qwen2.5-0.5b 24 bf16     ckpt 4x1024 3 adamw
qwen2.5-0.5b 24 fsdp     -    2x1024 3 adamw-fused
"""


def rows():
    found = []
    for number, line in enumerate(filter(None, _TABLE.splitlines()), 1):
        model, layers, recipe, checkpointing, size, shard, optimizer = line.split()
        batch, sequence = map(int, size.split("x"))
        found.append({
            "id": f"parallel-{number:02d}", "held_out": number % 2 == 0, "group": "parallel",
            "model": model, "method": "full", "recipe": recipe, "attention": "sdpa",
            "checkpointing": checkpointing == "ckpt", "batch": batch, "sequence": sequence,
            "optimizer": optimizer, "gpus": 2, "shard": int(shard),
            "config": {**MODELS[model], "num_hidden_layers": int(layers)}})
    return found


def split(model, row, device):
    """The model over all processes."""
    if row["shard"] == 0:
        whole = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None)
        whole.get_output_embeddings = model.get_output_embeddings
        return whole
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = {}
    if row["recipe"] == "fsdp":
        policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    return fully_shard(model, **policy)


def settle(device):
    """Let go of the row before: NCCL's watchdog keeps a finished collective's buffers a while."""
    gc.collect()
    small = torch.zeros(1, device=device)
    for _ in range(2):
        dist.all_reduce(small)
        if device.type == "cuda":
            torch.cuda.synchronize()
        time.sleep(0.3)
        gc.collect()
    del small
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    o = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    device = torch.device(o.device) if o.device else pick_device()
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                            timeout=timedelta(seconds=60))
    build = memory_truth.build

    def build_split(row, device):
        stored = "fp32" if row["recipe"] == "fsdp" else row["recipe"]
        model = split(build({**row, "recipe": stored}, device), row, device)
        gc.collect()
        return model

    memory_truth.build = build_split
    results = {**setting(device), "rows": []}
    for row in rows():
        row = {**row, "definition": definition(row)}
        settle(device)
        done = measure(tiny(row) if o.tiny else row, device)
        results["rows"].append(done)
        if rank == 0:
            print(f"{row['id']} {row['model']} {row['recipe']} stage {row['shard']}: "
                  f"{done['outcome']}, {done['peak_allocated'] / GiB:.2f} GiB allocated, "
                  f"{done['peak_reserved'] / GiB:.2f} reserved, "
                  f"{done['moments'][0].get('allocated', 0):,} B before, {done['seconds']} s",
                  flush=True)
            save("memory_truth_parallel", __file__, results, o.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
