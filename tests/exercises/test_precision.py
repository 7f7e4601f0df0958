"""Right and wrong answers to the exercises of chapters/precision."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below

# ---- precision-1: the largest number

def ieee_always(exponent, mantissa, bias, specials):
    return (2 - 2.0**-mantissa) * 2.0 ** (2**exponent - 2 - bias)


def full_top_exponent(exponent, mantissa, bias, specials):
    if specials not in ("ieee", "fn", "none"):
        raise ValueError(specials)
    return (2 - 2.0**-mantissa) * 2.0 ** (2**exponent - (2 if specials == "ieee" else 1) - bias)


def no_mantissa_forgotten(exponent, mantissa, bias, specials):
    less = {"ieee": 2**mantissa, "fn": 1, "none": 0}[specials]
    code = 2 ** (exponent + mantissa) - 1 - less
    return (1 + code % 2**mantissa / 2**mantissa) * 2.0 ** (code // 2**mantissa - bias)


def largest_as_tensor(exponent, mantissa, bias, specials):
    if specials not in ("ieee", "fn", "none"):
        raise ValueError(specials)
    return torch.tensor(no_mantissa_forgotten(exponent, mantissa, bias, specials), dtype=torch.float64)


# ---- precision-2: which weights freeze

def half_the_spacing_above(w, update):
    exponent = torch.frexp(w.float())[1] - 1
    return update.abs() <= 2.0 ** (exponent - 8)


def strictly_below_half(w, update):
    return update.abs() < 2.0 ** (torch.frexp(w.float())[1] - 9)


def added_in_bf16(w, update):
    return w + update.bfloat16() == w


def never_rounded(w, update):
    return w.float() + update == w.float()


def by_equal_bits(w, update):
    return (w.float() + update).bfloat16().view(torch.int16) == w.view(torch.int16)


# ---- precision-3: the first step that differs

def step_by_step(same, n):
    return next((i for i in range(n) if not same(i)), -1)


def never_equal_at_the_end(same, n):
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if same(middle) else (low, middle)
    return low


def last_equal_step(same, n):
    if n == 0 or same(n - 1):
        return -1
    low, high = -1, n - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if same(middle) else (low, middle)
    return low


# ---- precision-4: one step with a scaler

def scaler_step(unscale=True, update=True, zero=True, clip=True, step="scaler"):
    def answer(loss, parameters, optimizer, scaler, max_norm):
        if zero:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if clip else 1e9)
        scaler.step(optimizer) if step == "scaler" else optimizer.step()
        if update:
            scaler.update()
        return norm.item()
    return answer


def always_norm_one(loss, parameters, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p.grad *= max_norm / norm
    scaler.step(optimizer)
    scaler.update()
    return norm.item()


# ---- precision-5: AdamW that forgets nothing

def kahan_adamw(keep=True, read=True, correct=True, decoupled=True, into=True):
    def answer(w, c, grad, m, v, step, lr, decay):
        g, old, rest = grad.float(), w.float(), c.float() if read else 0.0
        g = g if decoupled else g + decay * old
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        c1, c2 = (1 - 0.9**step, 1 - 0.95**step) if correct else (1.0, 1.0)
        wanted = -lr * (m / c1 / ((v / c2).sqrt() + 1e-8) + (decay * (old + rest) if decoupled else 0.0)) + rest
        if into:
            w.copy_(old + wanted)
        else:
            w = (old + wanted).bfloat16()
        if keep:
            c.copy_(wanted - (w.float() - old))
        return True
    return answer


# ---- precision-6: six bits

def six_bits(subnormals=True, even=True, saturates=True, signed_zero=True, nan=True):
    def answer(x):
        if nan and x.isnan().any():
            raise ValueError("NaN")
        a = x.abs().double()
        a = a.clamp(max=28.0) if saturates else a.clamp(max=31.0)
        exponent = torch.where(a > 0, torch.frexp(a)[1] - 1, -9)
        exponent = exponent.clamp(min=-2 if subnormals else -9)
        scaled = a / 2.0 ** (exponent - 2).double()
        whole = (scaled.round() if even else (scaled + 0.5).floor()).nan_to_num().long()
        code = (exponent + 2) * 4 + whole
        code = code.clamp(min=0)
        sign = x.signbit() if signed_zero else x < 0
        return ((code + 32 * sign) % 64).to(torch.uint8)
    return answer


RIGHT = [
    ("precision-1", largest_as_tensor),
]
WRONG = {
    "precision-1": [
        (ieee_always, "(4, 3, 7, 'fn')"), (full_top_exponent, "(4, 3, 7, 'fn')"),
        (no_mantissa_forgotten, "fnuz"), (lambda e, m, b, s: 2.0 ** (2**e - 2 - b), "(5, 10, 15, 'ieee')")],
    "precision-2": [
        (half_the_spacing_above, "down from 1"), (strictly_below_half, "half a step up from 1, a tie"),
        (added_in_bf16, "just above half a step up"), (never_rounded, "half a step up from 1"),
        (by_equal_bits, "NaN"), (lambda w, update: w, "boolean"),
        (lambda w, update: ((w.float() + update).bfloat16() == w).flatten(), "shape")],
    "precision-3": [
        (step_by_step, "more than"), (never_equal_at_the_end, "no difference"),
        (last_equal_step, "n = 1, first difference at 0: expected 0"), (lambda same, n: same(n) and -1, "there is no step")],
    "precision-4": [
        (scaler_step(unscale=False), "the norm should be 3.0"), (scaler_step(update=False), "unscale_() is being called after step()"),
        (scaler_step(zero=False), "the norm should be 3.0"), (scaler_step(clip=False), "w should go from 0 to -1"),
        (scaler_step(step="optimizer"), "should be skipped"), (always_norm_one, "below max_norm")],
    "precision-5": [
        (kahan_adamw(keep=False), "300 updates"), (kahan_adamw(read=False), "300 updates"),
        (kahan_adamw(correct=False), "one large step"), (kahan_adamw(decoupled=False), "decay alone"),
        (kahan_adamw(into=False), "w has not changed")],
    "precision-6": [
        (six_bits(subnormals=False), "the 32 values"), (six_bits(even=False), "ties"),
        (six_bits(saturates=False), "too large"), (six_bits(signed_zero=False), "negative"),
        (six_bits(nan=False), "NaN should be"), (lambda x: x.to(torch.uint8), "the 32 values"),
        (lambda x: x, "got torch.float32")],
}
