"""A plan as text: one screen for a terminal.

    print(text(plan("llama-2-7b", gpu="24GiB")))

Standard library only: this file also runs in a browser.
"""
from .memory import GiB

CHAPTER_OF = {"weights": "memory", "moments": "memory", "gradients": "memory",
              "weight casts": "precision", "activations": "memory", "logits": "memory",
              "KV cache": "memory", "temporaries": "memory"}
RECIPE_NAMES = {"bf16": "pure bf16", "autocast": "bf16 autocast over fp32", "fp32": "fp32",
                "mixed": "mixed precision, bf16 gradients",
                "megatron": "mixed precision, fp32 gradients",
                "fsdp": "fp32 shards, bf16 products"}


def size(nbytes):
    return f"{nbytes / GiB:.2f} GiB"


def describe(model, job):
    """The job in one line."""
    what = [job.method + (f" rank {job.rank} on {job.targets}" if job.is_lora else "")]
    if job.training:
        what += [RECIPE_NAMES[job.recipe], job.optimizer]
        what.append(f"{job.batch} x {job.sequence} tokens"
                    + (f", {job.accumulate} micro-batches" if job.accumulate > 1 else ""))
        what += ["checkpointing"] * job.checkpointing
        what += [f"{job.loss} loss"] * (job.loss != "plain")
        what += ["updates in backward"] * job.in_backward + ["varied lengths"] * job.varied
        what += ["packed documents"] * job.packing
        what += ["whole gradients"] * job.whole_gradients
    else:
        what.append(f"{job.batch} x ({job.sequence} + {job.new_tokens}) tokens")
        what += [f"{job.weight_bits:g}-bit weights"] * (job.weight_bits != 16)
        what += [f"{job.kv_bits:g}-bit cache"] * (job.kv_bits != 16)
    what.append(f"{job.attention} attention")
    if job.gpus > 1:
        split = [f"{name} {n}" for name, n in (
            ("data", job.data), ("tensor", job.tensor), ("pipeline", job.pipeline),
            ("context", job.context), ("expert", job.expert), ("shard", job.shard)) if n > 1]
        what.append(f"{job.gpus} GPUs ({', '.join(split)})")
    what += [f"{job.offload} on the CPU"] * (job.offload != "none")
    return ", ".join(what)


def formula(kind, plan):
    """Where a component's bytes come from, in a few words."""
    m, job = plan.model, plan.job
    n = f"{m.parameters:,}"
    if kind == "weights":
        if job.method == "qlora":
            bits, rest = "4.5" if job.single_quant else "4.13", "fp32" if job.upcast else "16 bits"
            return f"NF4 layers ({bits} bits), the rest in {rest}, adapters"
        if job.is_lora:
            return f"{n} x 2 B, adapters"
        return f"{n} parameters x {weight_each(job)}"
    if kind == "moments":
        from .planner import RECIPES
        each = job.adapter_bytes if job.is_lora else RECIPES[job.recipe][3]
        kept = {"adamw": f"2 x {each} B", "adamw-fused": f"2 x {each} B", "adamw-8bit": "2 x 1 B",
                "sgd-momentum": f"{each} B", "adafactor": "rows and columns"}.get(job.optimizer, "")
        master = " + 4 B of master" if job.recipe in ("mixed", "megatron") and not job.is_lora \
            else ""
        shards = f", over {job.data} GPUs" if job.shard else ""
        return f"{kept}{master} a trained parameter{shards}"
    if kind == "gradients":
        each = job.adapter_bytes if job.is_lora else job.gradient_bytes
        if job.whole_gradients:
            return "whole until the last micro-batch" + " and of frozen weights" * job.flat_lora
        if job.flat_lora:
            return f"{job.weight_bytes} B a weight beside adapters, over {job.data} GPUs"
        if job.in_backward:
            return "one at a time"
        shards = f", over {job.data} GPUs" if job.shard > 1 else ""
        return f"{each} B a trained parameter{shards}"
    if kind == "activations":
        if job.checkpointing:
            return f"{job.local_layers(m)} layer inputs and one layer's tensors"
        layers = job.local_layers(m)
        each = size(plan.peak.parts["activations"] / layers)
        return f"what {layers} layers save for backward, {each} each"
    if kind == "logits":
        tokens = job.batch * job.local_sequence
        if not job.training and not job.all_logits:
            tokens = job.batch
        return f"{tokens:,} tokens x {m.vocab // job.tensor:,} words"
    if kind == "KV cache":
        each = m.kv_elements_per_layer(job.tensor) * m.layers * job.kv_bits / 8
        return f"{each:,.0f} B a token"
    return {"weight casts": "16-bit copies of fp32 weights",
            "temporaries": "alive within one operation" if plan.peak.name != "step"
            else "foreach's square roots of the second moments",
            "gathered": "this layer, the next one, embedding and head"
            if job.sharded or job.offload == "parameters" else "tokens of all tensor ranks",
            "communication": "buckets on their way between GPUs",
            "workspaces": "cuBLAS"}[kind]


