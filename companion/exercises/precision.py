"""Checkers of the exercises in chapters/precision."""
import math

from ..exercise import Wrong
from ..grading import refuses


def _largest(answer):
    cases = [(5, 10, 15, "ieee", 65504.0), (8, 7, 127, "ieee", 255 * 2.0**120), (4, 3, 7, "fn", 448.0),
             (5, 2, 15, "ieee", 57344.0), (2, 1, 1, "none", 6.0), (2, 3, 1, "none", 7.5),
             (3, 2, 3, "none", 28.0), (8, 0, 127, "fn", 2.0**127), (5, 0, 15, "ieee", 2.0**15)]
    for *layout, want in cases:
        got = answer(*layout)
        if hasattr(got, "item"):
            got = got.item()
        if isinstance(got, bool) or not isinstance(got, (int, float)) or got != want:
            raise Wrong(f"largest{tuple(layout)}: expected {want:g}, got {got!r}")
    refuses("specials 'fnuz'", answer, 4, 3, 7, "fnuz")


def _frozen(answer):
    import torch
    # name: weight, update, kept?
    cases = {
        "half a step up from 1, a tie to even": (1.0, 2.0**-8, True),
        "just above half a step up from 1": (1.0, 2.0**-8 + 2.0**-20, False),
        "down from 1, where the spacing below is half": (1.0, -(2.0**-8), False),
        "a quarter of a step down from 1, a tie": (1.0, -(2.0**-9), True),
        "half a step up from an odd mantissa": (1 + 2.0**-7, 2.0**-8, False),
        "a large negative weight": (-3.0, 1e-3, True),
        "the sum in fp32 rounds first": (1.0, 2.0**-8 + 2.0**-30, True),
        "zero and a subnormal": (0.0, 1e-40, False),
        "zero and nothing": (0.0, -0.0, True),
        "a subnormal weight": (2.0**-133, 2.0**-135, True),
        "infinity": (math.inf, 1.0, True),
        "NaN": (math.nan, 0.0, False),
        "overflow": (255 * 2.0**120, 1e38, False),
    }
    w = torch.tensor([c[0] for c in cases.values()]).bfloat16()
    update = torch.tensor([c[1] for c in cases.values()])
    for shape in (len(cases),), (1, len(cases), 1):
        got = answer(w.view(shape), update.view(shape))
        if not isinstance(got, torch.Tensor) or got.dtype != torch.bool or got.shape != shape:
            what = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
            raise Wrong(f"expected a boolean tensor of shape {list(shape)}, got {what}")
        for (name, (a, b, kept)), mine in zip(cases.items(), got.flatten().tolist()):
            if mine != kept:
                raise Wrong(f"{name}: {a!r} + {b!r} {'keeps' if kept else 'changes'} the weight")
    torch.manual_seed(0)
    w = torch.randn(10_000).bfloat16()
    update = torch.randn(10_000) * 0.01
    want = (w.float() + update).bfloat16() == w
    off = int((answer(w, update) != want).sum())
    if off:
        raise Wrong(f"of 10,000 random weights and updates, {off} are wrong")
    if answer(w[:0], update[:0]).shape != (0,):
        raise Wrong("an empty tensor should give an empty tensor")


def _first_difference(answer):
    cases = [(1, 0), (1, -1), (2, 1), (7, 3), (1000, 637), (1000, 0), (1000, 999), (1024, 512),
             (1000, -1), (0, -1)]
    for n, first in cases:
        name = f"n = {n}, " + ("no difference" if first < 0 else f"first difference at {first}")
        allowed, calls = 1 + math.ceil(math.log2(n)) if n else 0, []

        def same(i, n=n, first=first, calls=calls, allowed=allowed, name=name):
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n:
                raise Wrong(f"{name}: there is no step {i!r}")
            calls.append(i)
            if len(calls) > allowed:
                raise Wrong(f"{name}: more than {allowed} call{'s' * (allowed > 1)} of same")
            return first < 0 or i < first

        got = answer(same, n)
        if isinstance(got, bool) or got != first:
            raise Wrong(f"{name}: expected {first}, got {got!r}")


def _scaled_step(answer):
    import torch

    def job(slope=3.0, momentum=0.0):
        w = torch.zeros(1, requires_grad=True)
        w.grad = torch.full((1,), 1e6)  # left over
        return w, torch.optim.SGD([w], lr=1.0, momentum=momentum), (slope * w).sum()

    def scaler(**options):
        return torch.amp.GradScaler("cpu", **options)

    w, optimizer, loss = job()
    amp = scaler()
    norm = answer(loss, [w], optimizer, amp, 1.0)
    if isinstance(norm, torch.Tensor):
        norm = norm.item()
    if not isinstance(norm, float) or abs(norm - 3.0) > 1e-3:
        raise Wrong(f"loss 3w, w.grad = 1e6 left over: the norm should be 3.0, got {norm!r}")
    if abs(w.item() + 1.0) > 1e-4:
        raise Wrong(f"loss 3w, max_norm 1, rate 1: w should go from 0 to -1, it went to {w.item():.4g}")
    w, optimizer, loss = job(slope=0.25)
    answer(loss, [w], optimizer, scaler(), 1.0)
    if abs(w.item() + 0.25) > 1e-4:
        raise Wrong(f"a gradient of 0.25 is below max_norm 1 and stays; w went to {w.item():.4g}, not -0.25")
    w, optimizer, _ = job()
    amp = scaler(growth_interval=2)
    for step in range(4):
        answer((3.0 * w).sum(), [w], optimizer, amp, 1.0)
    if amp.get_scale() != 2.0**18:
        raise Wrong("after 4 good steps with growth_interval=2 the scale should be 2**18, "
                    f"it is 2**{math.log2(amp.get_scale()):g}")
    w, optimizer, _ = job()
    amp = scaler()
    answer((w * 1e35).sum(), [w], optimizer, amp, 1.0)  # overflows once it is scaled
    if w.item() != 0:
        raise Wrong(f"the gradient overflowed, so the step should be skipped; w went to {w.item():.4g}")
    if amp.get_scale() != 2.0**15:
        raise Wrong(f"after an overflow the scale should be halved to 2**15, "
                    f"it is 2**{math.log2(amp.get_scale()):g}")


