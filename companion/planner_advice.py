"""What would make a plan fit: changes in the order of what they cost, each planned again.

    for change in plan("llama-2-7b", gpu="24GiB").advice:
        print(change)

Standard library only: this file also runs in a browser.
"""
from dataclasses import dataclass

from .memory import GiB


@dataclass(frozen=True)
class Change:
    """One or more options that differ, what that costs, and the plan that results."""
    what: str
    cost: str
    options: tuple
    plan: object

    def __str__(self):
        p = self.plan
        return f"{self.what}: {p.allocated / GiB:.2f} GiB, {p.verdict}; {self.cost}"

    def as_dict(self):
        return {"what": self.what, "cost": self.cost, "options": dict(self.options),
                "allocated": self.plan.allocated, "verdict": self.plan.verdict}


def training_changes(model, job):
    """(what, cost, options) for training, cheapest first."""
    if job.attention == "eager":
        yield "fused attention", "faster", {"attention": "sdpa"}
    if job.packing and job.attention != "flash" and job.recipe != "fp32":
        yield "FlashAttention, which takes no mask", "faster", {"attention": "flash"}
    if job.optimizer == "adamw":
        yield "fused AdamW", "no slower", {"optimizer": "adamw-fused"}
    if job.loss == "plain":
        yield "loss in chunks", "a few percent of time", {"loss": "chunked"}
    if job.batch > 1:
        yield (f"micro-batches of 1, {job.batch * job.accumulate} accumulated",
               "smaller products, the same update",
               {"batch": 1, "accumulate": job.batch * job.accumulate})
    if not job.checkpointing:
        yield "checkpointing", "about a third more compute", {"checkpointing": True}
    if job.optimizer.startswith("adamw") and job.optimizer != "adamw-8bit":
        yield "8-bit AdamW", "coarser moments", {"optimizer": "adamw-8bit"}
    if job.recipe != "bf16" and job.method == "full":
        yield "pure bf16", "small updates are lost in rounding", {"recipe": "bf16"}
    if job.shard and job.shard < 3:
        yield "shard stage 3", "half again as much communication", {"shard": 3}
    if job.gpus == 1 and job.offload == "none" and job.method == "full":
        yield ("optimizer on the CPU", "gradients and weights cross PCIe each step",
               {"offload": "optimizer"})
    if job.method == "full":
        yield "LoRA", "trains adapters only", {"method": "lora"}
    if job.method in ("full", "lora"):
        yield "QLoRA", "adapters only, and weights unpacked again and again", {"method": "qlora"}


def sharding_changes(model, job):
    if job.tensor == job.pipeline == job.context == 1:
        for gpus in (2, 4, 8, 16, 32, 64, 128, 256):
            if gpus > job.gpus:
                yield (f"{gpus} GPUs, all states sharded", "communication in every layer",
                       {"gpus": gpus, "shard": 3})


def inference_changes(model, job):
    """(what, cost, options) for inference, cheapest first."""
    if job.attention == "eager":
        yield "fused attention", "faster", {"attention": "sdpa"}
    if job.all_logits:
        yield "logits of the last position only", "less work", {"all_logits": False}
    if job.kv_bits > 8:
        yield "8-bit cache", "some accuracy at long context", {"kv_bits": 8.5}
    for bits, cost in ((8, "little accuracy"), (4, "some accuracy")):
        if job.weight_bits > bits:
            yield f"{bits}-bit weights", cost, {"weight_bits": bits}
    for batch in _halves(job.batch):
        yield f"{batch} at a time", "less throughput", {"batch": batch}
    for tensor in (2, 4, 8):
        if tensor > job.tensor and job.gpus == job.tensor and model.heads % tensor == 0:
            yield (f"tensor parallel {tensor}", "two all-reduces a layer",
                   {"gpus": tensor, "tensor": tensor})


def _halves(n):
    """n // 2, n // 4 ... 1."""
    while n > 1:
        n //= 2
        yield n


def _try(plan, options):
    from .planner import changed, make_plan
    try:
        job = changed(plan.job, **options)
        if job not in plan.tried:
            plan.tried[job] = make_plan(plan.model, job, plan.device)
        return plan.tried[job]
    except ValueError:
        return None  # does not go together with the rest of the job


def advise(plan, most=6):
    """Changes after which it fits, cheapest first; a combination where no single one does."""
    if plan.device is None or plan.verdict == "fits":
        return []
    changes = list((training_changes if plan.job.training else inference_changes)(
        plan.model, plan.job))
    found, kinds = [], set()
    for what, cost, options in changes:
        kind = tuple(options)  # of several values of one option, the first that suffices
        new = None if kind in kinds and not plan.job.training else _try(plan, options)
        if new and new.verdict == "fits":
            kinds.add(kind)
            found.append(Change(what, cost, tuple(options.items()), new))
    same_method = [c for c in changes if "method" not in c[2]]
    for few in (same_method, [c for c in same_method if "batch" not in c[2]]):
        together = _combine(plan, few)
        if together and not any(set(c.options) <= set(together.options) for c in found):
            found.append(together)
    for method, name in (("lora", "LoRA"), ("qlora", "QLoRA")):
        known = plan.job.method in (method, "qlora", "inference") or any(
            ("method", method) in c.options for c in found)
        start = None if known else _try(plan, {"method": method})
        more = start and _first(start, list(training_changes(plan.model, start.job)))
        if more:
            found.append(Change(f"{name}, {more.what}", more.cost,
                                (("method", method), *more.options), more.plan))
            break
    if plan.job.training:
        for what, cost, options in sharding_changes(plan.model, plan.job):
            new = _try(plan, options)
            if new and new.verdict == "fits":
                found.append(Change(what, cost, tuple(options.items()), new))
                break
    return found[:most]


def _first(plan, changes):
    """The cheapest change that suffices, or else the cheapest combination."""
    for what, cost, options in changes:
        new = _try(plan, options)
        if "method" not in options and new and new.verdict == "fits":
            return Change(what, cost, tuple(options.items()), new)
    return _combine(plan, changes)


def _combine(plan, changes):
    """Changes added one by one, those that do not lower the peak left out, until it fits."""
    taken, options, best = [], {}, plan
    for what, cost, more in changes:
        if "method" in more:
            continue
        new = _try(plan, {**options, **more})
        if new is None or new.allocated >= best.allocated:
            continue
        taken.append((what, cost))
        options.update(more)
        best = new
        if best.verdict == "fits":
            taken, options, best = _without_the_needless(plan, changes, taken, options, best)
            return Change(" + ".join(w for w, _ in taken), "; ".join(c for _, c in taken),
                          tuple(options.items()), best)
    return None


def _without_the_needless(plan, changes, taken, options, best):
    """Drop each change without which it fits as well, dearest first."""
    by_name = {what: more for what, _, more in changes}
    for item in reversed(list(taken)):
        fewer = {}
        for what, _ in taken:
            if what != item[0]:
                fewer.update(by_name[what])
        new = _try(plan, fewer)
        if fewer and new and new.verdict == "fits":
            taken, options, best = [t for t in taken if t[0] != item[0]], fewer, new
    return taken, options, best
