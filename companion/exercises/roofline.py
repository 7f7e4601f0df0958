"""Checkers of the exercises in chapters/roofline."""
import math

from ..exercise import Wrong
from ..grading import number, refuses, run


def _bound(answer):
    cases = [
        ("a large product", (1e15, 1e9, 1e15, 5e12), 1.0, "compute"),
        ("a copy has no FLOPs", (0, 1e10, 1e15, 5e12), 2e-3, "memory"),
        ("left of the ridge", (100, 50, 10, 1), 50.0, "memory"),
        ("right of the ridge", (600, 50, 10, 1), 60.0, "compute"),
        ("on the ridge", (500, 50, 10, 1), 50.0, "compute"),
        ("all in registers", (1000, 0, 10, 1), 100.0, "compute"),
    ]
    for name, case, seconds, binds in cases:
        call = f"{name}, bound({', '.join(f'{x:g}' for x in case)})"
        got = run(call, answer, *case)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{call}: expected (seconds, binds), got {got!r}")
        if not math.isclose(number(call, got[0]), seconds):
            raise Wrong(f"{call}: expected {seconds:g} s, got {got[0]:g}")
        if got[1] != binds:
            raise Wrong(f"{call}: expected {binds!r}, got {got[1]!r}")
    for i, name in enumerate(("flops", "nbytes", "peak", "bandwidth")):
        for bad in (-1,) if i < 2 else (0, -1):
            case = [1.0, 1.0, 1.0, 1.0]
            case[i] = bad
            refuses(f"{name} = {bad}", answer, *case)


def _attention_intensity(answer):
    cases = [
        ("prefill", (2048, 2048, 32, 32, 128, 2)),
        ("decode", (1, 2048, 32, 32, 128, 2)),
        ("decode, shared keys", (1, 2048, 32, 8, 128, 2)),
        ("a draft of five", (5, 777, 12, 1, 64, 2)),
        ("fp32", (7, 100, 8, 4, 32, 4)),
        ("more queries than keys", (300, 20, 6, 2, 16, 1)),
    ]
    for name, case in cases:
        call = f"{name}, attention_intensity{case}"
        T, S, H, K, d, size = case
        # Counted from the shapes of the four tensors, query, key, value and result
        shapes = [(H, T, d), (K, S, d), (K, S, d), (H, T, d)]
        want = 2 * (2 * H * T * S * d) / (size * sum(math.prod(s) for s in shapes))
        got = number(call, run(call, answer, *case))
        if not math.isclose(got, want):
            raise Wrong(f"{call}: expected {want:.6g} FLOP/byte, got {got:.6g}")
    refuses("8 heads on 3 key heads", answer, 1, 10, 8, 3, 4, 2)


def _compute_bound(B, D, F, bits, itemsize, peak, bandwidth):
    """In whole numbers: FLOPs / peak >= bytes / bandwidth."""
    return 8 * 2 * B * D * F * bandwidth >= (8 * B * (D + F) * itemsize + D * F * bits) * peak


def _fewest(*layer):
    """By doubling and halving; None if a very large batch is not enough."""
    high = 1
    while not _compute_bound(high, *layer):
        high *= 2
        if high > 2**80:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _compute_bound(middle, *layer) else (middle, high)
    return high


def _tokens_to_fill(answer):
    cases = [
        ("bf16, D = 8192", (8192, 8192, 16, 2, 989_500_000_000_000, 4_800_000_000_000)),
        ("4-bit weights", (8192, 8192, 4, 2, 989_500_000_000_000, 4_800_000_000_000)),
        ("a wide layer", (4096, 14336, 8, 2, 312_000_000_000_000, 2_039_000_000_000)),
        ("equal times count", (100, 100, 16, 2, 25, 1)),
        ("one token is enough", (1000, 1000, 16, 2, 1, 2)),
        ("too narrow for any batch", (256, 256, 16, 2, 989_500_000_000_000, 4_800_000_000_000)),
        ("activations alone are on the ridge", (200, 200, 16, 2, 100, 1)),
        ("far beyond what a float holds", (200, 200, 16, 2, 10**16 - 1, 10**14)),
    ]
    for name, case in cases:
        call = f"{name}, tokens_to_fill{case}"
        want, got = _fewest(*case), run(call, answer, *case)
        if want is None:
            if got is not None:
                raise Wrong(f"{call}: no number of tokens is enough, expected None, got {got!r}")
            continue
        if got is None or number(call, got) != want:
            raise Wrong(f"{call}: expected {want:,} tokens, got {got!r}")


