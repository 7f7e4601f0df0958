"""Optimizers as directions: what each makes of a gradient and of its state.

    from companion.optimizers import adamw, lion, muon
    w -= lr * adamw(g, m, v, t)

Each function updates the state that it is given, in place, and returns the direction d of
the step w <- w - lr * d; weight decay is the caller's. Leading dimensions are a batch of
separate tensors: matrices are the last two dimensions. ``t`` counts steps from 1.

Taught in: chapters/optimizers.
"""
import torch

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Muon's: steep at 0, no fixed point at 1


def adamw(g, m, v, t, betas=(0.9, 0.999), eps=1e-8):
    """AdamW's direction, computed in fp32 or better; m, v: shaped as g, of any float dtype.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101. Taught in: chapters/optimizers.
    """
    dtype = torch.promote_types(g.dtype, torch.float32)
    g = g.to(dtype)
    new_m = torch.lerp(m.to(dtype), g, 1 - betas[0])
    new_v = torch.lerp(v.to(dtype), g * g, 1 - betas[1])
    m.copy_(new_m)
    v.copy_(new_v)
    root = (new_v / (1 - betas[1] ** t)).sqrt() + eps
    return new_m / (1 - betas[0] ** t) / root


def momentum(g, m, beta=0.9):
    """SGD with momentum, as torch has it: m <- beta * m + g. m: shaped as g.

    Taught in: chapters/optimizers.
    """
    return m.mul_(beta).add_(g)


def lion(g, m, betas=(0.9, 0.99)):
    """Lion's direction: a sign. m: shaped as g.

    Source: Chen et al. 2023, arXiv:2302.06675. Taught in: chapters/optimizers.
    """
    direction = torch.lerp(m, g, 1 - betas[0]).sign()
    m.lerp_(g, 1 - betas[1])
    return direction


def newton_schulz(G, steps=5, coefficients=COEFFICIENTS):
    """G [..., R, C] with its singular values pushed towards 1, in bfloat16.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    Taught in: chapters/optimizers.
    """
    a, b, c = coefficients
    X = G.bfloat16().reshape(-1, *G.shape[-2:])
    tall = X.shape[-2] > X.shape[-1]
    if tall:  # the Gram matrix of the short side is the small one
        X = X.mT
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.mT
        polynomial = torch.baddbmm(A, A, A, beta=b, alpha=c)  # sums in fp32, rounds once
        X = torch.baddbmm(X, polynomial, X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)


def muon(g, m, beta=0.95):
    """Muon's direction with Nesterov momentum, scaled to AdamW's usual RMS of 0.2.

    g, m: [..., R, C]. Sources: Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982.
    Taught in: chapters/optimizers.
    """
    m.lerp_(g, 1 - beta)
    scale = 0.2 * max(g.shape[-2:]) ** 0.5  # to AdamW's usual size
    return newton_schulz(torch.lerp(g, m, beta)).to(g.dtype) * scale


def adafactor(g, w, state, lr, t):
    """Adafactor's step lr * d, without first moment: its rate depends on w.

    g, w: [..., R, C] with state (row [..., R, 1], column [..., 1, C]), or [..., n] with
    state (v,) shaped as g. lr: a number, or a tensor that broadcasts; the rate is
    min(lr, 1 / sqrt(t)) times the RMS of w (at least 1e-3); an update of RMS above 1 is
    scaled down. Source: Shazeer & Stern 2018, arXiv:1804.04235, as torch.optim.Adafactor
    has it. Taught in: chapters/optimizers.
    """
    eps, new = torch.finfo(g.dtype).eps, t ** -0.8
    if len(state) == 2:
        row, column = state
        row.lerp_(g.square().mean(-1, keepdim=True), new)
        column.lerp_(g.square().mean(-2, keepdim=True), new)
        v = row @ column / row.mean(-2, keepdim=True).clamp(min=eps)
    else:
        v = state[0].lerp_(g.square(), new)
    d = g * v.clamp(min=eps**2).rsqrt()
    dims = tuple(range(-len(state), 0))
    d = d / rms_over(d, dims).clamp(min=1)
    given, largest = (torch.as_tensor(x, dtype=g.dtype) for x in (lr, t ** -0.5))
    rate = torch.minimum(given, largest)
    return d * rate * rms_over(w, dims).clamp(min=1e-3)


def rms_over(x, dims):
    """Root mean square over ``dims``, which stay as ones. Taught in: chapters/optimizers."""
    return x.square().mean(dims, keepdim=True).sqrt()


def dynamic_levels(signed):
    """The 256 levels of the dynamic 8-bit code in [-1, 1] or [0, 1], ascending: [256].

    Seven decades; each has twice as many levels as the one below, midpoints of equal parts
    of its [0.1, 1]; and 0 and 1. Source: Dettmers et al. 2022, arXiv:2110.02861.
    Taught in: chapters/optimizers.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        n = 2 ** (decade + (not signed))
        for k in range(n):
            level = (0.1 + 0.9 * (k + 0.5) / n) * 10.0 ** (decade - 6)
            levels += [level, -level] if signed else [level]
    return torch.tensor(sorted(levels))


def encode(x, levels, block=256):
    """Codes uint8 shaped as x [..., n], and one fp32 scale a block [..., n / block, 1].

    Each value becomes the level nearest to value / scale; the scale is the block's largest
    magnitude. Raises ValueError where ``block`` does not divide n.
    Taught in: chapters/optimizers.
    """
    if x.shape[-1] % block:
        raise ValueError(f"encode: blocks of {block} do not divide "
                         f"{x.shape[-1]} values")
    blocks = x.float().unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1, keepdim=True)
    middles = (levels[1:] + levels[:-1]) / 2
    relative = blocks / torch.where(scales > 0, scales, 1.0)
    codes = torch.bucketize(relative, middles)
    return codes.to(torch.uint8).flatten(-2), scales


def decode(codes, scales, levels):
    """The values behind ``encode``'s codes [..., n] and scales [..., n / block, 1]: fp32.

    Taught in: chapters/optimizers.
    """
    blocks = codes.unflatten(-1, (scales.shape[-2], -1))
    return (levels[blocks.long()] * scales).flatten(-2)
