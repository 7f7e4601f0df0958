"""The hardware registry agrees with itself and with what was printed elsewhere."""
import dataclasses
import subprocess
import sys

import pytest

from companion.hardware import FORMATS, GPUS, MIB, Gpu, gpu

ALL = pytest.mark.parametrize("chip", GPUS.values(), ids=list(GPUS))

# FLOP per clock and SM in dense fp16 with fp32 accumulation, from the white papers'
# FMA counts per SM; GeForce and the A10G accumulate in fp32 at half speed.
FP16_PER_CLOCK = {"Turing": 1024, "Volta": 1024, "Ampere": 2048, "Ada": 1024, "Hopper": 4096,
                  "Blackwell": 8192}
HALF_RATE = {"A10G": 512, "RTX 3090": 512, "RTX 4090": 512}


def implied_clock(chip):
    per_clock = HALF_RATE.get(chip.name, FP16_PER_CLOCK[chip.architecture])
    return chip.fp16_flops_per_s / (chip.sms * per_clock)


def doubled(chip):
    """The row as it stands when somebody copies the datasheet's sparse figures."""
    return dataclasses.replace(chip, fp16_flops_per_s=2 * chip.fp16_flops_per_s)


# Catches a sparse peak in a dense field, the fp16-accumulate rate of a GeForce, and a wrong
# SM count: each moves the clock that the peak implies out of what any of these chips runs at.
@ALL
def test_the_dense_peak_is_sms_times_clock(chip):
    assert 1.3e9 < implied_clock(chip) < 2.6e9
    assert not 1.3e9 < implied_clock(doubled(chip)) < 2.6e9


# Catches a slip in either figure: they were copied from the datasheets apart.
@ALL
def test_sparse_is_twice_dense(chip):
    if chip.fp16_sparse_flops_per_s is None:
        assert chip.compute_capability < (8, 0)  # 2:4 sparsity came with Ampere
    else:
        assert chip.fp16_sparse_flops_per_s == pytest.approx(2 * chip.fp16_flops_per_s, rel=0.02)


# Catches a format given to a chip that lacks its units, or left out where it has them.
@ALL
def test_formats_follow_the_compute_capability(chip):
    cc = chip.compute_capability
    assert ("bf16" in chip.formats()) == ("tf32" in chip.formats()) == (cc >= (8, 0))
    assert ("fp8" in chip.formats()) == (cc >= (8, 9))
    assert ("fp4" in chip.formats()) == (cc >= (10, 0))


# Catches a digit or a power of ten lost in one column: halving the width of the number
# doubles the rate, and bf16 runs at the rate of fp16.
@ALL
def test_rates_double_as_formats_halve(chip):
    if chip.bf16_flops_per_s:
        assert chip.bf16_flops_per_s == chip.fp16_flops_per_s
        assert chip.fp16_flops_per_s == pytest.approx(2 * chip.tf32_flops_per_s, rel=0.03)
    if chip.fp8_flops_per_s:
        assert chip.fp8_flops_per_s == pytest.approx(2 * chip.fp16_flops_per_s, rel=0.02)
    if chip.fp4_flops_per_s:
        assert chip.fp4_flops_per_s == 2 * chip.fp8_flops_per_s


# Catches a link written down as both directions together: the left numbers are the
# datasheets' sums, which nobody may copy into the registry.
@pytest.mark.parametrize("name, both_directions", [
    ("V100-16GB", 300e9), ("V100-32GB", 300e9), ("A100-40GB", 600e9), ("A100-80GB", 600e9),
    ("RTX 3090", 112.5e9), ("H100 PCIe", 600e9), ("H100 SXM", 900e9), ("H200", 900e9),
    ("B200", 1800e9), ("GB200", 1800e9)])
def test_nvlink_is_per_direction(name, both_directions):
    assert GPUS[name].link_bytes_per_s == both_directions / 2


def test_every_nvlink_is_checked_above():
    marks = test_nvlink_is_per_direction.pytestmark[0].args[1]
    assert {name for name, _ in marks} == {c.name for c in GPUS.values() if c.link_bytes_per_s}


# PCIe 3, 4, 5 x16 carry about 16, 32, 64 GB/s each way; catches a sum of both directions.
@ALL
def test_pcie_is_per_direction(chip):
    by_architecture = {"Turing": 16e9, "Volta": 16e9, "Ampere": 32e9, "Ada": 32e9,
                       "Hopper": 64e9, "Blackwell": 64e9}
    if chip.name == "GB200":
        assert chip.pcie_bytes_per_s is None
    else:
        assert chip.pcie_bytes_per_s == by_architecture[chip.architecture]