_STEPS = range(16, 1025, 16)


def _needs(m, n, itemsize):
    return 4 * m * n + 2 * 32 * itemsize * (m + n)


def _reaches(m, n, itemsize, target):
    return 2 * m * n >= target * itemsize * (m + n)


def _least(target, fast_bytes, itemsize):
    """Bytes of the cheapest tile, by trying all; None if none fits."""
    return min((need for m in _STEPS for n in _STEPS
                if _reaches(m, n, itemsize, target)
                and (need := _needs(m, n, itemsize)) <= fast_bytes), default=None)


def _tile(answer):
    cases = [
        ("16 bits, 64 FLOP/byte", (64, 228 * 1024, 2)),
        ("16 bits, 85 FLOP/byte", (85, 256 * 1024, 2)),
        ("the target met exactly", (32, 256 * 1024, 2)),
        ("between two squares", (70, 512 * 1024, 2)),
        ("8 bits", (100, 228 * 1024, 1)),
        ("a large target", (600, 2**21, 1)),
        ("the largest tile", (1024, 2**23, 1)),
        ("32 bits", (20, 100 * 1024, 4)),
        ("an easy target", (0.5, 48 * 1024, 2)),
        ("it fits to the byte", (64, _needs(128, 128, 2), 2)),
        ("one byte too little", (64, _needs(128, 128, 2) - 1, 2)),
        ("no memory for it", (206, 228 * 1024, 2)),
        ("no tile is large enough", (2000, 10**9, 2)),
    ]
    for name, case in cases:
        target, fast_bytes, itemsize = case
        call = f"{name}, tile{case}"
        got, least = run(call, answer, *case), _least(target, fast_bytes, itemsize)
        if least is None or got is None:
            if least is not None or got is not None:
                want = "None, for none fits" if least is None else f"a tile of {least:,} bytes"
                raise Wrong(f"{call}: expected {want}, got {got!r}")
            continue
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{call}: expected (m, n), got {got!r}")
        m, n = (number(call, side) for side in got)
        if m not in _STEPS or n not in _STEPS:
            raise Wrong(f"{call}: sides are multiples of 16 up to 1,024, got {got!r}")
        if not _reaches(m, n, itemsize, target):
            reached = 2 * m * n / (itemsize * (m + n))
            raise Wrong(f"{call}: {got!r} reaches {reached:.4g} FLOP/byte only")
        if (need := _needs(m, n, itemsize)) > fast_bytes:
            raise Wrong(f"{call}: {got!r} needs {need:,} bytes, {fast_bytes:,} are there")
        if need > least:
            raise Wrong(f"{call}: {got!r} needs {need:,} bytes; another tile reaches the target "
                        f"with {least:,}")


def _counted(config, batch, seq, recompute):
    """FLOPs in products of one step, by counting those that run (on ``meta``)."""
    from functools import partial

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
    from torch.utils.flop_counter import FlopCounterMode

    from ..gpt import Decoder
    with torch.device("meta"):
        model = Decoder(config)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(False), \
            FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    return counter.get_total_flops()


def _decoder_flops(answer):
    from ..gpt import Config
    cases = [
        ("no shared keys", Config(layers=1, kv_heads=8, width=64), 1, 48),
        ("one key head", Config(layers=2, kv_heads=1), 1, 16),
        ("a batch", Config(layers=1), 3, 32),
        ("the book's decoder", Config(), 1, 64),
        ("a large vocabulary", Config(layers=1, vocab=5000, width=64), 2, 8),
        ("a long sequence", Config(layers=2, width=32, heads=2, kv_heads=2, hidden=48), 1, 256),
    ]
    for name, config, batch, seq in cases:
        shown = ", ".join(f"{size}={getattr(config, size)}" for size in
                          ("vocab", "width", "layers", "heads", "kv_heads", "hidden"))
        call = f"{name}, decoder_flops(Config({shown}), {batch}, {seq})"
        got = run(call, answer, config, batch, seq)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{call}: expected (model, hardware), got {got!r}")
        for which, mine, recompute in ("model", got[0], False), ("hardware", got[1], True):
            want = _counted(config, batch, seq, recompute)
            if number(f"{call}, {which}", mine) != want:
                raise Wrong(f"{call}: counted {want:,} FLOP for {which}, got {mine:,}")


CHECKS = {
    "roofline-1": _bound,
    "roofline-2": _attention_intensity,
    "roofline-3": _tokens_to_fill,
    "roofline-4": _tile,
    "roofline-5": _decoder_flops,
}
