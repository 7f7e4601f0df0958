"""Checkers of the exercises in chapters/checkpointing."""
import math
import time

from ..exercise import Wrong, _NotAttempted
from ..grading import number, refuses, run


def _price(answer):
    # name, (blocks, lasts, every), options, ratio
    cases = [
        ("one block of four layers", ([8], [2], 1), {}, 1 + 6 / 24),
        ("equal blocks, one each", ([9] * 4, [3] * 4, 1), {}, 1 + 24 / 108),
        ("equal blocks, two each", ([9] * 4, [3] * 4, 2), {}, 1 + 30 / 108),
        ("a shorter last segment", ([10, 10, 10, 10, 20], [1, 2, 3, 4, 15], 2), {},
         1 + (60 - 2 - 4 - 15) / 180),
        ("a segment longer than the stack", ([10, 20], [1, 2], 5), {}, 1 + 28 / 90),
        ("the last one free", ([10, 10, 10, 10, 20], [1, 2, 3, 4, 15], 2), {"free_last": True},
         1 + (40 - 2 - 4) / 180),
        ("only the last one, free", ([10, 20], [1, 2], 2), {"free_last": True}, 1.0),
    ]
    for name, arguments, options, want in cases:
        call = f"{name}, price{arguments}{' free_last' if options else ''}"
        got = number(call, run(call, answer, *arguments, **options))
        if not math.isclose(got, want, rel_tol=1e-9):
            raise Wrong(f"{call}: expected {want:.6f}, got {got:.6g}")
    for every in 0, -1:
        refuses(f"every={every}", answer, [9, 9], [3, 3], every)


def _least_peak(answer):
    def bruteforce(layers, boundary, internals):
        best = {0: [0]}  # blocks placed -> least peak, by number of segments
        for n in range(1, layers + 1):
            best[n] = [math.inf] * (n + 1)
            for length in range(1, n + 1):
                for i, peak in enumerate(best[n - length]):
                    here = max(peak, i * boundary + length * internals)
                    best[n][i + 1] = min(best[n][i + 1], here)
        return min(best[layers])

    cases = [("one layer", 1, 10, 100), ("equal costs", 10, 1, 1), ("equal costs", 64, 1, 1),
             ("a transformer", 32, 16, 303), ("large inputs", 9, 50, 20),
             ("no whole ratio", 17, 7, 11), ("inputs that cost nothing", 12, 0, 5)]
    for name, *arguments in cases:
        call = f"{name}, least_peak{tuple(arguments)}"
        got, want = number(call, run(call, answer, *arguments)), bruteforce(*arguments)
        if got != want:
            says = "no cut reaches that" if got < want else "a better cut exists"
            raise Wrong(f"{call}: expected {want:,}, got {got:,}: {says}")
    call, start = "least_peak(1000, 8388608, 157286400)", time.perf_counter()
    got = number(call, run(call, answer, 1000, 8388608, 157286400))
    seconds = time.perf_counter() - start
    if got != 1698693120:  # by dynamic programming over all cuts, as above
        raise Wrong(f"{call}: expected 1,698,693,120, got {got:,}")
    if seconds > 5:
        raise Wrong(f"{call}: took {seconds:.0f} s; try to place as many blocks as a peak allows")


def _policy(answer):
    import functools

    import torch
    from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                        create_selective_checkpoint_contexts)
    from torch.utils.flop_counter import FlopCounterMode

    recompute = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    errors = []

    def policy(ctx, op, *args, **kwargs):
        """The answer's; errors wait, as PyTorch 2.6 may crash on one raised in a dispatch."""
        try:
            got = answer(ctx, op, *args, **kwargs)
            if not isinstance(got, CheckpointPolicy):
                raise Wrong(f"{op}: expected a CheckpointPolicy, got {got!r}")
            return got
        except Exception as error:
            errors.append(error)
            return CheckpointPolicy.PREFER_RECOMPUTE

    def told(name):
        """The first error, with the case that met it."""
        error = errors[0]
        if isinstance(error, (Wrong, _NotAttempted)):
            return error
        return Wrong(f"{name}: your code raised {type(error).__name__}: {error}")

    def flops(layers, x, checkpointed):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        with FlopCounterMode(display=False) as counter:
            if checkpointed:
                y = checkpoint(layers, x, use_reentrant=False, context_fn=contexts)
            else:
                y = layers(x)
            y.sum().backward()
        return counter.get_total_flops()

    for op, count in (torch.ops.aten.gelu.default, 1), (torch.ops.aten.bmm.default, 2):
        tensors = [torch.ones(2, 2, 2)] * count
        got = policy(None, op, *tensors)
        if errors:
            raise told(op)
        if got not in recompute:
            raise Wrong(f"{op}: is no mm or addmm, so it should be recomputed")
    # what comes after the products makes backward ask for all of them
    cases = [("narrowing, no bias", (96, 32), False, 0),
             ("narrowing, with bias", (96, 32), True, 0),
             ("widening, no bias", (32, 96), False, 1), ("widening, with bias", (32, 96), True, 1),
             ("square, no bias", (64, 64), False, 1), ("a wide batch, narrowing", (4, 2), True, 0)]
    for name, (inputs, outputs), bias, again in cases:
        layers = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=bias),
                                     torch.nn.Sigmoid())
        x = torch.ones(48, inputs, requires_grad=True)
        plain, seen = flops(layers, x, False), flops(layers, x, True)
        if errors:
            raise told(name)
        want = plain + again * 2 * 48 * inputs * outputs
        if seen != want:
            did = "recomputed" if seen > want else "kept"
            raise Wrong(f"{name}, Linear({inputs}, {outputs}): the product was {did}; "
                        f"{seen:,} FLOPs in the step, expected {want:,}")


