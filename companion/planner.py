"""Will it fit, and if not, what would make it fit?

    from companion import plan
    print(plan("llama-2-7b", method="full", gpu="24GiB"))
    plan("qwen2.5-7b", method="lora", checkpointing=True, batch=4, gpu="h100").verdict

A step is walked through operation by operation (``companion.planner_steps``), with the
lifetimes it has in PyTorch, so the peak is a maximum over moments and not a sum of parts.
Three figures are kept apart: what tensors need (allocated), what PyTorch's allocator takes
from the device for it (reserved, a band), and what the driver counts (context and
communication on top). Sizes are bytes; GB is 1e9 of them, GiB 2**30.

Standard library only: this file also runs in a browser.
"""
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property

from . import hardware
from .memory import GB, GiB, KiB, MB, MiB
from .planner_models import Model, find_model, from_config, from_parameters
from .planner_steps import (WORKSPACE, Moment, count_parameters, inference_cache,
                            inference_moments, packed_bytes, training_cache, training_moments)

METHODS = ("full", "lora", "qlora", "inference")
# recipe: bytes a parameter of stored weights, gradients, fp32 master copy, one moment of Adam
RECIPES = {
    "bf16": (2, 2, 0, 2),        # everything in 16 bits
    "autocast": (4, 4, 0, 4),    # fp32 weights; products in 16 bits
    "fp32": (4, 4, 0, 4),
    "mixed": (2, 2, 4, 4),       # 16-bit weights and gradients, fp32 master (DeepSpeed)
    "megatron": (2, 4, 4, 4),    # the same with fp32 gradients
    "fsdp": (4, 4, 0, 4),        # fp32 shards, gathered in 16 bits (FSDP's mixed precision)
}
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "sgd", "sgd-momentum", "adafactor")
TARGETS = {"qv": ("q", "v"), "qkvo": ("q", "k", "v", "o"),
           "all": ("q", "k", "v", "o", "gate", "up", "down")}
LARGEST = {"batch": 2**20, "sequence": 2**24, "gpus": 2**20, "rank": 2**16}