def _adamw_kahan(answer):
    import torch

    def reference(w, m, v, g, step, lr, decay):
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        return w - lr * (m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8) + decay * w), m, v

    # name: (start, gradient, rate, decay, steps, allowed difference of w + c)
    cases = {
        "one large step": (torch.tensor([1.0, -2.0]), torch.tensor([0.5, -0.1]), 0.25, 0.0, 1, 1e-3),
        "300 updates far below half a spacing": (
            torch.tensor([1.0, -3.0, 0.02]), torch.tensor([1.0, 0.3, -1.0]), 1e-5, 0.0, 300, 1e-3),
        "decay alone": (torch.tensor([1.0, -3.0]), torch.zeros(2), 1e-3, 0.1, 500, 5e-3),
        "a matrix": (torch.ones(3, 4), torch.full((3, 4), -2.0), 1e-4, 0.01, 100, 5e-4),
    }
    for name, (start, g, lr, decay, steps, allowed) in cases.items():
        w, c = start.bfloat16(), torch.zeros_like(start).bfloat16()
        m, v = torch.zeros_like(start), torch.zeros_like(start)
        want = (w.double(), m.double(), v.double())
        for step in range(1, steps + 1):
            answer(w, c, g.bfloat16(), m, v, step, lr, decay)
            want = reference(*want, g.bfloat16().double(), step, lr, decay)
        if w.dtype != torch.bfloat16 or c.dtype != torch.bfloat16:
            raise Wrong(f"{name}: w and c must stay bfloat16, they are {w.dtype} and {c.dtype}")
        for label, got, right in ("m", m, want[1]), ("v", v, want[2]):
            if not torch.allclose(got.double(), right, rtol=1e-3, atol=1e-9):
                raise Wrong(f"{name}: {label} is {got.flatten()[0].item():.4g}, "
                            f"fp32 AdamW has {right.flatten()[0].item():.4g}")
        gap = (w.double() + c.double() - want[0]).abs().max().item()
        if not gap <= allowed:
            still = "; w has not changed" if torch.equal(w, start.bfloat16()) else ""
            raise Wrong(f"{name}: w + c is {gap:.2g} from fp32 AdamW, allowed is {allowed:.2g}{still}")
        half = (want[0].abs().max() * 2.0**-7).item()
        if (w.double() - want[0]).abs().max().item() > half:
            raise Wrong(f"{name}: w itself should follow within a bf16 step, the rest in c")


def _encode_e3m2(answer):
    import torch
    from ..formats import Format, decode, encode
    e3m2 = Format("E3M2", 3, 2, 3, "none")
    grid = decode(torch.arange(32), e3m2)
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    far = torch.tensor(1e9)
    groups = {
        "the 32 values of the format": grid.float(),
        "ties": middle,
        "just above ties": middle.nextafter(far),
        "just below ties": middle.nextafter(-far),
        "subnormals": torch.linspace(0, 0.25, 101),
        "too large": torch.tensor([28.1, 30.0, 31.9, 32.0, 1e30, math.inf]),
        "tiny": torch.tensor([0.0, 1e-45, 1e-30, 0.03125]),
        "random numbers": torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 4,
    }
    for name, x in groups.items():
        for sign, label in (1.0, name), (-1.0, f"{name}, negative"):
            got, want = answer(sign * x), encode(sign * x, e3m2)
            if not isinstance(got, torch.Tensor) or got.dtype != torch.uint8 or got.shape != x.shape:
                what = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
                raise Wrong(f"{label}: expected a uint8 tensor of shape {list(x.shape)}, got {what}")
            if bad := (got.long() != want).nonzero().flatten().tolist():
                i = bad[0]
                raise Wrong(f"{label}: {(sign * x)[i].item():.9g} should be {want[i].item():06b} "
                            f"({decode(want, e3m2)[i].item():g}), got {got[i].item():06b}")
    if answer(torch.zeros(2, 0)).shape != (2, 0):
        raise Wrong("an empty tensor should give an empty tensor")
    refuses("NaN", answer, torch.tensor([1.0, math.nan]))


CHECKS = {
    "precision-1": _largest,
    "precision-2": _frozen,
    "precision-3": _first_difference,
    "precision-4": _scaled_step,
    "precision-5": _adamw_kahan,
    "precision-6": _encode_e3m2,
}
