"""Right and wrong answers to the exercises of chapters/checkpointing."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below

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


WRONG = {
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
}