def _plans(layers, boundary, internals, budget):
    """(kept, every) of the best plan, by trying all; None if there is none."""
    def peak(kept, every):
        lengths = [min(every, layers - kept - at) for at in range(0, layers - kept, every)]
        moments = [i * boundary + length * internals for i, length in enumerate(lengths)]
        return max([*moments, len(lengths) * boundary + kept * internals])

    for kept in range(layers, -1, -1):
        for every in range(1, max(layers - kept, 1) + 1):
            if peak(kept, every) <= budget:
                return kept, every
    return None


def _best_plan(answer):
    cases = [("all fits", 4, 10, 100, 400), ("one byte short", 4, 10, 100, 399),
             ("one block at a time", 8, 10, 100, 170), ("room for one block more", 8, 10, 100, 260),
             ("longer segments needed", 32, 10, 30, 190),
             ("a shorter last segment", 7, 40, 50, 180),
             ("inputs as large as blocks", 16, 10, 10, 70)]
    for name, *arguments in cases:
        call = f"{name}, best_plan{tuple(arguments)}"
        got, want = run(call, answer, *arguments), _plans(*arguments)
        if got is None:
            raise Wrong(f"{call}: your function returned None; is a return missing?")
        if not isinstance(got, (tuple, list)) or tuple(got) != want:
            raise Wrong(f"{call}: expected {want}, got {got!r}")
    refuses("best_plan(8, 10, 100, 90)", answer, 8, 10, 100, 90)
    refuses("best_plan(32, 10, 30, 100)", answer, 32, 10, 30, 100)


def _budget_blocks(layers, width, calls):
    """Blocks that use dropout, keep several times their input, and record their calls."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x):
            calls.append(self)
            y = torch.native_dropout(F.gelu(self.up(x)), 0.25, True)[0]
            return x + self.down(y)

    return nn.ModuleList(Block() for _ in range(layers))


def _within_budget(answer):
    import torch
    from ..counting import Film, saved_tensors, storage_bytes

    width, rows = 32, 256
    boundary = 4 * rows * width
    calls = []
    one = _budget_blocks(1, width, calls)
    x = torch.ones(rows, width)
    saved = saved_tensors(lambda: one[0](x.requires_grad_()), but=one.parameters())
    internals = storage_bytes(saved)
    # gradients on their way: one twice as wide as the input, one as wide, those of a layer
    passing = 4 * boundary

    cases = [("everything fits", 6, 6 * internals),
             ("half of it fits", 12, 6 * internals + 6 * boundary),
             ("one byte less than everything", 6, 6 * internals - 1),
             ("just one block at a time", 8, 7 * boundary + internals),
             ("longer segments needed", 40, 19 * boundary + 2 * internals),
             ("a single block", 1, internals)]
    for name, layers, budget in cases:
        kept, _ = _plans(layers, boundary, internals, budget)
        torch.manual_seed(0)
        blocks = _budget_blocks(layers, width, calls)
        params = list(blocks.parameters())
        x = torch.randn(rows, width)

        def step(function, x=x, blocks=blocks, params=params):
            """(peak of all that is new, calls, gradients)."""
            for p in params:
                p.grad = torch.zeros_like(p)
            leaf = x.clone().requires_grad_()
            film = Film(held=[*params, *(p.grad for p in params)])
            calls.clear()
            torch.manual_seed(1)
            with film:
                y = leaf * 1
                out = function(y)
                if not isinstance(out, torch.Tensor):
                    raise Wrong(f"expected the last block's output, got {out!r}")
                del y
                if not out.requires_grad:
                    raise Wrong("the output needs no gradient: nothing would be trained")
                loss = out.sum()
                del out
                loss.backward()
            grads = [leaf.grad, *(p.grad for p in params)]
            return max(film.frames()["temporaries"]), len(calls), grads

        def plain(x, blocks=blocks):
            for block in blocks:
                x = block(x)
            return x

        call = f"{name}: {layers} blocks, {internals:,} bytes each, budget {budget:,}"
        most, _, want = step(plain)
        peak, called, got = run(call, step, lambda x: answer(blocks, x, internals, budget))
        got = [torch.zeros_like(w) if g is None else g for g, w in zip(got, want)]
        worst = max((g - w).abs().max().item() for g, w in zip(got, want))
        if worst:
            raise Wrong(f"{call}: gradients differ from a run without checkpoints by {worst:.2g}; "
                        "does the second run use the same blocks, and draw the same masks?")
        allowed = budget + passing
        if budget < layers * internals:  # not even one byte: keeping all is over the budget
            allowed = min(allowed, most - 1)
        if peak > allowed:
            raise Wrong(f"{call}: the peak is {peak:,} bytes, {peak - allowed:,} too many")
        if called > 2 * layers - kept:
            raise Wrong(f"{call}: {called} calls of a block; {2 * layers - kept} are enough")
    blocks, x = _budget_blocks(8, width, calls), torch.randn(rows, width).requires_grad_()
    refuses("8 blocks and a budget of one input", answer, blocks, x, internals, boundary)


CHECKS = {
    "checkpointing-1": _price,
    "checkpointing-2": _least_peak,
    "checkpointing-3": _policy,
    "checkpointing-4": _best_plan,
    "checkpointing-5": _within_budget,
}
