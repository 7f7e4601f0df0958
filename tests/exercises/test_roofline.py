"""Right and wrong answers to the exercises of chapters/roofline."""
from .checking import *  # the tests; their answers are RIGHT and WRONG, below

# ---- roofline-1: the bound

def bound_by(check=True, add=False, tie="compute", swap=False):
    def answer(flops, nbytes, peak, bandwidth):
        if check and (flops < 0 or nbytes < 0 or peak <= 0 or bandwidth <= 0):
            raise ValueError("not positive")
        compute, memory = flops / peak, nbytes / bandwidth
        if swap:
            compute, memory = flops / bandwidth, nbytes / peak
        binds = tie if compute == memory else "compute" if compute > memory else "memory"
        return compute + memory if add else max(compute, memory), binds
    return answer


def bound_by_intensity(flops, nbytes, peak, bandwidth):
    if flops < 0 or nbytes < 0 or peak <= 0 or bandwidth <= 0:
        raise ValueError("not positive")
    binds = "compute" if flops / nbytes >= peak / bandwidth else "memory"
    return max(flops / peak, nbytes / bandwidth), binds


def bound_unguarded_zero(flops, nbytes, peak, bandwidth):
    return bound_by()(flops, nbytes, peak, bandwidth) if peak and bandwidth else 1 / 0


# ---- roofline-2: attention's intensity

def attention_ratio(flops=4, shared=True, result=True, check=True):
    def answer(T, S, H, K, d, size):
        if check and H % K:
            raise ValueError("heads")
        keys = K if shared else H
        numbers = (2 if result else 1) * H * T * d + 2 * keys * S * d
        return flops * H * T * S * d / (size * numbers)
    return answer


# ---- roofline-3: how many tokens fill a layer

def tokens_by(batch_is_intensity=False, up=True, none=True, bits=True, real=False, strict=False):
    def answer(D, F, width, size, peak, bandwidth):
        weight = D * F * (width if bits else 8 * size)
        gain = 8 * (2 * D * F * bandwidth - (D + F) * size * peak)
        if batch_is_intensity:
            return -(-peak * width // (16 * bandwidth))
        if gain <= 0:
            return None if none else 2**62
        if real:
            fewest = weight / (8 * (2 * D * F * bandwidth / peak - (D + F) * size))
            return int(fewest) + (fewest != int(fewest))
        if strict:
            return weight * peak // gain + 1
        return -(-weight * peak // gain) if up else weight * peak // gain
    return answer


# ---- roofline-4: a tile

def tile_by(square=False, first=False, buffers=2, accumulate=4, most=False, none=True, end=1025):
    def answer(target, fast_bytes, itemsize):
        found = []
        for m in range(16, end, 16):
            for n in [m] if square else range(16, end, 16):
                needs = accumulate * m * n + buffers * 32 * itemsize * (m + n)
                if needs <= fast_bytes and 2 * m * n >= target * itemsize * (m + n):
                    found.append((needs, m, n))
        if not found:
            return None if none else (16, 16)
        return (found[0] if first else max(found) if most else min(found))[1:]
    return answer


def tile_of_any_size(target, fast_bytes, itemsize):
    side = int(-(-target * itemsize // 1))
    return (side, side) if 4 * side**2 + 128 * itemsize * side <= fast_bytes else None


# ---- roofline-5: FLOPs of a decoder's step

def decoder_by(attention=4, grouped=True, head=True, again=1, head_again=False, tables=0):
    def answer(config, batch, seq):
        h, tokens = config.width, batch * seq
        k = h // config.heads * config.kv_heads if grouped else h
        weights = 2 * h * h + 2 * h * k + 3 * h * config.hidden
        blocks = config.layers * tokens * (2 * weights + attention * seq * h)
        last = 2 * tokens * config.vocab * h * (head + tables)
        return 3 * (blocks + last), (3 + again) * blocks + (3 + head_again) * last
    return answer


WRONG = {
    "roofline-1": [
        (bound_by(add=True), "a large product"), (bound_by(tie="memory"), "on the ridge"),
        (bound_by(swap=True), "a large product"), (bound_by(check=False), "flops = -1"),
        (bound_by_intensity, "all in registers"), (bound_unguarded_zero, "not ZeroDivisionError")],
    "roofline-2": [
        (attention_ratio(flops=2), "prefill"), (attention_ratio(shared=False), "decode, shared keys"),
        (attention_ratio(result=False), "prefill"), (attention_ratio(check=False), "8 heads on 3 key heads")],
    "roofline-3": [
        (tokens_by(batch_is_intensity=True), "bf16, D = 8192"), (tokens_by(up=False), "bf16, D = 8192"),
        (tokens_by(strict=True), "equal times count"),
        (tokens_by(bits=False), "4-bit weights"), (tokens_by(none=False), "too narrow"),
        (tokens_by(real=True), "far beyond what a float holds"),
        (lambda *layer: tokens_by()(*layer) if layer[0] > 200 else None, "50 tokens, got None")],
    "roofline-4": [
        (tile_by(square=True), "another tile reaches"), (tile_by(first=True), "another tile reaches"),
        (tile_by(most=True), "another tile reaches"), (tile_by(buffers=1, most=True), "are there"),
        (tile_by(accumulate=2), "one byte too little"),
        (tile_by(end=513), "a large target"), (tile_by(end=1024), "the largest tile"),
        (tile_by(none=False), "none fits"), (tile_of_any_size, "multiples of 16")],
    "roofline-5": [
        (decoder_by(attention=0), "no shared keys"), (decoder_by(attention=2), "no shared keys"),
        (decoder_by(grouped=False), "one key head"), (decoder_by(head=False), "no shared keys"),
        (decoder_by(tables=1), "no shared keys"), (decoder_by(again=0), "for hardware"),
        (decoder_by(head_again=True), "for hardware")],
}
