"""Every solution passes its checker; every planted wrong answer fails and is told where."""
import re
import warnings

import jupytext
import pytest
import torch
import torch.distributed as dist

from companion import exercise
from notebooks import CHAPTERS, code_cells, tags


def solutions():
    """{exercise: source of its solution cell}, from the chapters' text."""
    found = {}
    for path in sorted(CHAPTERS.glob("*.md")):
        for cell in code_cells(jupytext.read(path)):
            if "solution" in tags(cell):
                found |= {id: cell.source for id in re.findall(r'check\("([^"]+)"', cell.source)}
    return found


SOLUTIONS = solutions()


def said(id, answer, capsys):
    exercise.check(id, answer)
    return capsys.readouterr().out.strip()


def test_every_exercise_has_a_solution_and_a_checker():
    assert set(SOLUTIONS) == set(exercise._checks())


@pytest.mark.parametrize("id", SOLUTIONS)
def test_solution_passes(id, capsys):
    exec(SOLUTIONS[id], {"check": exercise.check, "torch": torch})
    assert capsys.readouterr().out.strip() == f"{id}: right"


@pytest.mark.parametrize("id", SOLUTIONS)
@pytest.mark.parametrize("answer", [lambda *a, **k: ..., lambda *a, **k: None, ..., None])
def test_a_starter_is_not_attempted(id, answer, capsys):
    assert said(id, answer, capsys) == f"{id}: not attempted"


# ---- memory-1: states from a recipe

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def no_check_of_formats(parameters, weights, gradients, moments, master=False):
    each = SIZES.get(weights, 4) + SIZES.get(gradients, 4) + 2 * SIZES.get(moments, 4)
    return parameters * (each + (4 if master and weights != "fp32" else 0))


def no_errors(parameters, weights, gradients, moments, master=False):
    if not {weights, gradients, moments} <= set(SIZES):
        raise ValueError("unknown format")
    return no_check_of_formats(parameters, weights, gradients, moments, master)


def a_key_error(parameters, weights, gradients, moments, master=False):
    each = SIZES[weights] + SIZES[gradients] + 2 * SIZES[moments]
    return parameters * (each + (4 if master and weights != "fp32" else 0))


def one_moment(parameters, weights, gradients, moments, master=False):
    return parameters * (SIZES[weights] + SIZES[gradients] + SIZES[moments])


def master_always(parameters, weights, gradients, moments, master=False):
    return parameters * (SIZES[weights] + SIZES[gradients] + 2 * SIZES[moments] + 4 * master)


def gradients_like_weights(parameters, weights, gradients, moments, master=False):
    each = 2 * SIZES[weights] + 2 * SIZES[moments]
    return parameters * (each + (4 if master and weights != "fp32" else 0))


# ---- memory-2: the cache of one GPU

