"""The GPUs the book talks about: one row each, every number with its unit.

    from companion import gpu
    gpu("h200").ridge("bf16")      # FLOP per byte at which its two roofs meet

How to read a row:

- Rates are *dense* peaks: a datasheet often prints the figure for 2:4 sparse
  weights, twice as large, in big type. It stands apart, in
  ``fp16_sparse_flops_per_s``.
- fp16, bf16 and fp8 rates are those with fp32 accumulation, which training
  uses. GeForce cards and the A10G then run at half their headline rate.
- Links are per *direction*. NVLink and PCIe are sold by the sum of both.
- ``memory_bytes`` is what the driver's ``nvidia-smi`` reports in total. CUDA
  offers a process a little less; the notes say how much where it was seen.
- None: the chip lacks it, or its vendor publishes no figure; never a guess.

Peaks and bandwidths come from each row's ``source``; SM counts, L2 sizes and
memory in bytes from what drivers report, for instance in
https://github.com/modal-labs/modal-client/pull/2797.

Standard library only: this file also runs in a browser.
"""
import difflib
import re
from dataclasses import dataclass, field

MIB = 2**20
FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")


def _column(label, unit="", default=...):
    """A field that carries what a generated table prints above its column."""
    extra = {} if default is ... else {"default": default}
    return field(metadata={"label": label, "unit": unit}, **extra)


