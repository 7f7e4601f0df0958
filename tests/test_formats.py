"""companion.formats: every pattern, every tie, and what does not fit."""
import math

import pytest
import torch

from companion.formats import (BF16, E2M1, E4M3, E5M2, E8M0, FORMATS, FP16, FP32, Format, bits_of, bits_per_value,
                               decode, encode, fake_blocks, random_hadamard, round_to, stochastic_bf16, tensor_scale)

DTYPES = {FP16: torch.float16, BF16: torch.bfloat16, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES[E8M0] = torch.float8_e8m0fnu
INF, NAN = math.inf, math.nan
each = pytest.mark.parametrize("format", DTYPES, ids=lambda f: f.name)


def all_values(format):
    raw = torch.int16 if format.bits == 16 else torch.uint8
    return torch.arange(2**format.bits).to(raw).view(DTYPES[format]).double()


def same(a, b):
    """Equal, NaN like NaN, and -0 unlike 0."""
    a, b = a.double(), b.double()
    bits = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bits.all().item()


# Catches a forgotten subnormal case, a wrong bias, infinity read as a number.
@each
def test_decode_is_torchs_value_for_every_pattern(format):
    assert same(decode(torch.arange(2**format.bits), format), all_values(format))


@each
def test_encode_gives_every_finite_pattern_back(format):
    values = all_values(format)
    ok = ~values.isnan()
    assert torch.equal(encode(values, format)[ok], torch.arange(2**format.bits)[ok])


def awkward(format):
    grid = all_values(format)
    grid = grid[grid.isfinite()].sort().values
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    far = torch.tensor(3e38)
    random = torch.randint(-2**31, 2**31 - 1, (50_000,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([middle, middle.nextafter(far), middle.nextafter(-far), grid.float(),
                   random.to(torch.int32).view(torch.float32), torch.tensor([0.0, -0.0, NAN, 1e-45, -1e-45])])
    return x[~(x.abs() > format.max)]  # what lies beyond differs between releases of torch


# Catches ties rounded up, truncation, a lost carry, subnormals flushed, a lost sign of zero.
@pytest.mark.parametrize("format", [f for f in DTYPES if f.signed], ids=lambda f: f.name)
def test_rounding_is_torchs_cast(format):
    x = awkward(format)
    cast = x.to(DTYPES[format])
    assert same(round_to(x, format), cast)
    ok = ~x.isnan()
    assert torch.equal(encode(x, format)[ok], bits_of(cast)[ok])
    assert decode(encode(x, format), format)[~ok].isnan().all()


@pytest.mark.skipif(E8M0 not in DTYPES, reason="this torch has no E8M0")
def test_e8m0_is_torchs_cast():
    x = torch.tensor([1.0, 1.49, 1.5, 2.99, 3.0, 2.0**-127, 1.5 * 2.0**-127, 1e-45, 0.0, 3.4e38, 2.0**127])
    assert torch.equal(encode(x, E8M0), bits_of(x.to(torch.float8_e8m0fnu)))
    assert encode(torch.tensor([INF, NAN]), E8M0).tolist() == [255, 255]


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_fields_agree_with_the_decoder(format):
    values = decode(torch.arange(2**min(format.bits, 16)), format) if format.bits <= 16 else torch.tensor([])
    if len(values):
        positive = values[values.isfinite() & (values > 0)]
        assert (format.max, format.smallest) == (positive.max().item(), positive.min().item())
    if format in DTYPES or format is FP32:
        info = torch.finfo(DTYPES.get(format, torch.float32))
        assert (format.max, format.eps) == (info.max, info.eps)
        assert format.tiny == info.tiny or format is E8M0


def test_fp32_is_left_alone():
    x = torch.tensor([1e-45, -0.0, 1.1, 3.4e38, INF, NAN])
    assert same(round_to(x, FP32), x)
    assert torch.equal(encode(x[:-1], FP32), bits_of(x)[:-1])


@pytest.mark.parametrize("format, x, plain, saturated", [
    (FP16, 65519.0, 65504.0, 65504.0), (FP16, 65520.0, INF, 65504.0), (FP16, -INF, -INF, -65504.0),
    (E5M2, 61440.0, INF, 57344.0), (E4M3, 464.0, 448.0, 448.0), (E4M3, 465.0, NAN, 448.0),
    (E4M3, -INF, NAN, -448.0), (E2M1, 1e9, 6.0, 6.0), (E2M1, -INF, -6.0, -6.0), (BF16, 3.4e38, INF, BF16.max),
    (E4M3, NAN, NAN, NAN)])
def test_overflow(format, x, plain, saturated):
    x = torch.tensor([x])
    assert same(round_to(x, format), torch.tensor([plain]))
    assert same(round_to(x, format, saturate=True), torch.tensor([saturated]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (1, 1, 5)])
def test_shapes_and_dtypes_of_rounding(dtype, shape):
    x = torch.full(shape, 0.3, dtype=dtype)
    y = round_to(x, E4M3)
    assert y.shape == shape and y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert decode(encode(x, E4M3), E4M3).shape == shape
    assert (y == 0.3125).all()


def test_rounding_from_float64_rounds_once():
    x = torch.tensor([1 + 2.0**-11 + 2.0**-30], dtype=torch.float64)  # just above a tie of fp16
    assert round_to(x, FP16).item() == 1 + 2.0**-10
    assert round_to(x.float(), FP16).item() == 1.0  # float32 made it a tie first


@pytest.mark.parametrize("call, message", [
    (lambda: round_to(torch.tensor([1]), FP16), "int64"),
    (lambda: round_to(torch.tensor([1.0]).to(torch.float8_e5m2), FP16), "float8_e5m2"),
    (lambda: round_to(torch.tensor([1j]), FP16), "complex64"),
    (lambda: round_to(torch.tensor([1.0]), FP16, rounding="up"), "'up'"),
    (lambda: round_to(torch.tensor([1.0, -2.0]), E8M0), "-2.0"),
    (lambda: encode(torch.tensor([True]), FP16), "bool"),
    (lambda: encode(torch.tensor([NAN]), E2M1), "no NaN"),
    (lambda: decode(torch.tensor([0.5]), FP16), "float32"),
    (lambda: decode(torch.tensor([True]), FP16), "bool"),
    (lambda: decode(torch.tensor([256]), E4M3), "0 to 255"),
    (lambda: decode(torch.tensor([-1]), E4M3), "-1"),
    (lambda: bits_of(torch.tensor([1])), "int64"),
    (lambda: bits_of(torch.tensor([1.0], dtype=torch.float64)), "float64"),
    (lambda: stochastic_bf16(torch.tensor([1.0], dtype=torch.float64)), "float64"),
    (lambda: stochastic_bf16(torch.tensor([1.0]), bits=17), "17"),
    (lambda: fake_blocks(torch.ones(2, 30), E4M3, 32), "does not divide"),
    (lambda: fake_blocks(torch.ones(24, 32), E4M3, (16, 16)), "does not divide"),
    (lambda: fake_blocks(torch.ones(2, 0), E4M3, 32), "[2, 0]"),
    (lambda: fake_blocks(torch.ones(2, 32, dtype=torch.int32), E4M3, 32), "int32"),
    (lambda: fake_blocks(torch.tensor(1.0), E4M3, 1), "[]"),
    (lambda: fake_blocks(torch.ones(2, 32), E4M3, 0), "does not divide"),
    (lambda: tensor_scale(torch.ones(0), E2M1, E4M3), "empty"),
    (lambda: random_hadamard(12), "12"),
    (lambda: random_hadamard(0), "0"),
])
def test_a_mistake_is_named(call, message):
    with pytest.raises(ValueError, match="(?s).*" + message.replace("[", r"\[").replace("]", r"\]")):
        call()


# Catches a draw that is biased, or that moves numbers which the format has.
@pytest.mark.parametrize("round", [
    lambda x, g: stochastic_bf16(x, generator=g).float(),
    lambda x, g: round_to(x, BF16, "stochastic", generator=g)])
def test_stochastic_rounding_keeps_the_mean(round):
    g = torch.Generator().manual_seed(0)
    for value in 1.001, -1.001, 3e-5, -0.3, 1e-40:
        x = torch.full((100_000,), value)
        y = round(x, g).double()
        low, high = y.min().item(), y.max().item()
        assert low < x[0].item() < high and y.unique().numel() == 2
        assert abs(y.mean().item() - x[0].double().item()) < 5 * (high - low) / 2 / 100_000**0.5
    exact = torch.tensor([1.0, -0.0, 0.0, 1.0078125, INF, -INF, NAN])
    assert same(round(exact, g), exact)


def test_few_random_bits_lose_what_is_below_them():
    x = torch.full((10_000,), 1 + 2.0**-7 / 32)
    assert (stochastic_bf16(x, bits=4) == 1).all()
    assert (stochastic_bf16(x, bits=16) != 1).any()
    half = stochastic_bf16(torch.full((10_000,), 1 + 2.0**-8), bits=4)
    assert 0.4 < (half == 1).double().mean().item() < 0.6


def test_stochastic_rounding_keeps_any_nan():
    patterns = torch.tensor([0x7FFFFFFF, -1, 0x7F80FFFF, 0x7F800001], dtype=torch.int32)  # a carry makes them -0, inf
    for _ in range(20):
        assert stochastic_bf16(patterns.view(torch.float32).clone()).isnan().all()


def test_e2m1_stochastic_rounding_keeps_the_mean_and_saturates():
    g = torch.Generator().manual_seed(0)
    y = round_to(torch.full((100_000,), 2.25), E2M1, "stochastic", generator=g)
    assert set(y.tolist()) == {2.0, 3.0} and abs(y.mean().item() - 2.25) < 0.01
    assert round_to(torch.tensor([7.0, -9.0]), E2M1, "stochastic").tolist() == [6.0, -6.0]


# Against the definition, block by block, in float64.
@pytest.mark.parametrize("ceil", [False, True])
def test_mx_blocks(ceil):
    torch.manual_seed(0)
    x = torch.randn(4, 96) * torch.randn(4, 96).exp()
    x[0, :32], x[1, 0] = 0, 500.0
    got = fake_blocks(x, E4M3, 32, ceil=ceil)
    for row in range(4):
        for start in range(0, 96, 32):
            block = x[row, start:start + 32].double()
            top = block.abs().max().item()
            if top == 0:
                assert (got[row, start:start + 32] == 0).all()
                continue
            scale = 2.0 ** (math.ceil(math.log2(top / 448)) if ceil else math.floor(math.log2(top)) - 8)
            want = round_to(block / scale, E4M3, saturate=True) * scale
            assert torch.equal(got[row, start:start + 32].double(), want)


def test_nvfp4_blocks():
    torch.manual_seed(0)
    x = torch.randn(8, 64) * 1e-4
    whole = tensor_scale(x, E2M1, E4M3)
    got = fake_blocks(x, E2M1, 16, E4M3, whole)
    for row, start in (0, 0), (3, 16), (7, 48):
        block = x[row, start:start + 16]
        scale = round_to(block.abs().max() / (6 * whole[0, 0]), E4M3, saturate=True) * whole[0, 0]
        assert torch.equal(got[row, start:start + 16], round_to(block / scale, E2M1) * scale)
    assert fake_blocks(x, E2M1, 16, E4M3).count_nonzero() == 0  # E4M3 ends above 1e-4 / 6
    assert torch.equal(fake_blocks(torch.zeros(2, 16), E2M1, 16, E4M3), torch.zeros(2, 16))


def test_square_blocks_do_not_mind_a_transpose_and_rows_do():
    torch.manual_seed(0)
    x = torch.randn(3, 32, 64)
    square = fake_blocks(x, E2M1, (16, 16), E4M3)
    assert torch.equal(square, fake_blocks(x.mT, E2M1, (16, 16), E4M3).mT)
    assert not torch.equal(fake_blocks(x, E2M1, 16, E4M3), fake_blocks(x.mT, E2M1, 16, E4M3).mT)


def test_a_tensor_scale_for_each_of_a_batch():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32) * torch.tensor([1.0, 1e-6]).view(2, 1, 1)
    whole = tensor_scale(x, E2M1, E4M3, dim=(1, 2))
    together = fake_blocks(x, E2M1, 16, E4M3, whole)
    alone = [fake_blocks(t, E2M1, 16, E4M3, tensor_scale(t, E2M1, E4M3)) for t in x]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("element, scale", [(E4M3, E8M0), (E2M1, E4M3)])
@pytest.mark.parametrize("bad", [INF, NAN, -INF])
def test_a_bad_number_spoils_its_block_alone(element, scale, bad):
    x = torch.ones(2, 64)
    x[0, 5] = bad
    spoiled = fake_blocks(x, element, 32, scale).isnan()
    assert spoiled[0, :32].all()
    assert not spoiled[0, 32:].any() and not spoiled[1].any()


@pytest.mark.parametrize("element, block, scale, bits", [
    (E4M3, 32, E8M0, 8.25), (E2M1, 16, E4M3, 4.5), (E2M1, 32, E8M0, 4.25), (E2M1, (16, 16), E4M3, 4.03125)])
def test_bits_per_value(element, block, scale, bits):
    assert bits_per_value(element, block, scale) == bits


@pytest.mark.parametrize("n", [1, 2, 16, 64])
def test_random_hadamard(n):
    h = random_hadamard(n, torch.Generator().manual_seed(1))
    assert torch.allclose(h @ h.T, torch.eye(n), atol=1e-6)
    assert torch.allclose(h.abs(), torch.full((n, n), n**-0.5))
    if n >= 16:
        assert not torch.equal(h, random_hadamard(n, torch.Generator().manual_seed(2)))


# Catches signs on the columns, which flip results and spread nothing.
def test_signs_come_before_the_mixing():
    mixed = torch.ones(16) @ random_hadamard(16, torch.Generator().manual_seed(0))
    assert (mixed != 0).sum() > 1
    assert mixed.abs().max() < 4.0  # all sixteen gathered into one


def test_a_format_of_ones_own():
    e3m2 = Format("E3M2", 3, 2, 3, "none")
    assert (e3m2.bits, e3m2.max, e3m2.smallest) == (6, 28.0, 0.0625)
    assert torch.equal(encode(decode(torch.arange(64), e3m2), e3m2), torch.arange(64))


def test_a_vector_is_one_row_of_blocks():
    x = torch.linspace(-3, 3, 64)
    row = fake_blocks(x[None], E2M1, 16, E4M3, tensor_scale(x[None], E2M1, E4M3))[0]
    assert torch.equal(fake_blocks(x, E2M1, 16, E4M3, tensor_scale(x, E2M1, E4M3)), row)