def weight_each(job):
    if not job.training and job.weight_bits != 16:
        return f"{job.weight_bits:g} bits in the layers"
    from .planner import RECIPES
    each = RECIPES[job.recipe][0] if job.training else (4 if job.recipe == "fp32" else 2)
    return f"{each} B" + (f" / {job.data} GPUs" if job.shard == 3 else "")


def bars(plan, width=34):
    """One line a moment: name, bytes, a bar; the peak is named, the device's size marked."""
    top = max(plan.allocated, plan.device.bytes if plan.device else 0)
    lines = []
    for m in plan.moments:
        filled = round(width * m.total / top)
        bar = "█" * filled + "·" * (width - filled)
        if plan.device:
            mark = min(width - 1, round(width * plan.device.bytes / top))
            bar = bar[:mark] + "|" + bar[mark + 1:]
        note = f"  peak, {m.where}" if m is plan.peak else ""
        lines.append(f"  {m.name:<9}{size(m.total):>13}  {bar}{note}")
    return lines


def verdict(plan):
    if plan.device is None:
        return f"Needs {size(plan.on_device[0])} to {size(plan.on_device[1])} of a GPU."
    head = f"{plan.device.name} ({size(plan.device.bytes)}): {plan.verdict}"
    if plan.verdict == "does not fit":
        return f"{head}, {size(-plan.margin)} too little."
    return f"{head}, {size(plan.margin)} to spare at the peak."


def text(plan):
    """The whole answer."""
    m, job = plan.model, plan.job
    lines = [f"{m.name}: {m.parameters:,} parameters", f"  {describe(m, job)}"]
    lines += [f"  guessed: {note}" for note in plan.notes]
    lines += [verdict(plan), ""] + bars(plan) + ["", f"At the peak ({plan.peak.name}):"]
    for kind, nbytes in sorted(plan.peak.parts.items(), key=lambda p: -p[1]):
        if nbytes:
            chapter = f"  [{CHAPTER_OF[kind]}]" if kind in CHAPTER_OF else ""
            lines.append(f"  {kind:<13}{size(nbytes):>21}  {formula(kind, plan)}{chapter}")
    for name, (low, high), what in (
            ("allocated", (plan.allocated,) * 2, "what tensors hold"),
            ("reserved", plan.reserved, "with the allocator's cache"),
            ("on the device", plan.on_device, "with CUDA's context and libraries")):
        both = size(low) if low == high else f"{low / GiB:.2f} to {size(high)}"
        lines.append(f"  {name:<13}{both:>21}  {what}")
    if job.paged and plan.device:
        lines.append(f"  room for {plan.tokens:,} tokens in pages of {job.share:.0%} of the GPU")
    if plan.device and plan.verdict != "fits":
        lines += ["", "What would make it fit, cheapest first (each planned again):"]
        lines += [f"  {c}" for c in plan.advice] or ["  nothing known here"]
    return "\n".join(lines)