def _rate(format):
    """The field that holds the dense peak of ``format``."""
    return f"{format}_ops_per_s" if format == "int8" else f"{format}_flops_per_s"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. SI units: bytes, FLOP/s, bytes/s, watts."""
    name: str = _column("GPU")
    aliases: tuple[str, ...] = _column("Also called", default=())
    architecture: str = _column("Architecture")
    year: int = _column("Announced")
    compute_capability: tuple[int, int] = _column("Compute capability")
    label_memory: str = _column("Memory on the label")
    memory_bytes: int = _column("Memory reported", "bytes")
    memory_source: str = _column("Memory reported by")
    hbm_bytes_per_s: float = _column("Memory bandwidth", "bytes/s")
    l2_bytes: int | None = _column("L2 cache", "bytes", None)
    sms: int = _column("SMs")
    fp64_flops_per_s: float | None = _column("fp64, dense", "FLOP/s", None)
    fp32_flops_per_s: float = _column("fp32, no tensor cores", "FLOP/s")
    tf32_flops_per_s: float | None = _column("tf32, dense", "FLOP/s", None)
    fp16_flops_per_s: float = _column("fp16, dense", "FLOP/s")
    bf16_flops_per_s: float | None = _column("bf16, dense", "FLOP/s", None)
    fp8_flops_per_s: float | None = _column("fp8, dense", "FLOP/s", None)
    fp4_flops_per_s: float | None = _column("fp4, dense", "FLOP/s", None)
    int8_ops_per_s: float | None = _column("int8, dense", "op/s", None)
    fp16_sparse_flops_per_s: float | None = _column("fp16, 2:4 sparse", "FLOP/s", None)
    link_bytes_per_s: float | None = _column("NVLink, per direction", "bytes/s", None)
    pcie_bytes_per_s: float | None = _column("PCIe, per direction", "bytes/s", None)
    tdp_watts: int = _column("Power limit", "W")
    source: str = _column("Source")
    notes: str = _column("Notes", default="")

    def peak(self, format="bf16"):
        """Dense peak in FLOP/s (op/s for int8). Raises ValueError if there is none."""
        rate = getattr(self, _rate(format)) if format in FORMATS else None
        if rate is None:
            raise ValueError(f"{self.name} has no {format!r} peak here; it has "
                             f"{', '.join(self.formats())}")
        return rate

    def formats(self):
        """The number formats with a peak in this row, widest first."""
        return [f for f in FORMATS if getattr(self, _rate(f)) is not None]

    def ridge(self, format="bf16"):
        """Arithmetic intensity in FLOP/byte above which compute binds, not memory."""
        return self.peak(format) / self.hbm_bytes_per_s


_SMI = "nvidia-smi"
_V100 = dict(
    architecture="Volta", compute_capability=(7, 0), memory_source=_SMI,
    hbm_bytes_per_s=900e9, l2_bytes=6 * MIB, sms=80,
    fp64_flops_per_s=7.8e12, fp32_flops_per_s=15.7e12, fp16_flops_per_s=125e12,
    link_bytes_per_s=150e9, pcie_bytes_per_s=16e9, tdp_watts=300,
    source="https://images.nvidia.com/content/technologies/volta/pdf/"
           "volta-v100-datasheet-update-us-1165301-r5.pdf",
    notes="SXM2. No bf16, no 2:4 sparsity. Older drivers report some 250 MiB less.",
)
_A100 = dict(
    architecture="Ampere", year=2020, compute_capability=(8, 0), memory_source=_SMI,
    l2_bytes=40 * MIB, sms=108,
    fp64_flops_per_s=19.5e12, fp32_flops_per_s=19.5e12, tf32_flops_per_s=156e12,
    fp16_flops_per_s=312e12, bf16_flops_per_s=312e12, int8_ops_per_s=624e12,
    fp16_sparse_flops_per_s=624e12,
    link_bytes_per_s=300e9, pcie_bytes_per_s=32e9, tdp_watts=400,
    source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
           "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    notes="SXM4; fp64 on tensor cores.",
)
_HOPPER_SXM = dict(
    architecture="Hopper", compute_capability=(9, 0), memory_source=_SMI, sms=132,
    fp64_flops_per_s=67e12, fp32_flops_per_s=67e12, tf32_flops_per_s=494.5e12,
    fp16_flops_per_s=989.5e12, bf16_flops_per_s=989.5e12, fp8_flops_per_s=1979e12,
    int8_ops_per_s=1979e12, fp16_sparse_flops_per_s=1979e12,
    link_bytes_per_s=450e9, pcie_bytes_per_s=64e9, tdp_watts=700,
)
_BLACKWELL = dict(
    architecture="Blackwell", year=2024, compute_capability=(10, 0), memory_source=_SMI,
    link_bytes_per_s=900e9,
    source="https://resources.nvidia.com/en-us-blackwell-architecture",
)

_ROWS = (
    Gpu(name="T4", architecture="Turing", year=2018, compute_capability=(7, 5),
        label_memory="16 GB", memory_bytes=15360 * MIB, memory_source=_SMI,
        hbm_bytes_per_s=320e9, l2_bytes=4 * MIB, sms=40,
        fp32_flops_per_s=8.1e12, fp16_flops_per_s=65e12, int8_ops_per_s=130e12,
        pcie_bytes_per_s=16e9, tdp_watts=70,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
               "t4-tensor-core-datasheet-951643.pdf",
        notes="GDDR6. No bf16, no 2:4 sparsity, fp64 rate not published. Bandwidth: 256 bits at "
              "10 Gbit/s, as in the product brief; the datasheet rounds it to 300 GB/s. CUDA "
              "offers 14,930 to 15,109 of the 15,360 MiB."),
    Gpu(name="V100-16GB", aliases=("V100-SXM2-16GB",), year=2017, label_memory="16 GB",
        memory_bytes=16384 * MIB, **_V100),
    Gpu(name="V100-32GB", aliases=("V100-SXM2-32GB",), year=2018, label_memory="32 GB",
        memory_bytes=32768 * MIB, **_V100),
    Gpu(name="A10G", architecture="Ampere", year=2021, compute_capability=(8, 6),
        label_memory="24 GB", memory_bytes=23028 * MIB, memory_source=_SMI,
        hbm_bytes_per_s=600e9, l2_bytes=6 * MIB, sms=80,
        fp32_flops_per_s=35e12, tf32_flops_per_s=35e12, fp16_flops_per_s=70e12,
        bf16_flops_per_s=70e12, int8_ops_per_s=140e12, fp16_sparse_flops_per_s=140e12,
        pcie_bytes_per_s=32e9, tdp_watts=300,
        source="https://d1.awsstatic.com/product-marketing/ec2/"
               "NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        notes="GDDR6. Not the A10, whose 125 TFLOP/s are often quoted for it. ECC takes part of "
              "the 24 GiB; CUDA offers 22,587 of the 23,028 MiB."),
    Gpu(name="L4", architecture="Ada", year=2023, compute_capability=(8, 9),
        label_memory="24 GB", memory_bytes=23034 * MIB, memory_source=_SMI,
        hbm_bytes_per_s=300e9, l2_bytes=48 * MIB, sms=58,
        fp32_flops_per_s=30.3e12, tf32_flops_per_s=60e12, fp16_flops_per_s=121e12,
        bf16_flops_per_s=121e12, fp8_flops_per_s=242.5e12, int8_ops_per_s=242.5e12,
        fp16_sparse_flops_per_s=242e12, pcie_bytes_per_s=32e9, tdp_watts=72,
        source="https://www.nvidia.com/en-us/data-center/l4/",
        notes="GDDR6; ECC takes part of the 24 GiB. The datasheet prints sparse rates only: "
              "these are half."),
    Gpu(name="A100-40GB", aliases=("A100-SXM4-40GB",), label_memory="40 GB",
        memory_bytes=40960 * MIB, hbm_bytes_per_s=1555e9, **_A100),
    Gpu(name="A100-80GB", aliases=("A100-SXM4-80GB",), label_memory="80 GB",
        memory_bytes=81920 * MIB, hbm_bytes_per_s=2039e9, **_A100),
    Gpu(name="RTX 3090", aliases=("3090",), architecture="Ampere", year=2020,
        compute_capability=(8, 6), label_memory="24 GB", memory_bytes=24576 * MIB,
        memory_source=_SMI, hbm_bytes_per_s=936e9, l2_bytes=6 * MIB, sms=82,
        fp32_flops_per_s=35.6e12, tf32_flops_per_s=35.6e12, fp16_flops_per_s=71e12,
        bf16_flops_per_s=71e12, int8_ops_per_s=284e12, fp16_sparse_flops_per_s=142e12,
        link_bytes_per_s=56.25e9, pcie_bytes_per_s=32e9, tdp_watts=350,
        source="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-"
               "whitepaper-v2.pdf",
        notes="GDDR6X. fp16 is twice as fast with fp16 accumulation. NVLink joins two cards."),
    Gpu(name="RTX 4090", aliases=("4090",), architecture="Ada", year=2022,
        compute_capability=(8, 9), label_memory="24 GB", memory_bytes=24564 * MIB,
        memory_source=_SMI, hbm_bytes_per_s=1008e9, l2_bytes=72 * MIB, sms=128,
        fp32_flops_per_s=82.6e12, tf32_flops_per_s=82.6e12, fp16_flops_per_s=165.2e12,
        bf16_flops_per_s=165.2e12, fp8_flops_per_s=330.3e12, int8_ops_per_s=660.6e12,
        fp16_sparse_flops_per_s=330.4e12, pcie_bytes_per_s=32e9, tdp_watts=450,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/"
               "nvidia-ada-gpu-architecture.pdf",
        notes="GDDR6X. fp16 and fp8 are twice as fast with fp16 accumulation. No NVLink."),
    Gpu(name="L40S", architecture="Ada", year=2023, compute_capability=(8, 9),
        label_memory="48 GB", memory_bytes=46068 * MIB, memory_source=_SMI,
        hbm_bytes_per_s=864e9, l2_bytes=96 * MIB, sms=142,
        fp32_flops_per_s=91.6e12, tf32_flops_per_s=183e12, fp16_flops_per_s=362.05e12,
        bf16_flops_per_s=362.05e12, fp8_flops_per_s=733e12, int8_ops_per_s=733e12,
        fp16_sparse_flops_per_s=733e12, pcie_bytes_per_s=32e9, tdp_watts=350,
        source="https://www.nvidia.com/en-us/data-center/l40s/",
        notes="GDDR6; ECC takes part of the 48 GiB. As printed; 733 is not quite twice 362.05."),
    Gpu(name="H100 SXM", aliases=("H100", "H100 80GB HBM3", "H100 SXM5"), year=2022,
        label_memory="80 GB", memory_bytes=81559 * MIB, hbm_bytes_per_s=3.35e12,
        l2_bytes=50 * MIB, source="https://www.nvidia.com/en-us/data-center/h100/",
        notes="fp64 on tensor cores. Most printed rates are sparse: these are half.",
        **_HOPPER_SXM),
    Gpu(name="H100 PCIe", architecture="Hopper", year=2022, compute_capability=(9, 0),
        label_memory="80 GB", memory_bytes=81559 * MIB, memory_source=_SMI,
        hbm_bytes_per_s=2e12, l2_bytes=50 * MIB, sms=114,
        fp64_flops_per_s=51e12, fp32_flops_per_s=51e12, tf32_flops_per_s=378e12,
        fp16_flops_per_s=756.5e12, bf16_flops_per_s=756.5e12, fp8_flops_per_s=1513e12,
        int8_ops_per_s=1513e12, fp16_sparse_flops_per_s=1513e12,
        link_bytes_per_s=300e9, pcie_bytes_per_s=64e9, tdp_watts=350,
        source="https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
        notes="fp64 on tensor cores. The NVLink bridge joins two cards."),
    Gpu(name="H200", aliases=("H200 SXM",), year=2023, label_memory="141 GB",
        memory_bytes=143771 * MIB, hbm_bytes_per_s=4.8e12, l2_bytes=60 * MIB,
        source="https://www.nvidia.com/en-us/data-center/h200/",
        notes="fp64 on tensor cores. Most printed rates are sparse: these are half. CUDA offers "
              "143,156 of the 143,771 MiB.",
        **_HOPPER_SXM),
    Gpu(name="B200", label_memory="180 GB", memory_bytes=183359 * MIB, hbm_bytes_per_s=7.7e12,
        l2_bytes=253 * MIB // 2, sms=148,
        fp64_flops_per_s=37e12, fp32_flops_per_s=75e12, tf32_flops_per_s=1.1e15,
        fp16_flops_per_s=2.25e15, bf16_flops_per_s=2.25e15, fp8_flops_per_s=4.5e15,
        fp4_flops_per_s=9e15, int8_ops_per_s=4.5e15, fp16_sparse_flops_per_s=4.5e15,
        pcie_bytes_per_s=64e9, tdp_watts=1000,
        notes="In an HGX board. First announced with 192 GB and 8 TB/s; this is the later "
              "datasheet, whose bandwidth agrees with the bus width the driver reports. CUDA "
              "offers 182,642 of the 183,359 MiB.",
        **_BLACKWELL),
    Gpu(name="GB200", label_memory="186 GB", memory_bytes=189471 * MIB, hbm_bytes_per_s=8e12,
        sms=152,
        fp64_flops_per_s=40e12, fp32_flops_per_s=80e12, tf32_flops_per_s=1.25e15,
        fp16_flops_per_s=2.5e15, bf16_flops_per_s=2.5e15, fp8_flops_per_s=5e15,
        fp4_flops_per_s=10e15, int8_ops_per_s=5e15, fp16_sparse_flops_per_s=5e15,
        tdp_watts=1200,
        notes="One of the two GPUs of a superchip, in an NVL72 rack. It reaches its CPU over "
              "NVLink-C2C, not PCIe. L2 not confirmed; SMs as programs for it state them.",
        **_BLACKWELL),
)

GPUS = {row.name: row for row in _ROWS}


def _key(name):
    """``"NVIDIA GeForce RTX 4090"``, ``"rtx4090"`` -> ``"rtx4090"``: what ``gpu`` compares."""
    words = re.sub(r"nvidia|tesla|geforce", " ", str(name).lower())
    return re.sub(r"[^a-z0-9]", "", words)


_BY_KEY = {_key(n): row for row in _ROWS for n in (row.name, *row.aliases)}


def gpu(name):
    """The GPU called ``name``: a key of ``GPUS``, or what torch or a label calls it.

    Case, spaces, hyphens and the words NVIDIA, Tesla and GeForce do not count:
    ``gpu("h100")`` is the SXM one. Raises ValueError for an unknown name, and for
    one that fits two (``"a100"``), with the names it could have been.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    starts = [k for k in _BY_KEY if key and k.startswith(key)]
    near = starts or difflib.get_close_matches(key, _BY_KEY, n=3)
    names = sorted({_BY_KEY[k].name for k in near})
    hint = f"did you mean {' or '.join(names)}?" if names else f"known: {', '.join(GPUS)}"
    raise ValueError(f"gpu: no {name!r}; {hint}")