# Catches MiB for MB and a swapped row: a label is neither exactly GB nor exactly GiB, but
# what is reported lies between 0.93 and 1.08 of it.
@ALL
def test_reported_memory_is_near_its_label(chip):
    number, unit = chip.label_memory.split()
    assert unit == "GB"
    assert 0.93 < chip.memory_bytes / (float(number) * 1e9) < 1.08
    assert chip.memory_bytes % MIB == 0 and chip.memory_source == "nvidia-smi"


# Two totals that the book's claim on units prints.
def test_reported_memory_known_elsewhere():
    assert gpu("H100").memory_bytes == 85_520_809_984
    assert gpu("T4").memory_bytes == 16_106_127_360


# Catches GB/s typed as TB/s or a bandwidth of another variant. The ridges were worked out
# by hand from the datasheets, in FLOP per byte.
def test_ridges():
    ridges = {"T4": 203, "V100-32GB": 139, "A100-80GB": 153, "A100-40GB": 201, "H200": 206,
              "B200": 292, "H100 SXM": 295}
    for name, expected in ridges.items():
        assert GPUS[name].ridge("fp16") == pytest.approx(expected, abs=0.5), name
    order = sorted(("V100-32GB", "A100-80GB", "H200", "H100 SXM"),
                   key=lambda n: GPUS[n].ridge("fp16"))
    assert order == ["V100-32GB", "A100-80GB", "H200", "H100 SXM"]


# Catches a lost digit in what no other test relates to anything.
@ALL
def test_plausible(chip):
    assert 250e9 < chip.hbm_bytes_per_s < 9e12
    assert chip.l2_bytes is None or 4 * MIB <= chip.l2_bytes <= 128 * MIB
    assert 40 <= chip.sms <= 160 and 70 <= chip.tdp_watts <= 1200
    assert 2017 <= chip.year <= 2025
    assert 0.1 < chip.fp32_flops_per_s / (chip.sms * 256 * 2e9) < 1.3


@ALL
def test_sources_are_links(chip):
    assert chip.source.startswith("https://") and " " not in chip.source


# The page is generated from these: a field without them would be a column without a head.
def test_every_field_says_what_it_is():
    for f in dataclasses.fields(Gpu):
        assert f.metadata["label"] and "unit" in f.metadata, f.name
    units = {f.name: f.metadata["unit"] for f in dataclasses.fields(Gpu)}
    assert all(units[n] == "bytes/s" for n in units if n.endswith("bytes_per_s"))
    assert all(units[n] == "FLOP/s" for n in units if n.endswith("flops_per_s"))
    assert {n.split("_")[0] for n in units if "flops" in n or "int8" in n} == set(FORMATS)


def test_rows_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu("T4").sms = 41


@pytest.mark.parametrize("spelling, name", [
    ("h100", "H100 SXM"), ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("NVIDIA H200", "H200"), ("Tesla T4", "T4"), (" t4 ", "T4"), ("NVIDIA A10G", "A10G"),
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("a100 40gb", "A100-40GB"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("3090", "RTX 3090"),
    ("Tesla V100-SXM2-16GB", "V100-16GB"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA B200", "B200"), ("NVIDIA GB200", "GB200")])
def test_lookup(spelling, name):
    assert gpu(spelling) is GPUS[name]


# "a100" must not pick a memory size for the reader; "nvidia" and "" must not pick anything.
@pytest.mark.parametrize("spelling, said", [
    ("a100", "A100-40GB or A100-80GB"), ("v100", "V100-16GB or V100-32GB"),
    ("H10O", "H100"), ("nvidia", "known: T4"), ("", "known: T4"), ("MI300X", "no 'MI300X'")])
def test_unknown_names(spelling, said):
    with pytest.raises(ValueError, match="gpu: no ") as error:
        gpu(spelling)
    assert said in str(error.value)


# Two rows with one spelling: the later would silently answer for the earlier.
def test_spellings_are_unique():
    from companion.hardware import _BY_KEY
    assert len(_BY_KEY) == sum(1 + len(row.aliases) for row in GPUS.values())


@pytest.mark.parametrize("format", ["bf16", "fp8", "int3", "fp16_sparse"])
def test_a_format_the_chip_lacks_is_an_error(format):
    with pytest.raises(ValueError, match=f"T4 has no '{format}'.*fp16"):
        gpu("T4").ridge(format)


# It runs in a browser: nothing beyond the standard library, and no other part of companion.
def test_standard_library_only():
    code = ("import sys; from companion.hardware import gpu; gpu('t4');"
            "print(*sorted({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names))")
    seen = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True,
                          cwd=__file__.rsplit("/", 2)[0], check=True).stdout.split()
    assert set(seen) <= {"__main__", "companion"}
