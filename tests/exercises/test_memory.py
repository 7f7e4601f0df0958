"""Right and wrong answers to the exercises of chapters/memory."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below

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


RIGHT = [
    ("memory-1", lambda *a, **k: torch.tensor(no_errors(*a, **k))),  # a number all the same
    ("memory-2", lambda layers, heads, d, tokens, itemsize, tp:
        2 * layers * max(1, heads / tp) * d * tokens * itemsize),
    ("memory-6", returns_nothing),
]
WRONG = {
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
}
