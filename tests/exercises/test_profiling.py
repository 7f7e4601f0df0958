"""Right and wrong answers to the exercises of chapters/profiling."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below

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


WRONG = {
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
}