def cache_without_values(layers, kv_heads, head_dim, tokens, itemsize, tp):
    return layers * max(1, kv_heads // tp) * head_dim * tokens * itemsize


def cache_divided(layers, kv_heads, head_dim, tokens, itemsize, tp):
    return 2 * layers * kv_heads * head_dim * tokens * itemsize / tp


def cache_vanishes(layers, kv_heads, head_dim, tokens, itemsize, tp):
    return 2 * layers * (kv_heads // tp) * head_dim * tokens * itemsize


def cache_replicated(layers, kv_heads, head_dim, tokens, itemsize, tp):
    return 2 * layers * kv_heads * head_dim * tokens * itemsize


# ---- memory-3: the largest batch

def one_by_one(peak, budget):
    batch = 0
    while peak(batch + 1) <= budget:
        batch += 1
    return batch


def by_proportion(peak, budget):
    return budget // peak(1)


def by_slope(peak, budget):
    slope = peak(2) - peak(1)
    return max(0, (budget - peak(1)) // slope + 1) if slope else 2**20


def powers_of_two(peak, budget):
    batch = 1
    while peak(2 * batch) <= budget:
        batch *= 2
    return batch if peak(1) <= budget else 0


def strictly_below(peak, budget):
    fits, fails = 0, 1
    while peak(fails) < budget:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if peak(middle) < budget else (fits, middle)
    return fits


# ---- memory-4: what a job holds

def everything(model, optimizer):
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return tensors + [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]


def by_numel(model, optimizer):
    return sum(t.numel() * t.element_size() for t in everything(model, optimizer))


def by_state_dict(model, optimizer):
    rest = everything(model, optimizer)[len([*model.parameters(), *model.buffers()]):]
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in [*model.state_dict().values(), *rest]}
    return sum(held.values())


def gradients_assumed(model, optimizer):
    return sum(p.grad.untyped_storage().nbytes() for p in model.parameters())


def no_buffers(model, optimizer):
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in everything(model, optimizer) if not any(t is b for b in model.buffers())}
    return sum(held.values())


def once_per_tensor(model, optimizer):
    return sum(t.untyped_storage().nbytes() for t in everything(model, optimizer))


# ---- memory-5: LoRA's activations

def lora_right(batch, seq, hidden, heads, kv_heads, ffn, rank, targets, k=None, norm=0,
               frozen_inputs=False):
    k = hidden // heads * kv_heads if k is None else k
    t = set(targets)
    token = 2 * (4 * hidden + 4 + norm) + 4 * hidden + 4 * k + 4 * heads + 6 * ffn
    token += 2 * rank * len(t)
    token += 2 * hidden * (bool(t & {"q", "k", "v"}) or frozen_inputs)
    token += 2 * hidden * (bool(t & {"gate", "up"}) or frozen_inputs)
    token += 2 * ffn * ("down" in t or frozen_inputs)
    return batch * seq * token


def lora_saves_nothing(*case):
    return lora_right(*case, frozen_inputs=True)


def lora_norms_as_if_trained(batch, seq, hidden, *rest):
    return lora_right(batch, seq, hidden, *rest, norm=2 * hidden)


def lora_without_groups(batch, seq, hidden, *rest):
    return lora_right(batch, seq, hidden, *rest, k=hidden)


def lora_without_the_ranks(batch, seq, hidden, heads, kv_heads, ffn, rank, targets):
    return lora_right(batch, seq, hidden, heads, kv_heads, ffn, 0, targets)


def lora_adapters_alone(batch, seq, hidden, heads, kv_heads, ffn, rank, targets):
    return batch * seq * 2 * rank * len(targets)


# ---- memory-6: a step on a budget

def whole_tensor(p, grad, m, v, step, lr, eps=1e-8, correct=True):
    with torch.no_grad():
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        one, two = (1 - 0.9**step, 1 - 0.999**step) if correct else (1, 1)
        p.addcdiv_(m, (v / two).sqrt_().add_(eps), value=-lr / one)
    return True


def by_rows(p, grad, m, v, step, lr):
    if p.dim() < 2:
        return whole_tensor(p, grad, m, v, step, lr)
    for i in range(p.shape[0]):
        whole_tensor(p[i], grad[i], m[i], v[i], step, lr)
    return True


def flattened(p, grad, m, v, step, lr):
    parts = [t.reshape(-1).split(4096) for t in (p, grad, m, v)]  # a copy where p is not contiguous
    for part in zip(*parts):
        whole_tensor(*part, step, lr)
    return True


def in_pieces(update):
    def answer(p, grad, m, v, step, lr):
        if p.numel() <= 4096:
            return update(p, grad, m, v, step, lr)
        dim = max(range(p.dim()), key=p.size)
        half = p.size(dim) // 2
        for at, length in (0, half), (half, p.size(dim) - half):
            answer(*(t.narrow(dim, at, length) for t in (p, grad, m, v)), step, lr)
        return True
    return answer


def uncorrected(p, grad, m, v, step, lr):
    return whole_tensor(p, grad, m, v, step, lr, correct=False)


def no_epsilon(p, grad, m, v, step, lr):
    return whole_tensor(p, grad, m, v, step, lr, eps=0)


def moments_forgotten(p, grad, m, v, step, lr):
    return whole_tensor(p, grad, m.clone(), v.clone(), step, lr)


def does_nothing(p, grad, m, v, step, lr):
    return True


def nothing_for_the_unknown(parameters, weights, gradients, moments, master=False):
    if {weights, gradients, moments} <= set(SIZES):
        return no_check_of_formats(parameters, weights, gradients, moments, master)


def nothing_if_none_fits(peak, budget):
    if peak(1) <= budget:
        return one_by_one(peak, budget)


def returns_nothing(p, grad, m, v, step, lr):
    in_pieces(whole_tensor)(p, grad, m, v, step, lr)


def not_in_place(p, grad, m, v, step, lr):
    p = p[:1] - lr * grad[:1]


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


# ---- checkpointing-1: the price of a policy

def price_right(blocks, lasts, every, free_last=False, early=True, check=True, ends=None):
    if check and every < 1:
        raise ValueError(every)
    starts = range(0, len(blocks), every)
    again = 0
    for start in starts[:-1] if free_last else starts:
        stop = min(start + every, len(blocks))
        again += sum(blocks[start:stop]) - early * (lasts[stop - 1] if ends is None else ends(lasts[start:stop]))
    return 1 + again / (3 * sum(blocks))


def price_a_third(blocks, lasts, every, free_last=False):
    return price_right(blocks, lasts, every, free_last, early=False)


def price_every_block_stops(blocks, lasts, every, free_last=False):
    return price_right(blocks, lasts, every, free_last, ends=sum)


def price_never_free(blocks, lasts, every, free_last=False):
    return price_right(blocks, lasts, every)


def price_drops_the_rest(blocks, lasts, every, free_last=False):
    whole = len(blocks) // every * every
    return price_right(blocks[:whole], lasts[:whole], every, free_last)


def price_of_nothing(blocks, lasts, every, free_last=False):
    return price_right(blocks, lasts, every, free_last) if every > 0 else 1.0


# ---- checkpointing-2: unequal segments

def peak_of_equal_segments(layers, boundary, internals):
    return min((-(-layers // k) - 1) * boundary + k * internals for k in range(1, layers + 1))


def peak_at_the_root(layers, boundary, internals):
    k = max(1, round(layers**0.5))
    return (-(-layers // k) - 1) * boundary + k * internals


def peak_by_continuous_formula(layers, boundary, internals):
    return 2 * (layers * boundary * internals) ** 0.5 - boundary


def peak_of_keeping_all(layers, boundary, internals):
    return layers * internals


def peak_by_all_cuts(layers, boundary, internals):
    def least(left, i):
        if not left:
            return 0
        return min(max(i * boundary + k * internals, least(left - k, i + 1)) for k in range(1, left + 1))
    return least(layers, 0) if layers < 8 else -1


# ---- checkpointing-3: a policy by numbers

def _policy_where(test, first=None):
    from torch.utils.checkpoint import CheckpointPolicy
    first = first or {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}

    def policy(ctx, op, *args, **kwargs):
        if op in first and test(*args[first[op] + 1].shape):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
    return policy


def policy_by_family(ctx, op, *args, **kwargs):
    first = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1}
    return _policy_where(lambda i, o: o < i, first)(ctx, op, *args, **kwargs)


def policy_keeps_all(ctx, op, *args, **kwargs):
    return _policy_where(lambda i, o: True)(ctx, op, *args, **kwargs)


def policy_without_bias(ctx, op, *args, **kwargs):
    return _policy_where(lambda i, o: o < i, {torch.ops.aten.mm.default: 0})(ctx, op, *args, **kwargs)


def policy_reads_the_input(ctx, op, *args, **kwargs):
    first = {torch.ops.aten.mm.default: -1, torch.ops.aten.addmm.default: 0}
    return _policy_where(lambda rows, i: i < rows, first)(ctx, op, *args, **kwargs)


def policy_shape_first(ctx, op, *args, **kwargs):
    inputs, outputs = args[-1].shape
    return _policy_where(lambda i, o: o < i)(ctx, op, *args, **kwargs)


def policy_with_squares(ctx, op, *args, **kwargs):
    return _policy_where(lambda i, o: o <= i)(ctx, op, *args, **kwargs)


# ---- checkpointing-4: the best plan

def plan_where(peak, order=lambda plans: plans, none=None):
    def answer(layers, boundary, internals, budget):
        plans = [(kept, every) for kept in range(layers, -1, -1)
                 for every in range(1, max(layers - kept, 1) + 1)
                 if peak(layers, kept, every, boundary, internals) <= budget]
        if not plans:
            if none is None:
                raise ValueError(budget)
            return none
        return order(plans)[0]
    return answer


def plan_peak(layers, kept, every, boundary, internals):
    lengths = [min(every, layers - kept - at) for at in range(0, layers - kept, every)]
    moments = [i * boundary + length * internals for i, length in enumerate(lengths)]
    return max(moments + ([len(lengths) * boundary + kept * internals] if kept else []))


def plan_sum(layers, kept, every, boundary, internals):
    return -(-(layers - kept) // every) * boundary + (kept + min(every, layers - kept)) * internals


def plan_forward_only(layers, kept, every, boundary, internals):
    return -(-(layers - kept) // every) * boundary + kept * internals


def plan_equal_lengths(layers, kept, every, boundary, internals):
    n = -(-(layers - kept) // every)
    return max(n * boundary + kept * internals if kept else 0, (n - 1) * boundary + every * internals if n else 0)


# ---- checkpointing-5: within a budget

def run_plan(choose, itemsize=4, **options):
    def answer(blocks, x, internals, budget):
        from torch.utils.checkpoint import checkpoint
        L, B = len(blocks), x.numel() * itemsize
        kept, every = choose(L, B, internals, budget)
        for start in range(0, L - kept, every):
            def segment(x, part=blocks[start:min(start + every, L - kept)]):
                for block in part:
                    x = block(x)
                return x
            x = checkpoint(segment, x, use_reentrant=False, **options)
        for block in blocks[L - kept:]:
            x = block(x)
        return x
    return answer


budget_right = plan_where(plan_peak)


def budget_ignored(blocks, x, internals, budget):
    return run_plan(lambda L, *_: (L, 1))(blocks, x, internals, budget)


def budget_off_by_one(blocks, x, internals, budget):
    return run_plan(lambda L, B, I, most: budget_right(L, B, I, most + 1))(
        blocks, x, internals, budget)


def budget_of_the_root(blocks, x, internals, budget):
    return run_plan(lambda L, *_: (0, max(1, round(L**0.5))))(blocks, x, internals, budget)


def budget_thrift(blocks, x, internals, budget):
    return run_plan(lambda L, *_: (0, 1))(blocks, x, internals, budget)


def budget_careless(blocks, x, internals, budget):
    return run_plan(budget_right, preserve_rng_state=False)(blocks, x, internals, budget)


def budget_late_binding(blocks, x, internals, budget):
    from torch.utils.checkpoint import checkpoint
    L = len(blocks)
    kept, every = budget_right(L, x.numel() * x.element_size(), internals, budget)
    for start in range(0, L - kept, every):
        def segment(x):
            for block in blocks[start:min(start + every, L - kept)]:
                x = block(x)
            return x
        x = checkpoint(segment, x, use_reentrant=False)
    for block in blocks[L - kept:]:
        x = block(x)
    return x


def budget_first_kept(blocks, x, internals, budget):
    kept, every = budget_right(len(blocks), x.numel() * x.element_size(), internals, budget)
    for block in blocks[:kept]:
        x = block(x)
    return run_plan(lambda *_: (0, every))(blocks[kept:], x, internals, budget)


def budget_untrained(blocks, x, internals, budget):
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    return x


def budget_never_refuses(blocks, x, internals, budget):
    return run_plan(plan_where(plan_peak, none=(0, 1)))(blocks, x, internals, budget)


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


# ---- profiling-1: utilization

def refusing(formula):
    def answer(parameters, tokens, seconds, gpus, peak):
        if min(parameters, tokens, seconds, gpus, peak) <= 0:
            raise ValueError("not positive")
        share = formula(parameters, tokens, seconds, gpus, peak)
        if share > 1:
            raise ValueError("above 1")
        return share
    return answer


def accepts_everything(P, D, seconds, gpus, peak):
    return 6 * P * D / (seconds * gpus * peak)


def above_one(P, D, seconds, gpus, peak):
    if min(P, D, seconds, gpus, peak) <= 0:
        raise ValueError("not positive")
    return 6 * P * D / (seconds * gpus * peak)


# ---- profiling-2: idle time

def sum_of_durations(kernels):
    if not kernels:
        raise ValueError("empty")
    span = max(s + d for s, d in kernels) - min(s for s, _ in kernels)
    return 1 - sum(d for _, d in kernels) / span


def gaps_in_the_order_given(kernels, sort=False, in_place=False):
    if not kernels:
        raise ValueError("empty")
    if in_place:
        kernels.sort()
    kernels = sorted(kernels) if sort else kernels
    gaps = sum(max(0, b[0] - a[0] - a[1]) for a, b in zip(kernels, kernels[1:]))
    return gaps / (max(s + d for s, d in kernels) - min(s for s, _ in kernels))


def from_zero(kernels):
    if not kernels:
        raise ValueError("empty")
    covered = {t for s, d in kernels for t in range(s, s + d)}
    return 1 - len(covered) / max(s + d for s, d in kernels)


def idle_in_place(kernels):
    kernels.sort()
    return 1 - len({t for s, d in kernels for t in range(s, s + d)}) / (
        max(s + d for s, d in kernels) - kernels[0][0])


def idle_without_guard(kernels):
    kernels = sorted(kernels)
    first = reached = kernels[0][0]
    idle = 0
    for start, duration in kernels:
        idle += max(0, start - reached)
        reached = max(reached, start + duration)
    return idle / (reached - first)


# ---- profiling-3: apart and fused

def fused_by(count):
    def answer(function, *inputs):
        from companion.bench import Traffic
        with Traffic() as seen:
            results = function(*inputs)
        results = (results,) if isinstance(results, torch.Tensor) else results
        return seen.bytes, count(inputs, results)
    return answer


def all_numel(inputs, results):
    return sum(t.numel() * t.element_size() for t in (*inputs, *results))


def by_storage_apart(inputs, results):
    return sum(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in side}.values())
               for side in (inputs, results))


def results_only(inputs, results):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in results}.values())


# ---- profiling-4: a timer

def no_wait(device):
    start = device.clock()
    for _ in range(100):
        device.launch()
    return (device.clock() - start) / 100


def one_call(device, warm_ups=3):
    for _ in range(warm_ups):
        device.launch()
    device.synchronize()
    start = device.clock()
    device.launch()
    device.synchronize()
    return device.clock() - start


def no_warm_up(device):
    device.synchronize()
    start = device.clock()
    for _ in range(20):
        device.launch()
    device.synchronize()
    return (device.clock() - start) / 20


def waits_at_the_end_only(device):
    start = device.clock()
    for _ in range(100):
        device.launch()
    device.synchronize()
    return (device.clock() - start) / 100


def a_mean(device, count=200):
    one_call(device)
    start = device.clock()
    for _ in range(count):
        device.launch()
    device.synchronize()
    return (device.clock() - start) / count


def median_of_single_calls(device):
    one_call(device)
    return sorted(one_call(device, 0) for _ in range(15))[7]


def too_long(device):
    return a_mean(device, 10_000)


# ---- profiling-5: the pipeline

def longer_of_the_two(loads, computes, depth):
    if not depth:
        return sum(loads) + sum(computes), sum(loads)
    end = loads[0] + sum(max(a, b) for a, b in zip(loads[1:] + [0], computes)) if loads else 0
    return end, end - sum(computes)


def room_for(extra):
    def answer(loads, computes, depth):
        put, free, taken = 0, 0, []
        for i, (load, compute) in enumerate(zip(loads, computes)):
            put = (put if depth else free) + load
            if depth and i >= depth + extra:
                put = max(put, taken[i - depth - extra])
            taken.append(max(put, free))
            free = taken[-1] + compute
        return free, free - sum(computes)
    return answer


def always_ahead(loads, computes, depth):
    return room_for(0)(loads, computes, max(depth, 1))


def idle_of_the_loader(loads, computes, depth):
    end, _ = room_for(0)(loads, computes, depth)
    return end, end - sum(loads)


# ---- accumulation-1: factors

def factors_mean_of_means(counts):
    return [1 / len(counts) if count else 0.0 for count in counts]


def factors_no_guard(counts):
    return [count / sum(counts) for count in counts]


def factors_skip_empty(counts):
    return [count / sum(counts) for count in counts if count]


# ---- accumulation-2: the fewest pieces

def pieces_by(first=12, later=16, step=16, whole=True):
    def answer(parameters, each, batch, budget):
        for k in range(1, batch + 1):
            rows = -(-batch // k) if whole else batch / k
            held = (first if k == 1 else later) * parameters + rows * each
            if max(held, step * parameters) <= budget:
                return k
        return 0
    return answer


def pieces_that_divide(parameters, each, batch, budget):
    right = pieces_by()
    k = right(parameters, each, batch, budget)
    while k and k < batch and batch % k:
        k += 1
    return k


# ---- accumulation-3: token weights

def weights_by_length(pieces):
    return [torch.full((len(p),), 1 / max(len(p), 1)) for p in pieces]


def weights_empty_counted(pieces):
    total = sum(len(p) for p in pieces)
    return [torch.full((len(p),), total / (len(pieces) * max(len(p), 1))) for p in pieces]


def weights_upside_down(pieces):
    total, used = sum(len(p) for p in pieces), sum(len(p) > 0 for p in pieces)
    return [torch.full((len(p),), used * len(p) / total) for p in pieces]


# ---- accumulation-4: exact for any split

def stream_loop(reduction="sum", divide="targets", zero=True, skip=True, report="mean"):
    def answer(model, stream):
        if zero:
            model.zero_grad()
        total, targets, rows, pieces = 0.0, 0, 0, 0
        for x, y in stream:
            n = int((y != -100).sum())
            rows, pieces = rows + len(y), pieces + 1
            if n or not skip:
                loss = torch.nn.functional.cross_entropy(model(x), y, reduction=reduction)
                loss.backward()
                total, targets = total + loss.item(), targets + n
        by = {"targets": targets, "rows": rows, "pieces": pieces, "nothing": 1}[divide]
        for p in model.parameters():
            if p.grad is not None and by:
                p.grad /= by
        return total / max(by, 1) if report == "mean" else total
    return answer


def all_at_once(model, stream):
    pieces = list(stream)
    model.zero_grad()
    if not any((y != -100).any() for _, y in pieces):
        return 0.0
    x, y = (torch.cat(t) for t in zip(*pieces))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def graphs_kept(model, stream):
    model.zero_grad()
    total, targets = 0.0, 0
    for x, y in stream:
        n = int((y != -100).sum())
        if n:
            total = total + torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
            targets += n
    if not targets:
        return 0.0
    (total / targets).backward()
    return (total / targets).item()


def graphs_kept_from_a_list(model, stream):
    return graphs_kept(model, list(stream))  # the stream is over before the first forward pass


def stream_collected(model, stream):
    return stream_loop()(model, list(stream))


def stream_never_detached(model, stream):
    model.zero_grad()
    total, targets = 0.0, 0
    for x, y in stream:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        total, targets = total + loss, targets + (y != -100).sum()
    for p in model.parameters():
        if p.grad is not None and targets:
            p.grad /= targets
    return total / max(targets, 1)


# ---- accumulation-5: packing a stream

def stream_pack(best=True, oldest=True, fullest=True, guard=True, forget=False):
    def answer(lengths, row, open_rows):
        if guard and (open_rows < 1 or any(not 0 < n <= row for n in lengths)):
            raise ValueError("no")
        rows, room = [], {}
        for i, n in enumerate(lengths):
            fitting = [r for r in room if room[r] >= n]
            if fitting:
                order = fitting if oldest else fitting[::-1]
                at = min(order, key=room.get) if best else order[0]
            else:
                if len(room) >= max(open_rows, 1):
                    del room[min(room, key=room.get) if fullest else next(iter(room))]
                at = len(rows)
                rows.append([])
                room[at] = row
            rows[at].append(i)
            room[at] -= n
        return rows
    return answer


# ---- accumulation-6: the tensors of packed rows

def packed_with(border=False, padding=-100, ids=True, guard=True, dtype=torch.long):
    def answer(rows, length):
        if guard and any(sum(len(d) for d in row) > length for row in rows):
            raise ValueError("too long")
        inputs = torch.zeros(len(rows), length, dtype=dtype)
        labels = torch.full((len(rows), length), padding, dtype=dtype)
        numbers = torch.full((len(rows), length), -1, dtype=dtype)
        for n, row in enumerate(rows):
            at = 0
            for i, d in enumerate(row):
                end = at + len(d)
                inputs[n, at:end] = d[:length - at]
                labels[n, at:end] = -100
                labels[n, at:end - 1] = d[1:length - at]
                if border and at and len(d):
                    labels[n, at - 1] = d[0]
                numbers[n, at:end] = i if ids else 0
                at = end
        return inputs, labels, numbers
    return answer


# ---- optimizers-1: state from shapes

def state_for(muon_takes=2, factor=True, check=True, batch=True):
    fixed = {"sgd": 0, "momentum": 4, "lion": 4, "adamw": 8}

    def answer(shapes, optimizer):
        if check and optimizer not in (*fixed, "adafactor", "muon"):
            raise ValueError(optimizer)
        total = 0
        for shape in shapes:
            n = 1
            for size in shape:
                n *= size
            if optimizer == "muon":
                total += n * (4 if len(shape) >= 2 and len(shape) <= muon_takes else 8)
            elif optimizer == "adafactor":
                if not factor or len(shape) < 2:
                    total += 4 * n
                else:
                    many = n // (shape[-1] * shape[-2]) if batch else 1
                    total += 4 * many * (shape[-1] + shape[-2])
            else:
                total += n * fixed.get(optimizer, 0)
        return total
    return answer


# ---- optimizers-2: Lion in one temporary

def lion_with(early=False, coupled=False, copies=False, outside=False, keep_g=True):
    def answer(w, g, m, lr, betas, decay):
        if not keep_g:
            g.mul_(1 - betas[0]).add_(betas[0] * m)
            w.mul_(1 - lr * decay).sub_(lr * g.sign())
            return True
        if early:
            m.lerp_(g, 1 - betas[1])
        if copies:
            d = torch.sign(betas[0] * m + (1 - betas[0]) * g)
        else:
            d = torch.lerp(m, g, 1 - betas[0]).sign_()
        if coupled:
            d.add_(w, alpha=decay).sign_()
            w.add_(d, alpha=-lr)
        elif outside:
            w = w * (1 - lr * decay) - lr * d
        else:
            w.mul_(1 - lr * decay).add_(d, alpha=-lr)
        if not early:
            m.lerp_(g, 1 - betas[1])
        return True
    return answer


# ---- optimizers-3: Adam on a budget

def adam_kept_in(*kinds, block=256, correct=True, beta2=0.95):
    """kinds: how m and v are kept: "fp32", "bf16", "dynamic" or "linear"."""
    from companion import optimizers

    def levels(name, kind):
        if kind == "dynamic":
            return optimizers.dynamic_levels(name == "m")
        return torch.linspace(-1.0 if name == "m" else 0.0, 1, 255)

    def answer(g, state, t):
        moments = []
        for name, kind in zip("mv", kinds):
            kept = state.get(name)
            if kept is None:
                moments.append(torch.zeros_like(g))
            elif kind in ("fp32", "bf16"):
                moments.append(kept.float())
            else:
                moments.append(optimizers.decode(*kept, levels(name, kind)))
        d = optimizers.adamw(g, *moments, t if correct else 10**6, betas=(0.9, beta2))
        for name, kind, moment in zip("mv", kinds, moments):
            if kind in ("fp32", "bf16"):
                state[name] = moment.to(torch.float32 if kind == "fp32" else torch.bfloat16)
            else:
                state[name] = optimizers.encode(moment, levels(name, kind), block)
        return d
    return answer


# ---- optimizers-4: step inside backward

def in_backward(free=True, complete=True, frozen=False, together=False):
    def answer(model, make):
        optimizers = []
        for p in model.parameters():
            if not p.requires_grad and not frozen:
                continue
            optimizer = make([p])
            optimizers.append(optimizer)

            def step(p, optimizer=optimizer):
                optimizer.step()
                if free:
                    p.grad = None

            def early(g, p=p, optimizer=optimizer):
                p.grad = g
                optimizer.step()
                p.grad = None

            if together:
                continue
            elif complete:
                p.register_post_accumulate_grad_hook(step)
            else:
                p.register_hook(early)
        return optimizers
    return answer


# ---- optimizers-5: Muon without gathering

def muon_on_rows(norm="whole", gram="whole", again=False, side="right", norm_apart=False):
    def answer(rows, all_reduce, coefficients=(3.4445, -4.775, 2.0315)):
        a, b, c = coefficients
        local = rows.T @ rows
        A = all_reduce(local) if gram == "whole" else local
        if norm_apart:
            size = all_reduce(rows.square().sum()[None]).sqrt()
        else:
            size = (A.trace() if norm == "whole" else rows.square().sum()).sqrt()
        X, A = rows / size, A / size**2
        for _ in range(5):
            P = a * torch.eye(len(A), dtype=A.dtype) + b * A + c * A @ A
            X = X @ P
            A = all_reduce(X.T @ X) if again else P @ A @ P if side == "right" else P @ A
        return X
    return answer


def muon_gathers(rows, all_reduce):
    return all_reduce(rows)


# ---- data_parallel

def held_by(guard=True, units=True, gradients=2, weights=3):
    def held_bytes(sizes, ranks, stage):
        if guard and stage not in (0, 1, 2, 3):
            raise ValueError(stage)
        whole = sum(sizes)
        part = sum(-(-s // ranks) for s in sizes) if units else -(-whole // ranks)
        return (2 * (part if stage >= weights else whole) + 2 * (part if stage >= gradients else whole)
                + 12 * (part if stage >= 1 else whole))
    return held_bytes


def step_by(guard=True, less=1, **other):
    def step_bytes(form, size, ranks, k):
        times = {"ddp": 2 * k, "ddp no_sync": 2, "zero-1": 2, "zero-2": k + 1, "zero-3": 3 * k,
                 "fsdp kept": 2 * k} | {name.replace("_", "-"): f(k) for name, f in other.items()}
        if guard and form not in times:
            raise ValueError(form)
        return times.get(form, 2) * size * (ranks - less) / ranks
    return step_bytes


def zero_by(mean=True, pad=True, decay=0.9, gather=True):
    def zero_step(weights, gradients, momenta, lr, reduce_scatter, all_gather):
        n, N, part = len(weights), len(weights[0]), len(momenta[0])
        padded = [torch.nn.functional.pad(t, (0, n * part - N if pad else 0)) for t in gradients]
        slices = []
        for r, g in enumerate(reduce_scatter(padded)):
            momenta[r].mul_(decay).add_(g / n if mean else g)
            w = torch.nn.functional.pad(weights[r], (0, n * part - N))[r * part:(r + 1) * part]
            slices.append(w - lr * momenta[r])
        whole = all_gather(slices) if gather else [torch.cat(slices)] * n
        for w, new in zip(weights, whole):
            w.copy_(new[:N])
    return zero_step


def mean_of_means(parameters, count):
    import torch.distributed as dist
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() / count
                      for p in parameters])
    dist.all_reduce(flat)
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = g.view_as(p) / dist.get_world_size()


def nan_where_none(parameters, count):
    import torch.distributed as dist
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() / count
                      for p in parameters])
    flat = torch.cat([flat * count, torch.tensor([count]).double()])
    dist.all_reduce(flat)
    for p, g in zip(parameters, (flat[:-1] / flat[-1]).split([p.numel() for p in parameters])):
        p.grad = g.view_as(p)


def each_by_itself(parameters, count):
    import torch.distributed as dist
    count = torch.tensor(float(count)).double()
    dist.all_reduce(count)
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= count


def forgets_the_empty_rank(parameters, count):
    import torch.distributed as dist
    flat = torch.cat([p.grad.flatten() for p in parameters] + [torch.tensor([count]).double()])
    dist.all_reduce(flat)
    for p, g in zip(parameters, (flat[:-1] / flat[-1]).split([p.numel() for p in parameters])):
        p.grad = g.view_as(p)


def linear_by(keep=False, reduce=True, mean=1):
    def sharded_linear(x, shard):
        import torch.distributed as dist

        from companion.wire import all_gather, reduce_scatter

        def whole(part):
            w = part.new_empty(2 * len(part), part.shape[1])
            all_gather(w, part.detach())
            return w

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, shard):
                w = whole(shard)
                ctx.save_for_backward(x, w if keep else shard)
                return x @ w.T

            @staticmethod
            def backward(ctx, dy):
                x, w = ctx.saved_tensors
                dw = (dy.T @ x).contiguous()
                part = torch.empty_like(dw.chunk(2)[0])
                if reduce:
                    reduce_scatter(part, dw)
                else:
                    dist.all_reduce(dw)
                    part = dw.chunk(2)[dist.get_rank()].clone()
                return dy @ (w if keep else whole(w)), part / mean

        return Linear.apply(x, shard)
    return sharded_linear


def linear_without_backward(x, shard):
    from companion.wire import all_gather
    w = shard.new_empty(2 * len(shard), shard.shape[1])
    all_gather(w, shard.detach())
    return x @ w.T


# exercise -> [(wrong answer, what its message must name)]
# ---- context_expert_parallel

def share_by(diagonal=0.5, source=lambda r, step, n: (r - step) % n, per=max):
    def share(owners):
        n, total, longest = len(owners), 0.0, 0.0
        for step in range(n):
            units = [sum((a > b) + (a == b) * diagonal for a in owners[r] for b in owners[source(r, step, n)])
                     for r in range(n)]
            total, longest = total + sum(units), longest + per(units)
        return total / (n * longest)
    return share


def share_without_steps(owners):
    """Waits at the end only, not after each step."""
    n = len(owners)
    busy = [sum((a > b) + (a == b) / 2 for a in own for other in owners for b in other) for own in owners]
    return sum(busy) / (n * max(busy))


def join_one_by_one(outs, lses):
    """Right until two pieces without a key meet: -inf minus -inf."""
    out, lse = outs[0], lses[0]
    for more, more_lse in zip(outs[1:], lses[1:]):
        total = torch.logaddexp(lse, more_lse)
        out = out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None]
        lse = total
    return out, lse


def join_by(stable=True, weigh=True, minus=True):
    def join(outs, lses):
        stacked = torch.stack(lses)
        total = stacked.logsumexp(0) if stable else stacked.exp().sum(0).log()
        if not minus:  # piece by piece, from the difference: -inf minus -inf
            one = stacked[len(outs) // 2]
            total = one + (stacked - one).exp().sum(0).log()
        weights = [(lse - total).exp()[..., None] if weigh else 1 / len(outs) for lse in lses]
        return sum(w * out for w, out in zip(weights, outs)), total
    return join


def shards_by(layout="zigzag", shift="before", guard=True, places="global"):
    def zigzag_shards(tokens, n):
        T = len(tokens) - 1
        if guard and T % (2 * n):
            raise ValueError(T)
        chunks, out = torch.arange(T - T % (2 * n)).chunk(2 * n), []
        for r in range(n):
            other = 2 * n - 1 - r if layout == "zigzag" else r + n
            at = torch.cat([chunks[r], chunks[other]])
            labels = tokens[at + 1] if shift == "before" else tokens[at].roll(-1)
            out.append((tokens[at], labels, at if places == "global" else torch.arange(len(at))))
        return out
    return zigzag_shards


def ring_by(rescale=True, mask=True, passes=None, group=True):
    def one_rank(q, k, v, rank, n, pass_right):
        kv, groups, out = torch.stack([k, v]), len(q) // len(k), torch.zeros_like(q)
        lse = torch.full_like(q[..., 0], -torch.inf)
        for step in range(n):
            source = (rank - step) % n
            if source <= rank:
                keys, values = (kv.repeat_interleave(groups, 1) if group else kv.repeat(1, groups, 1, 1))
                s = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
                if source == rank and mask:
                    s = s + torch.full_like(s, -torch.inf).triu(1)
                more = s.logsumexp(-1)
                total = torch.logaddexp(lse, more)
                a, b = ((lse - total).exp(), (more - total).exp()) if rescale else (torch.ones_like(lse),) * 2
                out, lse = out * a[..., None] + s.softmax(-1) @ values * b[..., None], total
            if step < (n - 1 if passes is None else n + passes(rank)):
                kv = pass_right(kv)
        return out
    return one_rank


def ring_gathers(q, k, v, rank, n, pass_right):
    kv = torch.stack([k, v])
    parts = {rank: kv}
    for step in range(1, n):
        kv = pass_right(kv)
        parts[(rank - step) % n] = kv
    keys, values = torch.cat([parts[r] for r in range(rank + 1)], 2)
    keys, values = (x.repeat_interleave(len(q) // len(k), 0) for x in (keys, values))
    s = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
    c = q.shape[1]
    s = s + torch.full_like(s, -torch.inf).triu(1 + rank * c)
    return s.softmax(-1) @ values


def ring_by_shared_memory(q, k, v, rank, n, pass_right, shared={}):
    """Right where ranks are played in one process; real ones share no dictionary."""
    shared[rank] = torch.stack([k, v])
    pass_right(q[:0])  # a barrier
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for source in range(rank + 1):
        keys, values = shared[source].repeat_interleave(len(q) // len(k), 1)
        s = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        if source == rank:
            s = s + torch.full_like(s, -torch.inf).triu(1)
        more = s.logsumexp(-1)
        total = torch.logaddexp(lse, more)
        out = out * (lse - total).exp()[..., None] + s.softmax(-1) @ values * (more - total).exp()[..., None]
        lse = total
    pass_right(q[:0])
    return out


def ring_of_names(q, k, v, rank, n, pass_right):
    """Right, but by a name of its module, which real ranks do not have."""
    return ring_by()(q, k, v, rank, n, pass_right)


def dispatch_by(weigh=True, softmax="chosen", add=True, everything=False):
    def moe_rank(x, logits, k, expert, all_to_all):
        best, n = logits.topk(k, -1), logits.shape[1]
        values = best.values.softmax(-1) if softmax == "chosen" else logits.softmax(-1).gather(1, best.indices)
        weights = torch.zeros_like(logits).scatter(1, best.indices, values if weigh else torch.ones_like(values))
        chosen = torch.zeros_like(logits).scatter(1, best.indices, 1).bool() | everything
        mine = [chosen[:, e].nonzero()[:, 0] for e in range(n)]
        got = all_to_all([x[rows] for rows in mine])
        back = all_to_all(list(expert(torch.cat(got)).split([len(rows) for rows in got])))
        out = torch.zeros_like(x)
        for e, rows in enumerate(mine):
            part = back[e] * weights[rows, e, None]
            out[rows] = out[rows] + part if add else part
        return out
    return moe_rank


# ---- collectives

def sent_by(factor=2, less=1, guard=True):
    def bytes_sent(collective, n, size):
        if guard and collective not in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all"):
            raise ValueError(collective)
        return (factor if collective == "all-reduce" else 1) * (n - less) * size // n
    return bytes_sent


def crossing_by(log=lambda n: (n - 1).bit_length(), more=lambda n, steps: steps - 2 * (n - 1) / n):
    def crossing(n, alpha, beta):
        steps = 2 * log(n)
        extra = more(n, steps)
        return (2 * (n - 1) - steps) * alpha / (extra * beta) if extra else float("inf")
    return crossing


def own_chunk_by(begin=1, copy=False, in_place=False):
    """A ring of isend and recv. begin: how far left of its own chunk a rank begins."""
    def own_chunk(x, rank, n):
        chunks = (x.clone() if copy else x).tensor_split(n)
        passed = chunks[(rank - begin) % n].clone()
        for step in range(1, n):
            mine = chunks[(rank - begin - step) % n]
            work = dist.isend(passed, (rank + 1) % n)
            got = torch.empty_like(mine)
            dist.recv(got, (rank - 1) % n)
            work.wait()
            passed = mine.add_(got) if in_place else got + mine
        return passed
    return own_chunk


def own_chunk_directly(x, rank, n):
    """No ring: each chunk goes straight to its rank; as many bytes."""
    chunks = x.tensor_split(n)
    total, got = chunks[rank].clone(), torch.empty_like(chunks[rank])
    for step in range(1, n):
        work = dist.isend(chunks[(rank + step) % n], (rank + step) % n)
        dist.recv(got, (rank - step) % n)
        work.wait()
        total += got
    return total


def own_chunk_in_turn(x, rank, n):
    """Blocking sends, rank 0 first: each other rank receives before it sends."""
    chunks = x.tensor_split(n)
    passed = chunks[rank - 1].clone()
    for step in range(n - 1):
        got = torch.empty_like(chunks[(rank - step - 2) % n])
        if rank == 0:
            dist.send(passed, 1)
        dist.recv(got, (rank - 1) % n)
        if rank:
            dist.send(passed, (rank + 1) % n)
        passed = got + chunks[(rank - step - 2) % n]
    return passed


def everything_to_everyone(x, rank, n):
    works, total = [dist.isend(x, r) for r in range(n) if r != rank], x.clone()
    for r in range(n):
        if r != rank:
            got = torch.empty_like(x)
            dist.recv(got, r)
            total += got
    for work in works:
        work.wait()
    return total.tensor_split(n)[rank].clone()


def own_chunk_of_all_reduce(x, rank, n):
    total = x.clone()
    dist.all_reduce(total)
    return total.tensor_split(n)[rank]


def own_chunk_stuck(x, rank, n):
    got = torch.empty_like(x)
    dist.send(x, (rank + 1) % n)
    dist.recv(got, (rank - 1) % n)
    return got


def own_chunk_of_equal_ones(x, rank, n):
    part = x[rank * (len(x) // n):(rank + 1) * (len(x) // n)]
    return part * n


def levels_by(piece=True, phases=2, swap=False):
    def two_levels(nodes, per_node, size, inside, between):
        if swap:
            inside, between = between, inside
        within = phases * (per_node - 1) / per_node * size / inside
        return within + 2 * (nodes - 1) / nodes * size / (per_node if piece else 1) / between
    return two_levels


def stuck_by_length(calls):
    return None if len({len(c) for c in calls}) == 1 else (min(map(len, calls)), ["sum", None])


def stuck_by_zip(calls):
    for done, now in enumerate(zip(*calls)):
        if len(set(now)) > 1:
            return done, list(now)
    return None


def stuck_one_early(calls):
    longest = max(map(len, calls))
    for done in range(longest):
        now = [c[done] if done < len(c) else None for c in calls]
        if len(set(now)) > 1:
            return done + 1, now
    return None


# ---- pipeline_parallel

def micro_batches_by(ratio=lambda p, m: (p - 1) / (m + p - 1), guard=True, first=1):
    def micro_batches(p, most):
        if guard and p > 1 and most <= 0:
            raise ValueError(most)
        return next((m for m in range(first, 10_000) if p == 1 or ratio(p, m) <= most), 10_000)
    return micro_batches


def micro_batches_endless(p, most):
    m = 1
    while p > 1 and (p - 1) / (m + p - 1) > most:
        m += 1
    return m


def rank_list_by(ahead=0, swap=False, drop=False):
    def one_forward_one_backward(r, p, m):
        warm = max(0, min(p - 1 - r + ahead, m))
        actions = [("F", k) for k in range(warm)]
        for k in range(m):
            pair = ([("F", warm + k)] if warm + k < m else []) + [("B", k)]
            actions += pair[::-1] if swap else pair
        return actions[:-1] if drop else actions
    return one_forward_one_backward


def finish_time_by(hops=True, reach=True, weights=True, guard=True):
    """hops, reach, weights: whether messages take time, waiting counts, I of the stage after is needed."""
    def finish_time(lists, cost, hop):
        ended, at, free, moved = {}, [0] * len(lists), [0] * len(lists), True
        while moved:
            moved = False
            for r, actions in enumerate(lists):
                while at[r] < len(actions):
                    kind, k = actions[at[r]]
                    needs = {"F": [("F", k, r - 1)] if r else [], "I": [("F", k, r)], "W": [("I", k, r)]}[kind]
                    if kind == "I" and r + 1 < len(lists):
                        needs.append(("I" if weights else "W", k, r + 1))
                    if any(n not in ended for n in needs):
                        break
                    ready = [ended[n] + hop * hops * (n[2] != r) for n in needs] if reach else []
                    ended[kind, k, r] = free[r] = cost[kind] + max([free[r], *ready])
                    at[r], moved = at[r] + 1, True
        if guard and any(a < len(x) for a, x in zip(at, lists)):
            raise ValueError("forever")
        return max(free)
    return finish_time


def balance_evenly(costs, p):
    if len(costs) < p:
        raise ValueError(p)
    return [len(costs) // p + (i < len(costs) % p) for i in range(p)]


def balance_greedily(costs, p):
    if len(costs) < p:
        raise ValueError(p)
    sizes, left = [], list(costs)
    for stage in range(p, 0, -1):
        goal, n = sum(left) / stage, 1
        while stage > 1 and len(left) - n > stage - 1 and sum(left[:n + 1]) <= goal:
            n += 1
        n = n if stage > 1 else len(left)
        sizes.append(n)
        left = left[n:]
    return sizes


def balance_fewest(costs, p):
    return [len(costs) - p + 1] + [1] * (p - 1)


def train_by(warm="fill", detach=True, average=False, twice=False, leaf=True):
    def train_rank(rank, p, stage, inputs, loss, send, recv, m):
        held = {}

        def forward(k):
            x = inputs[k] if rank == 0 else recv(rank - 1).requires_grad_(leaf)
            y = stage(x)
            if rank == p - 1:
                y = loss(y, k) / (m if average else 1)
            else:
                send(rank + 1, y.detach() if detach else y)
            held[k] = x, y

        def backward(k):
            x, y = held.pop(k)
            y.backward(None if rank == p - 1 else recv(rank + 1))
            if rank:
                send(rank - 1, x.grad)
                if twice and k == m - 1:
                    send(rank - 1, x.grad)

        ahead = min(m, {"fill": p - 1 - rank, "all": m, "none": 0, "upside down": rank}[warm])
        for k in range(ahead):
            forward(k)
        for k in range(m):
            if ahead + k < m:
                forward(ahead + k)
            backward(k)
    return train_rank


def train_from_a_list(rank, p, stage, inputs, loss, send, recv, m):
    """The list of 1F1B first, then its actions; torch.autograd.grad instead of backward."""
    warm = min(p - rank, m)
    actions = [("F", k) for k in range(warm)]
    for k in range(m):
        actions += [("B", k)] + [("F", warm + k)] * (warm + k < m)
    own, held = list(stage.parameters()), {}
    for kind, k in actions:
        if kind == "F":
            x = inputs[k].clone() if rank == 0 else recv(rank - 1)
            held[k] = x.requires_grad_(), stage(x)
            if rank < p - 1:
                send(rank + 1, held[k][1].detach())
            continue
        x, y = held.pop(k)
        last = rank == p - 1
        grads = torch.autograd.grad(loss(y, k) if last else y, [x, *own],
                                    None if last else recv(rank + 1))
        if rank:
            send(rank - 1, grads[0])
        for q, g in zip(own, grads[1:]):
            q.grad = g if q.grad is None else q.grad + g


def train_endlessly(rank, p, stage, inputs, loss, send, recv, m):
    while True:
        m += 1


def train_without_sending(rank, p, stage, inputs, loss, send, recv, m):
    for k in range(m):
        x = inputs[k] if rank == 0 else torch.zeros(3, 4, dtype=torch.float64)
        y = stage(x)
        (loss(y, k) if rank == p - 1 else y.sum()).backward()


# ---- tensor_parallel


def parameters_by(norms=2, copied=True, guard=True, cut=True):
    def rank_parameters(width, heads, kv_heads, hidden, ranks):
        uneven = heads % ranks or hidden % ranks or (kv_heads % ranks and ranks % kv_heads)
        if guard and uneven:
            raise ValueError(heads)
        kv = 2 * width * (width // heads) * kv_heads
        kv = kv // min(ranks, kv_heads) if copied else kv // ranks
        return (2 * width * width + 3 * width * hidden) // (ranks if cut else 1) + kv + norms * width
    return rank_parameters


def heads_by(kv=lambda q, r, ranks, heads, kv_heads: q * kv_heads // heads, strided=False):
    def heads_of(rank, ranks, heads, kv_heads):
        each = heads // ranks
        queries = list(range(rank, heads, ranks) if strided else range(rank * each, (rank + 1) * each))
        return queries, sorted({kv(q, rank, ranks, heads, kv_heads) for q in queries})
    return heads_of


def rows_by(bias="after", reduced="y"):
    def row_parallel(xs, weights, b, all_reduce):
        if bias == "detached":
            return [y + b.detach() for y in all_reduce([x @ w.T for x, w in zip(xs, weights)])]
        if reduced == "by hand":
            return [sum(x @ w.T for x, w in zip(xs, weights)) + b] * len(xs)
        share = {"after": 0, "each": b, "share": b / len(xs), "first": None}[bias]
        ys = [x @ w.T + (b if r == 0 else 0) if share is None else x @ w.T + share
              for r, (x, w) in enumerate(zip(xs, weights))]
        if reduced == "nothing":
            return [y + b for y in ys]
        if reduced == "twice":
            ys = [y / len(ys) for y in all_reduce(ys)]
        return [y + b if bias == "after" else y for y in all_reduce(ys)]
    return row_parallel


def loss_by(maximum="group", target="mine", gather=False):
    def cross_entropy(logits, targets, all_reduce):
        n, words = len(logits), logits[0].shape[1]
        if gather:
            padded = [torch.nn.functional.pad(part, (r * words, (n - 1 - r) * words))
                      for r, part in enumerate(logits)]
            return torch.nn.functional.cross_entropy(all_reduce(padded, "sum")[0], targets)
        most = {"group": lambda: all_reduce([part.amax(1) for part in logits], "max"),
                "own": lambda: [part.amax(1) for part in logits],
                "none": lambda: [torch.zeros(len(targets))] * n}[maximum]()
        sums = []
        if target == "joined":
            exp = all_reduce([(part - most[r][:, None]).exp().sum(1) for r, part in enumerate(logits)], "sum")[0]
            return (exp.log() + most[0] - torch.cat(logits, 1).gather(1, targets[:, None])[:, 0]).mean()
        for r, part in enumerate(logits):
            here = targets - r * words
            mine = (here >= 0) & (here < words)
            own = part.gather(1, here.clamp(0, words - 1)[:, None])[:, 0]
            own = own.where(mine, 0) if target == "mine" else own
            sums.append(torch.stack([(part - most[r][:, None]).exp().sum(1), own]))
        exp, own = all_reduce(sums, "sum")[0]
        return (exp.log() + most[0] - own).mean()
    return cross_entropy


def mlp_by(gathers=1, scatter=True, rows_first=False):
    def mlp(xs, ups, downs, all_gather, reduce_scatter):
        for _ in range(gathers - 1):
            all_gather(xs)
        whole = all_gather(xs) if gathers else xs
        wide = [torch.nn.functional.gelu(x @ up) for x, up in zip(whole, ups)]
        parts = [w @ down for w, down in zip(wide, downs)]
        if scatter == "by hand":
            return list(sum(parts).chunk(len(xs)))
        if not gathers:
            return parts
        return reduce_scatter(parts) if scatter else [p.chunk(len(xs))[r] for r, p in enumerate(parts)]
    return mlp


def norm_by(copies=True, send=True, root=True, apart=False, in_place=False, early=False):
    def norm_of_all(grads, counts):
        if early:
            grads = [g.sum() for g in grads]
        squares = [(g.square_() if in_place else g.square()).sum() / (c if copies else 1)
                   for g, c in zip(grads, counts)]
        if apart:
            for s in squares:
                dist.all_reduce(s)  # noqa: F821: runs on ranks
            return sum(squares).sqrt()
        total = sum(squares) if root else sum(squares).sqrt()
        if send:
            dist.all_reduce(total)  # noqa: F821
        return total.sqrt() if root else total
    return norm_of_all


def pair_by(begin=1, end=0, times=1):
    def cut_pair(x, up, down):
        class Begin(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                total = grad.clone()
                for _ in range(begin):
                    dist.all_reduce(total)  # noqa: F821
                return total

        class End(torch.autograd.Function):
            @staticmethod
            def forward(ctx, partial):
                total = partial / world_size ** (times - 1)  # noqa: F821
                for _ in range(times):
                    dist.all_reduce(total)  # noqa: F821
                return total

            @staticmethod
            def backward(ctx, grad):
                total = grad.clone()
                for _ in range(end):
                    dist.all_reduce(total)  # noqa: F821
                return total

        return End.apply(F.gelu(Begin.apply(x) @ up) @ down)  # noqa: F821
    return cut_pair


# ---- composing

def groups_by(stride=lambda shape, axis: 1, guard=True):
    def mesh_groups(shape, axis):
        if guard and not 0 <= axis < len(shape):
            raise ValueError(axis)
        step, n, total = stride(shape, axis), shape[axis], 1
        for size in shape:
            total *= size
        return [[f + k * step for k in range(n)] for f in range(total) if f // step % n == 0]
    return mesh_groups


def axis_stride(shape, axis):
    step = 1
    for size in shape[axis + 1:]:
        step *= size
    return step


def first_is_near(shape, axis):
    return axis_stride(shape[::-1], len(shape) - 1 - axis)


def idle_by(whole=lambda m, bubble: m + bubble, guard=True, interleave=True):
    def idle_share(batch, dp, micro, pp, chunks):
        if guard and batch % (dp * micro):
            raise ValueError(batch)
        bubble = (pp - 1) / (chunks if interleave else 1)
        return bubble / whole(batch // (dp * micro), bubble)
    return idle_share


def items_by(place=lambda rank, shape: rank // (shape[1] * shape[2]), parts=lambda s: s[0],
             guard=True):
    def items_of(rank, shape, order, batch, step):
        if guard and batch % shape[0]:
            raise ValueError(batch)
        each = batch // parts(shape)
        start = step * batch + place(rank, shape) * each
        return order[start:start + each]
    return items_of


def mend_by(partial=True, mean=True, split_too=False, quiet=False):
    def mend(grads, kinds, all_reduce):
        dp, tp = len(grads), len(grads[0])
        for name, kind in kinds.items():
            if partial and (kind == "partial" or split_too):
                for row in grads:
                    all_reduce([row[t][name] for t in range(tp)])
            for t in range(tp):
                column = [grads[d][t][name] for d in range(dp)]
                if quiet:
                    total = sum(g.clone() for g in column)
                    [g.copy_(total) for g in column]
                else:
                    all_reduce(column)
                for g in column:
                    g /= dp if mean else 1
    return mend


def mend_twice(grads, kinds, all_reduce):
    mend_by()(grads, kinds, all_reduce)
    for row in grads:  # the same numbers once more: right, and needless
        for t in range(len(row)):
            for name in kinds:
                column = [grads[d][t][name] for d in range(len(grads))]
                all_reduce(column)
                for g in column:
                    g /= len(grads)


def plan_by(bubble=1, fits=True, divide=True, pick=min):
    def quickest_plan(layers, states, layer_seconds, gpus, room, batch):
        plans = []
        for tp in (1, 2, 4, 8):
            for pp in range(1, layers + 1):
                if gpus % (tp * pp) or layers % pp:
                    continue
                dp = gpus // (tp * pp)
                if (divide and batch % dp) or (fits and states / (tp * pp) > room):
                    continue
                layer = layer_seconds / tp * (1 + 0.05 * (tp - 1))
                plans.append(((batch // dp + bubble * (pp - 1)) * (layers // pp) * layer,
                              tp, pp, dp))
        return pick(plans, default=None)
    return quickest_plan


WRONG = {
    "optimizers-1": [
        (state_for(muon_takes=9), "a 4-D kernel"), (state_for(factor=False), "one matrix"),
        (state_for(check=False), "adamm"), (state_for(batch=False), "a 4-D kernel"),
        (lambda shapes, name: 8, "one matrix")],
    "optimizers-2": [
        (lion_with(early=True), "w is off"), (lion_with(coupled=True), "with decay"),
        (lion_with(copies=True), "new tensors of the size of w"), (lion_with(outside=True), "change it in place"),
        (lion_with(keep_g=False), "the gradient was changed")],
    "optimizers-3": [
        (adam_kept_in("fp32", "fp32"), "bytes per number"), (adam_kept_in("bf16", "dynamic"), "bytes per number"),
        (adam_kept_in("dynamic", "linear"), "sizes"), (adam_kept_in("dynamic", "dynamic", block=32), "2.25 bytes"),
        (adam_kept_in("dynamic", "dynamic", beta2=0.999), "grow tenfold"),
        (adam_kept_in("dynamic", "dynamic", correct=False), "step 1"), (lambda g, state, t: g.sign(), "equal sizes")],
    "optimizers-4": [
        (in_backward(free=False), "left after backward"), (in_backward(complete=False), "left after backward"),
        (in_backward(frozen=True), "your code raised"), (in_backward(together=True), "weights differ"),
        (lambda model, make: [make(list(model.parameters()))], "trained parameter, got 1")],
    "optimizers-5": [
        (muon_on_rows(gram="local"), "two ranks"), (muon_on_rows(norm="local"), "off by"),
        (muon_on_rows(again=True), "are enough"), (muon_on_rows(side="left"), "off by"),
        (muon_on_rows(norm_apart=True), "are enough"), (muon_gathers, "two ranks")],
    "memory-1": [
        (no_check_of_formats, "int3"), (a_key_error, "{'weights': 'int3'}"),
        (nothing_for_the_unknown, "{'weights': 'int3'}"),
        (one_moment, "weights='fp32', gradients='fp32', moments='fp32'"),
        (master_always, "weights='fp32', gradients='bf16', moments='fp32', master=True"),
        (gradients_like_weights, "weights='bf16', gradients='fp32'")],
    "memory-2": [
        (cache_without_values, "one GPU"), (cache_divided, "8 heads on 16 GPUs"),
        (cache_vanishes, "8 heads on 16 GPUs"), (cache_replicated, "8 shared heads on 4 GPUs")],
    "memory-3": [
        (one_by_one, "the budget is met exactly"), (by_proportion, "flat up to 40"),
        (nothing_if_none_fits, "nothing fits"),
        (by_slope, "flat up to 40"), (powers_of_two, "the budget is met exactly"),
        (strictly_below, "exactly one fits"), (lambda peak, budget: budget / 3, "nothing fits")],
    "memory-4": [
        (by_numel, "views of one buffer"), (by_state_dict, "not persistent"),
        (gradients_assumed, "no gradients yet"), (no_buffers, "buffers"),
        (once_per_tensor, "views of one buffer")],
    "memory-5": [
        (lora_saves_nothing, "('q', 'v')"), (lora_norms_as_if_trained, "+512 a token"),
        (lora_without_groups, "(1, 32, 64, 4, 1"), (lora_without_the_ranks, "('q', 'v')"),
        (lora_adapters_alone, "('q', 'v')")],
    "memory-6": [
        (whole_tensor, "a 512 x 512 matrix"), (by_rows, "one row of 300,000"),
        (flattened, "a transposed matrix"), (in_pieces(uncorrected), "a 512 x 512 matrix"),
        (in_pieces(no_epsilon), "differs from torch.optim.Adam"),
        (in_pieces(moments_forgotten), "a 512 x 512 matrix"),
        (does_nothing, "a 512 x 512 matrix"), (not_in_place, "a 512 x 512 matrix")],
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
    "checkpointing-1": [
        (price_a_third, "one block of four layers"), (price_every_block_stops, "two each"),
        (price_never_free, "free_last"), (price_drops_the_rest, "a shorter last segment"),
        (price_of_nothing, "every=0")],
    "checkpointing-2": [
        (peak_of_equal_segments, "a better cut exists"), (peak_at_the_root, "equal costs"),
        (peak_by_continuous_formula, "least_peak("), (peak_of_keeping_all, "equal costs"),
        (peak_by_all_cuts, "no cut reaches that")],
    "checkpointing-3": [
        (policy_by_family, "narrowing, no bias"), (policy_keeps_all, "widening"),
        (policy_without_bias, "narrowing, with bias"), (policy_reads_the_input, "Linear("),
        (policy_with_squares, "square, no bias"), (policy_shape_first, "gelu.default: your code raised"),
        (lambda ctx, op, *a, **k: True, "expected a CheckpointPolicy")],
    "checkpointing-4": [
        (plan_where(plan_sum), "best_plan("), (plan_where(plan_forward_only), "longer segments needed"),
        (plan_where(plan_equal_lengths), "a shorter last segment"),
        (plan_where(plan_peak, lambda plans: sorted(plans)), "best_plan("),
        (plan_where(plan_peak, none=(0, 1)), "should be a ValueError")],
    "checkpointing-5": [
        (budget_ignored, "too many"), (budget_off_by_one, "one byte less"),
        (budget_of_the_root, "calls of a block"),
        (budget_thrift, "calls of a block"), (budget_careless, "the same masks"),
        (budget_late_binding, "the same blocks"), (run_plan(budget_right, itemsize=2), "too many"),
        (budget_first_kept, "too many"), (budget_untrained, "nothing would be trained"),
        (budget_never_refuses, "a budget of one input")],
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
    "profiling-1": [
        (refusing(lambda P, D, s, gpus, peak: 6 * P * D / (s * peak)), "70B on 16 GPUs"),
        (refusing(lambda P, D, s, gpus, peak: 2 * P * D / (s * gpus * peak)), "70B on 16 GPUs"),
        (refusing(lambda P, D, s, gpus, peak: 100 * 6 * P * D / (s * gpus * peak)), "your code raised ValueError"),
        (accepts_everything, "parameters = 0"), (above_one, "an MFU of 6")],
    "profiling-2": [
        (sum_of_durations, "two streams overlap"), (gaps_in_the_order_given, "not in order"),
        (lambda kernels: gaps_in_the_order_given(kernels, sort=True), "a short kernel inside a long one"),
        (from_zero, "one kernel"), (idle_in_place, "changed the list"),
        (idle_without_guard, "an empty trace should be a ValueError, not IndexError")],
    "profiling-3": [
        (fused_by(all_numel), "one tensor given twice"), (fused_by(by_storage_apart), "a result that is a view"),
        (fused_by(results_only), "one operation"), (lambda f, *x: fused_by(all_numel)(f, *x)[::-1], "three"),
        (lambda f, *x: f(*x), "expected two numbers of bytes, got tensor([2.")],
    "profiling-4": [
        (no_wait, "10 ms"), (no_warm_up, "3 s"), (waits_at_the_end_only, "3 s"),
        (a_mean, "stalls"), (median_of_single_calls, "ticks in steps of 1 ms"), (too_long, "more than 20 s")],
    "profiling-5": [
        (longer_of_the_two, "one slow load"), (room_for(1), "the queue is full"),
        (room_for(-1), "one slow load"), (always_ahead, "no thread"), (idle_of_the_loader, "one batch")],
    "accumulation-1": [
        (factors_mean_of_means, "factors([10, 100])"), (factors_no_guard, "factors([0, 0])"),
        (factors_skip_empty, "factors([0, 3, 0, 1])")],
    "accumulation-2": [
        (pieces_by(later=12), "A = 6P"), (pieces_by(first=16), "met exactly with one piece"),
        (pieces_by(step=0), "the optimizer's step is the peak"),
        (pieces_by(whole=False), "a batch that four does not divide"),
        (pieces_that_divide, "a batch that four does not divide")],
    "accumulation-3": [
        (weights_by_length, "pieces of [10, 100] tokens"), (weights_empty_counted, "[1, 0, 9]"),
        (weights_upside_down, "a token of piece 0")],
    "accumulation-4": [
        (stream_loop("mean", "pieces"), "pieces of 1 and 20"), (stream_loop(divide="rows"), "a third of labels"),
        (stream_loop(divide="nothing"), "one piece of 8"), (stream_loop(report="sum"), "the mean loss is"),
        (stream_loop(zero=False), "one piece of 8: the gradient"),
        (stream_loop("mean", "pieces", skip=False), "pieces of 1 and 20"),
        (all_at_once, "rows at once"), (graphs_kept, "are held at once"),
        (graphs_kept_from_a_list, "are held at once"), (stream_collected, "3 pieces are kept")],
    "accumulation-5": [
        (stream_pack(best=False), "the least room"), (stream_pack(oldest=False), "a tie goes to the oldest"),
        (stream_pack(fullest=False), "the fullest is closed"), (stream_pack(guard=False), "should be a ValueError")],
    "accumulation-6": [
        (packed_with(border=True), "two documents: labels"), (packed_with(padding=0), "and padding: labels"),
        (packed_with(ids=False), "two documents: documents"), (packed_with(dtype=torch.int32), "should be int64"),
        (packed_with(guard=False), "5 tokens in a row of length 4")],
    "collectives-1": [
        (sent_by(factor=1), "bytes_sent('all-reduce', 8"), (sent_by(less=0), "bytes_sent('all-reduce', 8"),
        (sent_by(guard=False), "should be a ValueError")],
    "collectives-2": [
        (crossing_by(log=lambda n: n.bit_length()), "crossing("),
        (crossing_by(log=lambda n: n.bit_length() - 1), "crossing(3"),
        (crossing_by(more=lambda n, steps: steps - 2), "crossing("), (lambda n, a, b: a / b, "crossing(1")],
    "collectives-3": [
        (own_chunk_by(begin=0), "rank 0 returned the sum of chunk 1, not the sum of chunk 0"),
        (own_chunk_by(in_place=True), "rank 0: x was changed"),
        (own_chunk_by(copy=True, in_place=True), "bytes of new tensors at once"),
        (everything_to_everyone, "rank 0 sent 112 bytes; 32 are enough"),
        (own_chunk_of_all_reduce, "called all_reduce; only messages"),
        (own_chunk_of_equal_ones, "3 ranks, 7 numbers: rank 0 returned"),
        (own_chunk_stuck, "still in line 3 of your function; does every rank wait"),
        (lambda x, rank, n: x.tensor_split(n)[rank].tolist(), "returned a list, not a tensor")],
    "collectives-4": [
        (levels_by(piece=False), "two_levels(2"), (levels_by(phases=1), "two_levels(1, 8"),
        (levels_by(swap=True), "two_levels(1, 8")],
    "collectives-5": [
        (stuck_by_length, "another order"), (stuck_by_zip, "one batch fewer"),
        (stuck_one_early, "another order"), (lambda calls: (0, []), "all finish")],
    "pipeline_parallel-1": [
        (micro_batches_by(lambda p, m: (p - 1) / m), "micro_batches(4"),
        (micro_batches_by(lambda p, m: p / (m + p)), "micro_batches(4"),
        (micro_batches_by(lambda p, m: 1e-9 + (p - 1) / (m + p - 1)), "micro_batches(4, 0.5)"),
        (micro_batches_by(guard=False), "should be a ValueError"), (micro_batches_by(first=2), "micro_batches(1"),
        (micro_batches_endless, "micro_batches(4, 0): no answer within")],
    "pipeline_parallel-2": [
        (lambda r, p, m: [(k, i) for k in "FB" for i in range(m)], "rank 0 holds 8"),
        (rank_list_by(ahead=1), "holds"), (rank_list_by(ahead=-1), "GPipe takes"),
        (rank_list_by(swap=True), "waiting forever"), (rank_list_by(drop=True), "one F and one B")],
    "pipeline_parallel-3": [
        (finish_time_by(hops=False), "hop = 3"), (finish_time_by(reach=False), "s.zero_bubble(2, 3, 1), F = 1"),
        (finish_time_by(weights=False), "s.zero_bubble(2, 3, 1), F = 1"),
        (finish_time_by(guard=False), "should be a ValueError")],
    "pipeline_parallel-4": [
        (balance_evenly, "the slowest stage"), (balance_greedily, "the slowest stage"),
        (balance_fewest, "balance([1, 1"), (lambda costs, p: [len(costs)], "stages of at least one layer")],
    "pipeline_parallel-5": [
        (train_by(warm="all"), "p = 2, m = 3: rank 0 held 3 micro-batches at once, at most 2"),
        (train_by(detach=False), "is a detach missing"),
        (train_by(leaf=False), "sent None"), (train_by(average=True), "another gradient"),
        (train_by(warm="none"), "rank 0 never held more than 1"),
        (train_by(twice=True), "rank 1 sent 384 bytes, 288 suffice"),
        (train_by(warm="upside down"), "waits for a message of rank"),
        (train_endlessly, "does not wait for a message"),
        (train_without_sending, "p = 2, m = 3: rank 0 has another gradient"),
        (lambda *given: sum(given[1:1]), "rank 0 ended without gradients")],
    "context_expert_parallel-1": [
        (share_by(diagonal=1), "contiguous, 2 ranks"), (share_by(diagonal=0), "contiguous"),
        (share_by(source=lambda r, step, n: r), "contiguous"),
        (share_by(per=lambda units: sum(units) / len(units)), "contiguous, 2 ranks"),
        (lambda owners: len(owners) / (2 * len(owners) - 1), "zigzag, 2 ranks"),
        (share_without_steps, "mixed, 3 ranks")],
    "context_expert_parallel-2": [
        (join_by(weigh=False), "three pieces, outputs"), (join_by(stable=False), "scores near 800"),
        (join_by(minus=False), "no key of the second piece"),
        (join_one_by_one, "no key of the first two pieces"),
        (lambda outs, lses: (join_by()(outs, lses)[0], sum(lses)), "logarithms")],
    "context_expert_parallel-3": [
        (shards_by(layout="dealt"), "rank 0's inputs"), (shards_by(shift="after"), "rank 0's labels"),
        (shards_by(places="local"), "rank 0's places"), (shards_by(guard=False), "should be a ValueError"),
        (lambda tokens, n: [[x.tolist() for x in y] for y in shards_by()(tokens, n)], "should be a tensor")],
    "context_expert_parallel-4": [
        (ring_by(rescale=False), "off by"), (ring_by(mask=False), "off by"),
        (ring_by(passes=lambda rank: 0), "are enough"), (ring_by(passes=lambda rank: -1 - (rank == 0)), "waited"),
        (ring_by(group=False), "4 query and 2"), (ring_gathers, "keep no more than"),
        (ring_by_shared_memory, "3 real ranks"), (ring_of_names, "anything else inside it")],
    "context_expert_parallel-5": [
        (dispatch_by(weigh=False), "off by"), (dispatch_by(softmax="all"), "off by"),
        (dispatch_by(add=False), "2 experts a token"), (dispatch_by(everything=True), "numbers; its slots")],
    "tensor_parallel-1": [
        (parameters_by(norms=0), "rank_parameters(64"), (parameters_by(copied=False), "rank_parameters(64, 8, 2"),
        (parameters_by(guard=False), "should be a ValueError"), (parameters_by(cut=False), "rank_parameters(64")],
    "tensor_parallel-2": [
        (heads_by(kv=lambda q, r, ranks, heads, kv_heads: r % kv_heads), "heads_of("),
        (heads_by(kv=lambda q, r, ranks, heads, kv_heads: q % kv_heads), "heads_of("),
        (heads_by(strided=True), "heads_of("), (lambda *a: 3, "expected two lists")],
    "tensor_parallel-3": [
        (rows_by("each"), "2 ranks: rank 0 is off"), (rows_by("share"), "2 ranks: on rank 0 the gradient"),
        (rows_by("detached"), "1 ranks: on rank 0 the gradient"),
        (rows_by(reduced="by hand"), "all_reduce was not used"),
        (rows_by(reduced="nothing"), "2 ranks: rank 0 is off"), (rows_by(reduced="twice"), "are enough")],
    "tensor_parallel-4": [
        (loss_by(maximum="none"), "logits in thousands"), (loss_by(maximum="own"), "2 ranks"),
        (loss_by(target="all"), "2 ranks"), (loss_by(gather=True), "3 a token are enough"),
        (loss_by(target="joined"), "only 12 numbers")],
    "tensor_parallel-5": [
        (mlp_by(scatter="by hand"), "reduce_scatter was not used"),
        (mlp_by(gathers=2), "are enough"), (mlp_by(scatter=False), "2 ranks: rank 0 is off"),
        (mlp_by(gathers=0), "2 ranks: rank 0 is off")],
    "tensor_parallel-6": [
        (norm_by(copies=False), "one whole weight"), (norm_by(send=False), "one cut weight"),
        (norm_by(root=False), "one cut weight"), (norm_by(apart=True), "are enough"),
        (norm_by(in_place=True), "were changed"), (norm_by(early=True), "two numbers in a weight")],
    "tensor_parallel-7": [
        (pair_by(begin=0), "the gradient of x"), (pair_by(end=1), "the gradient of x"),
        (pair_by(times=0), "the output"), (pair_by(times=2), "are enough")],
    "data_parallel-1": [
        (held_by(guard=False), "should be a ValueError"), (held_by(units=False), "held_bytes([10, 7, 3], 4, 1)"),
        (held_by(gradients=1), "held_bytes([64], 4, 1)"), (held_by(weights=2), "held_bytes([64], 4, 2)")],
    "data_parallel-2": [
        (step_by(guard=False), "should be a ValueError"), (step_by(less=0), "step_bytes('ddp', 1600, 8, 1)"),
        (step_by(zero_2=lambda k: 2), "step_bytes('zero-2', 1600, 8, 4)"),
        (step_by(zero_3=lambda k: 2 * k + 1), "step_bytes('zero-3', 1600, 8, 4)")],
    "data_parallel-3": [
        (zero_by(mean=False), "another momentum"), (zero_by(pad=False), "2 ranks, 5 parameters: reduce_scatter takes"),
        (zero_by(decay=1.0), "another momentum"), (zero_by(gather=False), "both collectives are needed")],
    "data_parallel-4": [
        (mean_of_means, "3, 5 and 0 targets: a gradient of rank 0 is off by"),
        (each_by_itself, "called all_reduce, all_reduce"), (forgets_the_empty_rank, "3, 5 and 0 targets: rank 2"),
        (nan_where_none, "is off by nan")],
    "data_parallel-5": [
        (linear_by(keep=True), "expected one all_gather"), (linear_by(reduce=False), "and a reduce_scatter"),
        (linear_by(mean=2), "shard.grad of rank 0 is not"), (linear_without_backward, "shard.grad of rank 0 is None"),
        (lambda x, shard: x @ shard.T, "output of rank 0 is [4, 3], expected [4, 6]")],
    "composing-1": [
        (groups_by(), "mesh_groups((2, 2, 2), 0)"), (groups_by(first_is_near), "mesh_groups((2, 2, 2), 0)"),
        (groups_by(axis_stride, guard=False), "mesh_groups((2, 2), "),
        (lambda shape, axis: [[0]], "mesh_groups(")],
    "composing-2": [
        (idle_by(whole=lambda m, bubble: m), "idle_share(1024"), (idle_by(guard=False), "ValueError"),
        (idle_by(interleave=False), "idle_share(2048")],
    "composing-3": [
        (items_by(place=lambda rank, shape: rank), "items_of("),
        (items_by(place=lambda rank, shape: rank % shape[0]), "items_of("),
        (items_by(parts=lambda s: s[0] * s[1] * s[2]), "items_of("),
        (items_by(guard=False), "ValueError")],
    "composing-4": [
        (mend_by(partial=False), "gradient of 'norm' (partial)"), (mend_by(mean=False), "gradient of"),
        (mend_by(split_too=True), "gradient of 'up' (split)"), (mend_twice, "are enough"),
        (mend_by(quiet=True), "sent 0 tensors")],
    "composing-5": [
        (plan_by(bubble=0), "quickest_plan("), (plan_by(fits=False), "quickest_plan("),
        (plan_by(pick=max), "quickest_plan("), (plan_by(divide=False), "quickest_plan("),
        (lambda *a: plan_by()(*a) or (0, 1, 1, 1), "expected None")],
}


@pytest.mark.parametrize("id, answer", [
    ("memory-1", lambda *a, **k: torch.tensor(no_errors(*a, **k))),  # a number all the same
    ("memory-2", lambda layers, heads, d, tokens, itemsize, tp:
        2 * layers * max(1, heads / tp) * d * tokens * itemsize),
    ("accumulation-1", lambda counts: torch.tensor(counts) / max(sum(counts), 1)),  # in fp32
    ("accumulation-4", stream_never_detached),
    ("memory-6", returns_nothing), ("precision-1", largest_as_tensor),
    ("collectives-3", own_chunk_by()), ("collectives-3", own_chunk_directly),
    ("collectives-3", own_chunk_in_turn), ("pipeline_parallel-5", train_by()),
    ("pipeline_parallel-5", train_from_a_list)])
def test_another_right_answer_passes(id, answer, capsys):
    assert said(id, answer, capsys) == f"{id}: right"


def test_every_exercise_has_wrong_answers():
    assert set(WRONG) == set(exercise._checks())
    assert all(len(wrong) >= 3 for wrong in WRONG.values())


@pytest.mark.parametrize("id, answer, named",
                         [(id, *pair) for id, pairs in WRONG.items() for pair in pairs])
def test_a_wrong_answer_is_told_where(id, answer, named, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = said(id, answer, capsys)
    assert line.startswith(f"{id}: not yet. ") and named in line, line


@pytest.mark.parametrize("id", SOLUTIONS)
@pytest.mark.parametrize("answer", [
    3, "text", lambda *a, **k: "text", lambda *a, **k: float("nan"), lambda: 1])
def test_nonsense_gets_a_line_too(id, answer, capsys):
    line = said(id, answer, capsys)
    assert line.startswith(f"{id}: not yet. ") and "\n" not in line, line