@dataclass(frozen=True)
class Job:
    """What runs, and how. Every field is an option of ``plan`` and of the command."""
    method: str = "full"            # full, lora, qlora, inference
    recipe: str = "bf16"            # how numbers are stored: a key of RECIPES
    optimizer: str = "adamw"        # adamw means torch's foreach; see OPTIMIZERS
    batch: int = 1                  # sequences in a micro-batch on one GPU
    sequence: int = 2048            # tokens in each; of the prompt, in inference
    accumulate: int = 1             # micro-batches in a step
    in_backward: bool = False       # each gradient is applied as it comes, and freed
    varied: bool = False            # sequences of all lengths up to ``sequence``
    packing: bool = field(default=False, metadata={
        "help": "sequences are full of documents that do not see each other"})
    checkpointing: bool = False     # keep only each layer's input
    attention: str = "sdpa"         # eager, sdpa or flash
    loss: str = "plain"             # plain, narrow (in the logits' own type), fused or chunked
    kernels: str = "eager"          # eager: as Hugging Face writes it; fused norms, rope, MLP
    rank: int = 16                  # of LoRA
    targets: str = "qkvo"           # of LoRA: qv, qkvo or all
    adapters: str = "fp32"          # LoRA's own weights: fp32 or bf16
    dropout: float = 0.0            # of LoRA's input
    upcast: bool = False            # QLoRA: norms, embedding and head to fp32, as peft prepares
    single_quant: bool = False      # QLoRA: scales of 64 weights in fp32, not quantized again
    hold_inputs: bool = False       # QLoRA: bitsandbytes to 0.41 keeps inputs that it never uses
    gpus: int = 1
    tensor: int = 1                 # tensor parallel
    pipeline: int = 1               # pipeline stages
    context: int = 1                # context parallel
    expert: int = 1                 # expert parallel
    tensor_only: bool = False       # tensor without sequence parallel: norms see all tokens
    shard: int = 0                  # ZeRO stage over the data parallel GPUs; FSDP is 3
    flat: bool = False              # FSDP1: one parameter a layer, whose gradient is of all of it
    no_sync: bool = False           # FSDP: whole gradients until the last micro-batch
    offload: str = "none"           # to the CPU: optimizer (and gradients), or parameters too
    new_tokens: int = 0             # inference: tokens generated after the prompt
    weight_bits: float = 16         # inference: bits a weight of the layers
    kv_bits: float = 16             # inference: bits an element of the cache
    paged: bool = False             # inference: an engine with a paged cache, as vLLM
    share: float = 0.9              # of the GPU that such an engine may take
    all_logits: bool = False        # inference: logits of the whole prompt, not of its end

    def __post_init__(self):
        _check_job(self)

    @property
    def data(self):
        """Data parallel GPUs."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def training(self):
        return self.method != "inference"

    @property
    def autocast(self):
        return self.recipe == "autocast"

    @property
    def is_lora(self):
        return self.method in ("lora", "qlora")

    @property
    def weight_bytes(self):
        """Bytes of a weight as products see it, without autocast's copies."""
        if self.is_lora:
            return 2
        return 4 if self.recipe in ("autocast", "fp32") else 2

    @property
    def gradient_bytes(self):
        """Bytes of an element of a kept gradient of the model's own weights."""
        return RECIPES[self.recipe][1] if self.offload == "none" else 0

    @property
    def adapter_bytes(self):
        return 2 if self.adapters == "bf16" else 4

    @property
    def mask_bytes(self):
        """Bytes of an element of the mask that eager attention adds."""
        return self.weight_bytes

    @property
    def adapted(self):
        return TARGETS[self.targets] if self.is_lora else ()

    @property
    def moments_kept(self):
        """Tensors of a parameter's size that the optimizer keeps."""
        return {"adamw": 2, "adamw-fused": 2, "sgd-momentum": 1}.get(self.optimizer, 0)

    @property
    def gradients_stay(self):
        """Whether gradients exist before a backward pass: of earlier ones, or as one buffer."""
        return self.accumulate > 1 or self.recipe == "megatron"

    @property
    def whole_gradients(self):
        """Whether FSDP keeps unsharded gradients from one micro-batch to the next.

        Under ``no_sync`` nothing is reduced before the last micro-batch, so the sum waits in
        full size. Trainers that accumulate with Accelerate or Fabric do this by default.
        """
        return self.sharded and self.no_sync and self.accumulate > 1

    @property
    def flat_lora(self):
        """Whether frozen weights have gradients too: those beside adapters in FSDP1's units.

        A unit's weights are views of one flat parameter. Autograd makes one gradient for it,
        with zeros for what is frozen. Source: the documentation of FSDP's use_orig_params.
        """
        return self.flat and self.sharded and self.is_lora

    @property
    def is_ddp(self):
        """Whether gradients are summed by PyTorch's DDP, in buckets beside them."""
        return self.training and self.data > 1 and not self.shard and self.is_torch

    @property
    def is_torch(self):
        """Whether PyTorch alone keeps all states on the GPU, without DeepSpeed or Megatron."""
        return self.offload == "none" and self.recipe not in ("mixed", "megatron")

    @property
    def simulated(self):
        """Whether the allocator is simulated: one GPU, or DDP or FSDP2 and nothing else."""
        if self.gpus == 1:
            return True
        return self.method in ("full", "lora") and self.data == self.gpus \
            and self.expert == 1 and self.shard in (0, 3) and self.is_torch \
            and not self.flat and not self.no_sync

    @property
    def sharded(self):
        """Whether weights are gathered from all ranks, layer by layer: FSDP, ZeRO stage 3."""
        return self.shard == 3 and self.training

    @property
    def stored(self):
        """Bytes of a weight, a gradient, a master copy and a moment: a value of RECIPES."""
        return RECIPES[self.recipe]

    @property
    def gradient_shards(self):
        return self.data if self.shard >= 2 else 1

    @property
    def local_sequence(self):
        return -(-self.sequence // self.context)

    def local_layers(self, model):
        return -(-model.layers // self.pipeline)

    def adapter_parameters(self, model, layers):
        """Of ``layers`` layers, on one GPU: LoRA's pairs on the targets."""
        return adapter_parameters(model, self.rank, self.targets, self.tensor,
                                  self.tensor_only) * layers // model.layers


@cache
def adapter_parameters(model, rank, targets, tensor, tensor_only):
    """Of all layers, on one of ``tensor`` ranks, as the walk through the model meets them."""
    return count_parameters(model, Job(method="lora", rank=rank, targets=targets, sequence=1,
                                       gpus=tensor, tensor=tensor, tensor_only=tensor_only))[1]


def _check_job(job):
    """Raise ValueError for values that are impossible by themselves."""
    for f in fields(job):
        value = getattr(job, f.name)
        if f.type in ("int", int):
            low = 0 if f.name in ("shard", "new_tokens") else 1
            high = LARGEST.get(f.name, 2**24)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{f.name} must be a whole number from {low} to {high}, "
                                 f"got {value!r}")
    choices = {"method": METHODS, "recipe": RECIPES, "optimizer": OPTIMIZERS,
               "attention": ("eager", "sdpa", "flash"),
               "loss": ("plain", "narrow", "fused", "chunked"),
               "kernels": ("eager", "fused"), "targets": TARGETS, "adapters": ("fp32", "bf16"),
               "offload": ("none", "optimizer", "parameters"), "shard": (0, 1, 2, 3)}
    for name, known in choices.items():
        if getattr(job, name) not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, "
                             f"got {getattr(job, name)!r}")
    for name, low, high in (("weight_bits", 1, 32), ("kv_bits", 1, 32), ("share", 0.05, 1),
                            ("dropout", 0, 0.99)):
        value = getattr(job, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {value!r}")
    split = job.tensor * job.pipeline * job.context
    if job.gpus % split:
        raise ValueError(f"{job.gpus} GPUs cannot be split into tensor {job.tensor} x pipeline "
                         f"{job.pipeline} x context {job.context}")
    if job.shard and job.data == 1 and job.training:
        raise ValueError(f"shard {job.shard} needs more than one data parallel GPU; "
                         "one process shards nothing")
    if job.in_backward and (job.accumulate > 1 or job.recipe not in ("bf16", "fp32", "autocast")):
        raise ValueError("in_backward frees each gradient, so no micro-batch can add to it and no "
                         "buffer can hold it")
    if job.training and (job.new_tokens or job.paged):
        raise ValueError("new tokens and pages belong to inference")
    if job.packing and not job.training:
        raise ValueError("packing belongs to training; an engine's pages need none")
    if job.packing and job.varied:
        raise ValueError("packing fills every sequence to the same length, so lengths are not "
                         "varied: choose one of the two")
    if not job.training and (job.shard or job.checkpointing or job.accumulate > 1):
        raise ValueError("inference knows no shard stage, checkpointing or accumulation")


def _check_together(model, job):
    """Raise ValueError where the model and the job contradict each other."""
    if model.heads % job.tensor:
        raise ValueError(f"{model.name}'s {model.heads} heads cannot be split over tensor "
                         f"parallel {job.tensor}")
    if model.kv_heads % job.tensor and job.tensor % model.kv_heads:
        raise ValueError(f"{model.name}'s {model.kv_heads} key/value heads neither divide nor are "
                         f"divided by tensor parallel {job.tensor}")
    if job.pipeline > model.layers:
        raise ValueError(f"{job.pipeline} pipeline stages, but {model.name} has {model.layers} "
                         "layers")
    experts = model.experts.count if model.experts else 0
    if job.expert > 1 and (not experts or experts % job.expert):
        raise ValueError(f"{model.name}'s {experts} experts cannot be split over expert parallel "
                         f"{job.expert}")
    if model.positions and job.sequence + job.new_tokens > model.positions:
        raise ValueError(f"{model.name} has {model.positions} positions, but the sequence has "
                         f"{job.sequence + job.new_tokens}")


# --- sizes and devices ------------------------------------------------------------------------

_UNITS = {"b": 1, "kb": 10**3, "mb": MB, "gb": GB, "tb": 10**12,
          "kib": KiB, "mib": MiB, "gib": GiB, "tib": 2**40}


def parse_size(text):
    """``"24GiB"`` or ``"80 GB"`` in bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", str(text).lower())
    if not match or match[2] == "ib":
        raise ValueError(f"a size needs a number and a unit such as 24GiB or 80GB, got {text!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def format_size(nbytes, unit="GiB"):
    """Bytes with their unit: ``format_size(2**31)`` -> ``"2.00 GiB"``."""
    return f"{nbytes / _UNITS[unit.lower()]:.2f} {unit}"


@dataclass(frozen=True)
class Device:
    """A GPU's name and the bytes that a process can get of it."""
    name: str
    bytes: int


# Of the memory that nvidia-smi reports, CUDA offers 0.4 % (H200, B200) to 2.8 % (T4) less.
_OFFERED = 0.99


def find_device(text):
    """A GPU by name (``companion.hardware``) or by size. Raises ValueError if it is neither."""
    if text is None:
        return None
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        text = f"{text}GB"
    if re.match(r"\s*-?\d[\d.]*\s*[a-zA-Z]*\s*$", str(text)) and not re.fullmatch(
            r"\s*(3090|4090)\s*", str(text)):
        size = parse_size(text)
        if not 2**28 <= size <= 2**45:
            raise ValueError(f"a GPU of {text} is not one: from 0.25 GiB to 32 TiB")
        return Device(str(text).strip(), size)
    row = hardware.gpu(text)
    return Device(row.name, int(row.memory_bytes * _OFFERED))


def find(model):
    """A Model from a Model, a name, the path of a config.json, a dictionary or a count.

    Counts are numbers or text such as ``"7B"``. Raises ValueError.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, dict):
        return from_config(model)
    if isinstance(model, (int, float)) and not isinstance(model, bool):
        return from_parameters(model)
    text = str(model)
    if text.endswith(".json"):
        return from_config(text)
    count = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([bm])", text.lower())
    if count:
        return from_parameters(float(count[1]) * (1e9 if count[2] == "b" else 1e6))
    return find_model(text)


# --- what exists all along --------------------------------------------------------------------

def local_parameters(model, job, stage=None):
    """Parameters on one GPU, unsharded: of a pipeline, on its first or last stage."""
    count = job.local_layers(model)
    if stage is None:
        layers, outer = model.parameters - model.outer_parameters, model.outer_parameters
    else:
        numbers = range(count) if stage == "first" else range(model.layers - count, model.layers)
        layers = sum(model.layer_parameters(i) for i in numbers)
        outer = model.table + (model.positions * model.hidden if stage == "first" else model.hidden)
    if model.experts and job.expert > 1:
        each = 3 * model.hidden * model.experts.ffn * model.experts.count
        dense = 0 if stage == "last" else model.experts.dense_layers
        sparse = max(0, (model.layers if stage is None else count) - dense)
        layers -= each * sparse * (job.expert - 1) // job.expert
    return (layers + outer) // job.tensor


def state_bytes(model, job, stage=None):
    """{component: bytes} on one GPU, from the first step to the last.

    Weights, the master copy and the moments of the optimizer; gradients come and go.
    """
    share = local_parameters(model, job, stage)
    sharded = {k: job.data if job.shard >= stage else 1
               for k, stage in (("moments", 1), ("gradients", 2), ("weights", 3))}
    if not job.training:
        return {"weights": inference_weights(model, job, share)}
    weight, _, master, moment = RECIPES[job.recipe]
    if job.is_lora:
        pairs = job.adapter_parameters(model, job.local_layers(model))
        base = share * 2
        if job.method == "qlora":
            inner = min(share, model.quantizable // (job.tensor * job.pipeline))
            base = packed_bytes(job, inner) + (share - inner) * (4 if job.upcast else 2)
        states = {"weights": base // sharded["weights"] + pairs * job.adapter_bytes,
                  "moments": _moments(pairs, job.adapter_bytes, job.optimizer, model)}
        states["moments"] //= sharded["moments"]
    else:
        states = {"weights": share * weight // sharded["weights"],
                  "moments": (_moments(share, moment, job.optimizer, model) + share * master)
                  // sharded["moments"]}
    if job.offload != "none":
        states["moments"] = 0
        if job.offload == "parameters":
            states["weights"] = 0
    if job.gradients_stay:
        shards = 1 if job.whole_gradients else sharded["gradients"]
        states["gradients"] = gradient_bytes(model, job, stage) // shards
    return states


def _moments(n, each, optimizer, model):
    """Bytes of the optimizer's state for n parameters, a moment of ``each`` bytes."""
    if optimizer == "sgd":
        return 0
    if optimizer == "sgd-momentum":
        return n * each
    if optimizer == "adamw-8bit":  # two codes, and an fp32 scale for each 256 (bitsandbytes)
        return 2 * (n + 4 * n // 256)
    if optimizer == "adafactor":   # a row and a column of each matrix
        return int(n * 4 * (1 / model.hidden + 1 / model.ffn))
    return 2 * n * each


def gradient_bytes(model, job, stage=None):
    """Bytes of all gradients on one GPU, unsharded."""
    if job.is_lora:
        pairs = job.adapter_parameters(model, job.local_layers(model))
        if job.flat_lora:
            layers = model.parameters - model.outer_parameters
            return (layers // (job.pipeline * job.tensor) + pairs) * job.weight_bytes
        return pairs * job.adapter_bytes
    return local_parameters(model, job, stage) * job.gradient_bytes


def inference_weights(model, job, share):
    """Bytes of the weights: layers at ``weight_bits``, embedding and head in 16 bits."""
    wide = 4 if job.recipe == "fp32" else 2
    if job.weight_bits == 16:
        return share * wide
    inner = model.quantizable // (job.tensor * job.pipeline)
    scales = 0.127 if job.weight_bits == 4 else 0.0  # NF4: doubly quantized scales of 64
    return int(inner * (job.weight_bits + scales) / 8) + (share - inner) * wide


def step_bytes(job, model, gradients):
    """Bytes that the optimizer allocates within its step, and frees."""
    if job.offload != "none" or job.in_backward:
        return 0
    n = gradients // (job.adapter_bytes if job.is_lora else job.gradient_bytes)
    if job.flat_lora:
        n = job.adapter_parameters(model, job.local_layers(model)) // job.gradient_shards
    each = job.adapter_bytes if job.is_lora else RECIPES[job.recipe][3]
    if job.recipe in ("mixed", "megatron") and not job.is_lora:
        return 0
    # foreach AdamW keeps the square roots of all second moments at once
    return n * each if job.optimizer == "adamw" else 0


# --- what parallelism adds --------------------------------------------------------------------

def communication_bytes(model, job):
    """{component: bytes} of gathered weights and buckets that exist all through a step."""
    if not job.training:
        return {}
    gathered = 0
    if job.tensor > 1 and not job.tensor_only:
        # with sequence parallel, ranks gather the tokens in front of a product
        gathered = job.batch * job.local_sequence * model.hidden * min(2, job.weight_bytes)
    if job.offload == "parameters" and not job.sharded:  # embedding, last norm and head stay
        gathered += model.outer_parameters // job.tensor * job.weight_bytes
    return {"gathered": gathered, "communication": _buckets(model, job)}


def _buckets(model, job):
    """Bytes of what gradients are summed up in over data parallel GPUs."""
    if job.data == 1 or job.sharded or job.offload == "parameters":
        return 0  # the walk reduces sharded gradients layer by layer
    if job.recipe == "megatron":  # gradients are one buffer, reduced where it is
        return 0
    if job.shard:  # buckets of 500 million elements or all there is (DeepSpeed)
        return min(int(5e8), model.parameters) * 2
    return gradient_bytes(model, job)  # DDP: a copy of the gradients


# --- the plan ---------------------------------------------------------------------------------

CONTEXT = (619 * MiB, 800 * MiB)  # CUDA's context bare, and with kernels loaded (on an H200)
NCCL = (0.3 * GiB, 1.5 * GiB)     # channels and buffers of communicators
# The allocator is simulated block by block. Its order of blocks differs a little from the real
# one: nine of ten measured rows are within this part of the simulated bytes.
BAND = 0.05
# Of several GPUs, beyond DDP and FSDP2, nothing is simulated: from nothing to the most that was
# measured on two (3 to 34 % of the tensors' bytes, rows that were not held out).
PARALLEL_CACHE = (0.0, 0.35)


@cache
def allocator_cache(model, job):
    """Bytes that the allocator keeps beyond the peak; of at most 192 layers, the rest alike."""
    model = replace(model, layers=min(model.layers, 192))
    return (training_cache if job.training else inference_cache)(model, job)


@cache
def varied_cache(model, job, parts=8):
    """The same after sequences of 1/parts, 2/parts ... of the length, each longer than before.

    No block of a shorter sequence can hold a tensor of a longer one, so in this order most is
    left over. Eight lengths leave about as much as a dozen in random order.
    """
    model = replace(model, layers=min(model.layers, 192))
    lengths = [max(1, job.sequence * i // parts) for i in range(1, parts)]
    return training_cache(model, job, lengths=lengths)


@dataclass(frozen=True)
class Plan:
    """The answer: three figures, moments, a verdict and what would change it."""
    model: Model
    job: Job
    device: Device | None
    moments: tuple = ()
    notes: tuple = field(default=())

    @cached_property
    def peak(self):
        """The fullest Moment."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def allocated(self):
        """Bytes that tensors hold at the fullest moment."""
        return self.peak.total

    @cached_property
    def reserved(self):
        """(low, high) bytes that PyTorch's allocator takes; what exceeds allocated is cache."""
        if self.job.paged:  # an engine takes what it is given, once
            return self.allocated, self.allocated
        if not self.job.simulated:
            return tuple(int(self.allocated * (1 + part)) for part in PARALLEL_CACHE)
        middle = self.allocated + allocator_cache(self.model, self.job)
        most = middle
        if self.job.varied and self.job.training:
            most = max(middle, self.allocated + varied_cache(self.model, self.job))
        return max(self.allocated, int(middle * (1 - BAND))), int(most * (1 + BAND))

    @property
    def overhead(self):
        """(low, high) bytes outside the allocator: context, libraries and communication."""
        extra = NCCL if self.job.gpus > 1 else (0, 0)
        return tuple(int(c + e) for c, e in zip(CONTEXT, extra))

    @property
    def on_device(self):
        """(low, high) bytes that the driver counts."""
        return tuple(r + o for r, o in zip(self.reserved, self.overhead))

    @cached_property
    def verdict(self):
        """fits, tight or does not fit; None without a device.

        tight: the tensors fit, but only if the allocator gives cached blocks back.
        """
        if self.device is None:
            return None
        if self.margin < 0:
            return "does not fit"
        return "fits" if self._least <= self.room and self.on_device[1] <= self.room else "tight"

    @property
    def _least(self):
        """Bytes that the upper end on the device is at least, known without the allocator."""
        band = BAND if self.job.simulated and not self.job.paged else 0
        return int(self.allocated * (1 + band)) + self.overhead[1]

    @property
    def room(self):
        """Bytes of the device that may be used: an engine keeps to its share."""
        return int(self.device.bytes * (self.job.share if self.job.paged else 1))

    @property
    def tokens(self):
        """Tokens that an engine's pages hold on this device."""
        kv = self.peak.parts["KV cache"]
        job = self.job
        each = self.model.kv_elements_per_layer(job.tensor) * job.local_layers(self.model)
        return max(0, int((self.margin + kv) // (each * job.kv_bits / 8)))

    @property
    def margin(self):
        """Bytes of the device that the peak leaves free; negative if it does not fit."""
        if self.device is None:
            return None
        return self.room - self.allocated - self.overhead[0]

    @cached_property
    def tried(self):
        """Plans of other jobs that the search for advice has made, by Job."""
        return {}

    @cached_property
    def advice(self):
        """Changes that would make it fit, cheapest first; each was planned again."""
        from .planner_advice import advise
        return advise(self)

    def as_dict(self):
        """Plain numbers and text, for ``--json``. Sizes are bytes."""
        return {
            "model": self.model.name, "parameters": self.model.parameters,
            "guessed": list(self.model.guessed),
            "job": {f.name: getattr(self.job, f.name) for f in fields(self.job)},
            "device": self.device and {"name": self.device.name, "bytes": self.device.bytes},
            "allocated": self.allocated, "reserved": list(self.reserved),
            "on_device": list(self.on_device), "verdict": self.verdict, "margin": self.margin,
            "peak": self.peak.name,
            "tokens": self.tokens if self.job.paged and self.device else None,
            "moments": [{"name": m.name, "total": m.total, "where": m.where,
                         "parts": {k: v for k, v in m.parts.items() if v}} for m in self.moments],
            "advice": [c.as_dict() for c in self.advice] if self.device else [],
            "notes": list(self.notes)}

    def __str__(self):
        from .planner_report import text
        return text(self)


def plan(model, gpu=None, **options):
    """Plan the memory of one step (or of one generation) on each GPU.

    model: a known name, the path of a Hugging Face config.json, a count such as "7B", or a
    ``planner_models.Model``; gpu: a name or a size such as "24GiB"; options: fields of Job.

    Raises ValueError, in one line, for anything unknown or contradictory.
    """
    known = {f.name for f in fields(Job)}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return make_plan(find(model), Job(**options), find_device(gpu))


def make_plan(model, job, device=None):
    """The plan of a Model, a Job and a Device or None."""
    _check_together(model, job)
    stages = ("first", "last") if job.training and job.pipeline > 1 else (None,)
    found = [_moments_of(model, job, stage) for stage in stages]
    moments = max(found, key=lambda moments: max(m.total for m in moments))
    return Plan(model, job, device, tuple(moments), tuple(model.guessed))


def _moments_of(model, job, stage):
    """Moments of one GPU, loading first."""
    states = state_bytes(model, job, stage)
    load = Moment("load", {"weights": states["weights"]}, "all weights in place")
    if not job.training:
        return [load, *inference_moments(model, job, {**states, "workspaces": WORKSPACE})]
    always = {**states, "workspaces": 2 * WORKSPACE, **communication_bytes(model, job)}
    return [load, *training_moments(model, job, always, lambda g: step_bytes(job, model, g),
                                    stage)]


def changed(job, **values):
    """The job with other values; ValueError if they do not go together."""
    return replace(job, **values)
