"""Number formats taken apart and put together: fp32, fp16, bf16, fp8, fp4 and block formats.

    from companion.formats import BF16, E4M3, bits_of, decode, encode, round_to
    decode(bits_of(x), BF16)                 # a sign, an exponent, a mantissa -> a value
    round_to(x, E4M3, saturate=True)         # the nearest value that the format has
    fake_blocks(x, E2M1, 16, E4M3, tensor_scale(x, E2M1, E4M3))       # NVFP4

One decoder and one rounding serve all formats. Rounding is to nearest, ties to the even
significand, or stochastic. Not here: flags, signaling NaNs, formats wider than fp32.

Sources: IEEE 754-2019; Micikevicius et al. 2022, arXiv:2209.05433 (fp8); OCP Microscaling
Formats 1.0, 2023 (E2M1, E8M0, MX); NVIDIA 2025, arXiv:2509.25149 (NVFP4).
Taught in: chapters/precision.
"""
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: 1 sign bit (if signed), then exponent, then mantissa.

    specials: "ieee" (top exponent holds infinity and NaN), "fn" (finite: only the pattern
    of all ones is NaN) or "none" (every pattern is a number). Unsigned formats have no
    zero and no subnormals: they are scales.
    """
    name: str
    exponent: int  # bits
    mantissa: int  # bits
    bias: int
    specials: str = "ieee"
    signed: bool = True

    @property
    def bits(self):
        return self.signed + self.exponent + self.mantissa

    @property
    def largest_code(self):
        """The pattern of the largest finite value."""
        all_ones = 2 ** (self.exponent + self.mantissa) - 1
        return all_ones - {"ieee": 2**self.mantissa, "fn": 1, "none": 0}[self.specials]

    @property
    def nan_code(self):
        """A pattern that is NaN, or None."""
        all_ones = 2 ** (self.exponent + self.mantissa) - 1
        return {"ieee": all_ones - (2**self.mantissa - 1) // 2, "fn": all_ones, "none": None}[self.specials]

    @property
    def lowest_exponent(self):
        """The exponent of the smallest normal value."""
        return (1 if self.signed else 0) - self.bias

    @property
    def max(self):
        m = self.largest_code & (2**self.mantissa - 1)
        return (1 + m / 2**self.mantissa) * 2.0**self.max_exponent

    @property
    def max_exponent(self):
        return (self.largest_code >> self.mantissa) - self.bias

    @property
    def tiny(self):
        """The smallest normal value."""
        return 2.0**self.lowest_exponent

    @property
    def smallest(self):
        """The smallest value above zero."""
        return 2.0 ** (self.lowest_exponent - self.mantissa)

    @property
    def eps(self):
        """The spacing just above 1."""
        return 2.0**-self.mantissa


FP32 = Format("fp32", 8, 23, 127)
BF16 = Format("bf16", 8, 7, 127)
FP16 = Format("fp16", 5, 10, 15)
E5M2 = Format("E5M2", 5, 2, 15)
E4M3 = Format("E4M3", 4, 3, 7, "fn")
E2M1 = Format("E2M1", 2, 1, 1, "none")
E8M0 = Format("E8M0", 8, 0, 127, "fn", signed=False)
FORMATS = (FP32, BF16, FP16, E5M2, E4M3, E2M1, E8M0)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bits_of(x):
    """The bit patterns of a floating-point tensor of 8, 16 or 32 bits, as int64.

    Raises ValueError for other dtypes.
    """
    size = x.element_size()
    if not x.dtype.is_floating_point or size not in _INTEGERS or "x2" in str(x.dtype):
        raise ValueError(f"bits_of: expected a float tensor of 8, 16 or 32 bits, got {x.dtype}")
    return x.contiguous().view(_INTEGERS[size]).long() & (2 ** (8 * size) - 1)


def decode(codes, format):
    """The values of bit patterns: an integer tensor -> a float64 tensor of its shape, exact.

    Raises ValueError for a dtype that is no integer, and for patterns out of range.
    """
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype == torch.bool:
        raise ValueError(f"decode: codes are integers, got {codes.dtype}")
    codes = codes.long()
    if codes.numel() and (codes.min() < 0 or codes.max() >= 2**format.bits):
        raise ValueError(f"decode: {format.name} has codes 0 to {2**format.bits - 1}, "
                         f"got {codes.min().item()} to {codes.max().item()}")
    mantissa = codes & (2**format.mantissa - 1)
    exponent = codes >> format.mantissa & (2**format.exponent - 1)
    subnormal = (exponent == 0) & format.signed
    significand = mantissa + torch.where(subnormal, 0, 2**format.mantissa)
    power = torch.where(subnormal, 1, exponent) - format.bias - format.mantissa
    value = significand.double() * _power_of_two(power, torch.float64)
    magnitude = codes & (2 ** (format.exponent + format.mantissa) - 1)
    if format.specials == "ieee":
        value = torch.where(magnitude == format.largest_code + 1, torch.inf, value)
    value = torch.where(magnitude > format.largest_code + (format.specials == "ieee"), torch.nan, value)
    negative = codes >> (format.exponent + format.mantissa) & 1 if format.signed else codes * 0
    return torch.where(negative == 1, -value, value)


def round_to(x, format, rounding="nearest", saturate=False, generator=None):
    """The value of ``format`` that each number of ``x`` becomes; float32 (float64 if x is).

    rounding: "nearest" (ties to even) or "stochastic" (up with the probability that keeps
    the mean). Beyond the largest value: infinity, NaN where there is none, or that value
    if ``saturate`` (always, for a format without either). Signed zeros and NaN stay.

    Raises ValueError for tensors that are not floating point of 16 bits or more, and for
    numbers below zero in an unsigned format.
    """
    if x.dtype not in _FLOATS:
        raise ValueError(f"round_to: expected float16, bfloat16, float32 or float64, got {x.dtype}")
    if not format.signed and x.numel() and bool((x < 0).any()):
        raise ValueError(f"round_to: {format.name} has no sign, got {x.min().item()}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"round_to: rounding is 'nearest' or 'stochastic', got {rounding!r}")
    kept = x.dtype if x.dtype == torch.float64 else torch.float32
    # fp32 is exact for narrow ranges; with 8 exponent bits the steps can be fp32 subnormals
    x = x.to(torch.float32 if kept == torch.float32 and format.exponent <= 5 else torch.float64)
    step = _exponent(x).clamp(min=format.lowest_exponent) - format.mantissa
    scaled = x * _power_of_two(-step, x.dtype)
    if rounding == "nearest":
        whole = scaled.round()
    else:
        whole = (scaled.abs() + _uniform_like(x, generator)).floor().copysign(x)
    value = whole * _power_of_two(step, x.dtype)
    if not format.signed:
        value = value.clamp(min=format.smallest)
    if saturate or format.specials == "none":
        value = value.clamp(-format.max, format.max)
    else:
        beyond = torch.full_like(value, torch.inf if format.specials == "ieee" else torch.nan)
        value = torch.where(value.abs() > format.max, beyond.copysign(value), value)
    return value.to(kept)


def encode(x, format, rounding="nearest", saturate=False, generator=None):
    """The bit patterns of ``round_to(x, ...)``, as int64. All NaNs become one pattern.

    Raises ValueError as ``round_to`` does, and for NaN in a format that has none.
    """
    value = round_to(x.double() if x.dtype in _FLOATS else x, format, rounding, saturate, generator)
    bad = value.isnan()
    if format.nan_code is None and bool(bad.any()):
        raise ValueError(f"encode: {format.name} has no NaN")
    a = torch.where(value.isfinite(), value.abs(), format.max)
    exponent = _exponent(a).clamp(min=format.lowest_exponent)
    significand = (a * _power_of_two(format.mantissa - exponent, torch.float64)).long()
    # the hidden bit carries into the exponent; a subnormal lacks it and lands on exponent 0
    code = (exponent - format.lowest_exponent << format.mantissa) + significand
    if not format.signed:
        code = code - 1
    code = code + value.isinf()
    code = code | (value.signbit().long() << (format.bits - 1) if format.signed else 0)
    return torch.where(bad, format.nan_code or 0, code)


def _exponent(x):
    """floor(log2(|x|)) of float32 or float64, read from the bits; very low for zero."""
    if x.dtype == torch.float32:
        return (x.view(torch.int32) >> 23 & 255) - 127
    return (x.view(torch.int64) >> 52 & 2047) - 1023


def _power_of_two(n, dtype):
    """2**n from an integer tensor, exact for exponents of normal numbers."""
    if dtype == torch.float32:
        return (n.int().clamp(-126, 127) + 127 << 23).view(torch.float32)
    return (n.long().clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def _uniform_like(x, generator):
    if generator is None:
        return torch.rand_like(x)
    return torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def stochastic_bf16(x, bits=16, generator=None):
    """float32 -> bfloat16, up or down at random so that the mean is ``x``.

    Adds ``bits`` random bits below the last bit that bfloat16 keeps and truncates. With
    fewer than 16 bits, what lies below the lowest of them is always dropped.

    Raises ValueError if x is not float32 or bits is not 1 to 16.
    """
    if x.dtype != torch.float32 or not 1 <= bits <= 16:
        raise ValueError(f"stochastic_bf16: expected float32 and 1 to 16 bits, got {x.dtype}, {bits}")
    noise = torch.randint(2**bits, x.shape, device=x.device, dtype=torch.int32, generator=generator)
    up = (x.contiguous().view(torch.int32) + (noise << 16 - bits)) & -65536
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()


def tensor_scale(x, element, scale, dim=None):
    """The fp32 scale of a whole tensor that puts its largest block at the top of ``scale``.

    dim: dimensions to reduce (default all), kept with size 1. 1 where all is zero.
    """
    if not x.numel():
        raise ValueError("tensor_scale: the tensor is empty")
    dim = tuple(range(x.dim())) if dim is None else dim
    top = x.abs().amax(dim, keepdim=True).float() / (element.max * scale.max)
    return torch.where(top > 0, top, 1.0)


def _by_blocks(x, block):
    """x [..., R, C] as [..., R/r, r, C/c, c]."""
    rows, columns = (1, block) if isinstance(block, int) else block
    if x.dim() < 1 or x.dtype not in _FLOATS or not x.numel():
        raise ValueError(f"blocks: expected a float tensor with elements, got {x.dtype} {list(x.shape)}")
    x = x if x.dim() > 1 else x[None]
    R, C = x.shape[-2:]
    if min(rows, columns) < 1 or R % rows or C % columns:
        raise ValueError(f"blocks: {rows} x {columns} does not divide {R} x {C}")
    return x.float().reshape(*x.shape[:-2], R // rows, rows, C // columns, columns)


def _scales(blocks, element, scale, whole, ceil):
    """One scale a block, a value of the format ``scale``."""
    top = blocks.abs().amax((-3, -1), keepdim=True)
    if scale.signed:
        value = round_to(top / (element.max * whole), scale, saturate=True)
    else:
        power = _exponent(top) - element.max_exponent
        power = power + (top > element.max * _power_of_two(power, torch.float32)) if ceil else power
        value = _power_of_two(power, torch.float32)  # 2**-126 is low enough for a block of zeros
    return torch.where(top.isfinite(), value, torch.nan)


def fake_blocks(x, element, block, scale=E8M0, whole=1.0, rounding="nearest", ceil=False, generator=None):
    """``x`` after quantizing in blocks and back: float32, the shape of ``x``.

    block: numbers along the last dimension that share a scale, or (rows, columns).
    scale: the format of the scales. E8M0 takes the exponent of the block's largest number
    (so that a number just below the next power saturates; with ``ceil`` none does); a
    signed format takes largest / element.max. whole: an fp32 scale above them, from
    ``tensor_scale``. A block with infinity or NaN becomes NaN.

    MXFP8: (x, E4M3, 32). NVFP4: (x, E2M1, 16, E4M3, tensor_scale(x, E2M1, E4M3)).
    Raises ValueError if blocks do not divide the shape, or if there is nothing to divide.
    """
    blocks = _by_blocks(x, block)
    whole = torch.as_tensor(whole, dtype=torch.float32, device=x.device)
    whole = whole if whole.dim() == 0 else whole.reshape(*whole.shape[:-2], 1, 1, 1, 1)
    s = _scales(blocks, element, scale, whole, ceil) * whole
    scaled = torch.where(s == 0, 0.0, blocks / s)
    values = round_to(scaled, element, rounding, saturate=True, generator=generator) * s
    return values.reshape(x.shape)


def bits_per_value(element, block, scale):
    """Stored bits a number: its own and its share of the block's scale."""
    size = block if isinstance(block, int) else block[0] * block[1]
    return element.bits + scale.bits / size


def random_hadamard(n, generator=None):
    """An orthogonal n x n matrix of entries +-1/sqrt(n): Sylvester's, rows with random signs.

    For use from the right, x @ H: the signs act on x before it is mixed. On columns they
    would only flip results, which no symmetric format notices.

    Raises ValueError if n is no power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"random_hadamard: {n} is no power of two")
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = 1 - 2 * torch.randint(2, (n,), generator=generator).float()
    return signs[:, None] * h / n**0.5
