"""Checkers of the exercises in chapters/memory."""
import math

from ..exercise import Wrong
from ..grading import number, refuses, run


def _same(what, got, want, unit="bytes"):
    got = number(what, got)
    if got != want:
        raise Wrong(f"{what}: expected {want:,} {unit}, got {got:,}")


def _state_bytes(answer):
    cases = [
        (dict(weights="fp32", gradients="fp32", moments="fp32"), 16),
        (dict(weights="bf16", gradients="bf16", moments="fp32", master=True), 16),
        (dict(weights="bf16", gradients="fp32", moments="fp32", master=True), 18),
        (dict(weights="fp16", gradients="fp32", moments="bf16"), 10),
        (dict(weights="bf16", gradients="bf16", moments="bf16"), 8),
        (dict(weights="fp32", gradients="bf16", moments="fp32", master=True), 14),
    ]
    for options, each in cases:
        text = ", ".join(f"{k}={v!r}" for k, v in options.items())
        call = f"state_bytes(1000, {text})"
        _same(call, run(call, answer, 1000, **options), 1000 * each)
    for bad in ({"weights": "int3"}, {"gradients": "int3"}, {"moments": "int3"}):
        options = {"weights": "bf16", "gradients": "bf16", "moments": "fp32"} | bad
        refuses(f"{bad}: an unknown format", answer, 10, **options)


def _kv_per_gpu(answer):
    # name, (layers, kv_heads, head_dim, tokens, itemsize, tp), bytes
    cases = [
        ("one GPU", (32, 32, 128, 1, 2, 1), 2 * 32 * 32 * 128 * 2),
        ("8 shared heads on 4 GPUs", (80, 8, 128, 1000, 2, 4), 2 * 80 * 2 * 128 * 1000 * 2),
        ("8 heads on 16 GPUs: one each", (80, 8, 128, 10, 2, 16), 2 * 80 * 128 * 10 * 2),
        ("one shared head on 8 GPUs", (4, 1, 64, 7, 1, 8), 2 * 4 * 64 * 7),
        ("no tokens yet", (4, 2, 64, 0, 2, 1), 0),
    ]
    for name, arguments, want in cases:
        call = f"{name}, kv_per_gpu{arguments}"
        _same(call, run(call, answer, *arguments), want)


def _largest_batch(answer):
    # A maximum over moments: flat while the optimizer step sets the peak, then steps up.
    def job(fixed, step, each, every=1):
        return lambda batch: max(fixed + step, fixed + each * -(-batch // every) * every)

    cases = [
        ("nothing fits", job(100, 0, 10), 105, 0),
        ("exactly one fits", job(100, 0, 10), 110, 1),
        ("the budget is met exactly", job(0, 0, 3), 3 * 1000, 1000),
        ("flat up to 40, then linear", job(100, 400, 10), 500, 40),
        ("rounded up to eights", job(0, 0, 1, every=8), 47, 40),
        ("a large answer", job(5, 0, 1), 10**6 + 4, 10**6 - 1),
    ]
    for name, peak, budget, want in cases:
        allowed, calls = math.floor(4 + 2 * math.log2(want + 1)), []

        def job_peak(batch, peak=peak, calls=calls, allowed=allowed, name=name):
            if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
                raise Wrong(f"{name}: peak({batch!r}) is no run: a batch is a whole number")
            calls.append(batch)
            if len(calls) > allowed:
                raise Wrong(f"{name}: more than {allowed} calls of peak; "
                            f"the last was peak({batch})")
            return peak(batch)

        got = run(f"{name}, budget {budget:,}", answer, job_peak, budget)
        if got != want:
            says = "does not fit" if isinstance(got, int) and got > want else "is not the largest"
            raise Wrong(f"{name}, budget {budget:,}: batch {got!r} {says}; the answer is {want:,}")


def _held_bytes(answer):
    import torch
    from torch import nn

    def plain():
        model = nn.Linear(10, 10)
        return model, torch.optim.AdamW(model.parameters()), 4 * 110

    def tied():
        model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
        model[1].weight = model[0].weight
        return model, torch.optim.SGD(model.parameters()), 4 * 160

    def stepped():
        model = nn.Linear(16, 16, bias=False).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters())
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return model, optimizer, 2 * 256 * 4 + 4

    def flat_gradients():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        buffer = torch.zeros(200)  # more than the gradients need
        for i, layer in enumerate(model):
            layer.weight.grad = buffer[64 * i:64 * i + 64].view(8, 8)
        return model, torch.optim.SGD(model.parameters()), 4 * (2 * 72 + 200)

    def hidden_buffer():
        model = nn.Linear(4, 4, bias=False)
        model.register_buffer("table", torch.zeros(100, 100)[:3], persistent=False)
        model.register_buffer("ones", torch.ones(1).expand(50), persistent=False)
        return model, torch.optim.SGD(model.parameters()), 4 * (16 + 10_000 + 1)

    def odd_state():
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {"steps": 3, "note": None, "m": torch.zeros(4, 4)}
        return model, optimizer, 4 * 32

    cases = {"no gradients yet": plain, "tied weights": tied, "bf16 after a step": stepped,
             "gradients as views of one buffer": flat_gradients,
             "buffers that are views and not persistent": hidden_buffer,
             "optimizer state that is no tensor": odd_state}
    for name, case in cases.items():
        model, optimizer, want = case()
        _same(name, run(name, answer, model, optimizer), want)


def _lora_block(batch, seq, hidden, heads, kv_heads, ffn, rank, targets):
    """(forward function of x, x, tensors that are no activations)."""
    import torch
    import torch.nn.functional as F
    d = hidden // heads
    k = d * kv_heads
    sizes = {"q": (hidden, hidden), "k": (hidden, k), "v": (hidden, k), "o": (hidden, hidden),
             "gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}

    def randn(*shape, grad=False):
        return torch.full(shape, 0.1, dtype=torch.bfloat16).requires_grad_(grad)

    base = {name: randn(o, i) for name, (i, o) in sizes.items()}
    pairs = {name: (randn(rank, sizes[name][0], grad=True), randn(sizes[name][1], rank, grad=True))
             for name in targets}
    norms, cos, sin = (randn(hidden), randn(hidden)), randn(seq, d), randn(seq, d)

    def linear(name, x):
        y = F.linear(x, base[name])
        if name in pairs:
            a, b = pairs[name]
            y = y + F.linear(F.linear(x, a), b)
        return y

    def norm(x, weight):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * weight

    def rotate(x):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def attend(x):
        q, k, v = (linear(n, x).unflatten(-1, (-1, d)).transpose(1, 2) for n in "qkv")
        k = rotate(k)
        if kv_heads == 1:  # a view: PyTorch 2.6's kernel on a CPU knows no groups
            k, v = (t.expand(-1, heads, -1, -1) for t in (k, v))
        y = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        return linear("o", y.transpose(1, 2).flatten(2))

    def block(x):
        x = x + attend(norm(x, norms[0]))
        y = norm(x, norms[1])
        return x + linear("down", F.silu(linear("gate", y)) * linear("up", y))

    fixed = [*base.values(), *norms, cos, sin, *(t for pair in pairs.values() for t in pair)]
    return block, randn(batch, seq, hidden, grad=True), fixed


def _lora_saved(answer):
    from ..counting import saved_tensors, storage_bytes
    every = ("q", "k", "v", "o", "gate", "up", "down")
    cases = [(2, 64, 128, 4, 4, 352, 8, ("q", "v")), (1, 32, 64, 4, 1, 96, 4, every),
             (2, 64, 128, 4, 1, 352, 16, ("gate", "up", "down")), (3, 16, 64, 2, 2, 160, 8, ("o",)),
             (1, 64, 128, 8, 1, 352, 8, ("down",)), (1, 64, 128, 4, 4, 352, 8, ())]
    for case in cases:
        block, x, fixed = _lora_block(*case)
        counted = storage_bytes(saved_tensors(lambda: block(x), but=fixed))
        call = f"lora_saved{case}"
        got = run(call, answer, *case)
        if isinstance(got, (int, float)) and got != counted:
            batch, seq = case[:2]
            raise Wrong(f"{call}: the hooks count {counted:,} bytes, you predict {got:,}, "
                        f"{(got - counted) / (batch * seq):+,g} a token")
        _same(call, got, counted)


def _adam_step(answer):
    import torch
    from ..counting import Film, storages
    budget = 64 * 1024
    torch.manual_seed(0)
    cases = {
        "a 512 x 512 matrix": torch.randn(512, 512),
        "one row of 300,000": torch.randn(1, 300_000),
        "a transposed matrix": torch.randn(300, 200).t(),
        "every other column of a matrix": torch.randn(300, 400)[:, ::2],
        "a single number": torch.randn(()),
        "no numbers at all": torch.randn(0, 7),
        "zero gradients": torch.randn(5),
    }
    for name, p in cases.items():
        want = p.clone().requires_grad_()
        adam = torch.optim.Adam([want], lr=0.1, foreach=False)
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in 1, 2, 3:
            grad = torch.zeros_like(p) if name == "zero gradients" else torch.randn_like(p)
            want.grad = grad.clone()
            adam.step()
            film = Film(held=[p, grad, m, v])
            held = sum(s.nbytes() for s in storages([p, grad, m, v]).values())
            with film:
                run(f"{name}, step {step}", answer, p, grad, m, v, step, 0.1)
            extra = film.peak()[0] - held if film.ops else 0
            if extra > budget:
                raise Wrong(f"{name}, step {step}: {extra:,} bytes of temporaries at once, "
                            f"allowed are {budget:,}")
            if not torch.allclose(p, want.detach(), rtol=1e-4, atol=1e-5):
                worst = (p - want.detach()).abs().max().item()
                raise Wrong(f"{name}, step {step}: p differs from torch.optim.Adam by {worst:.2g}")
            state = adam.state[want]
            for mine, theirs, label in (m, "exp_avg", "m"), (v, "exp_avg_sq", "v"):
                if not torch.allclose(mine, state[theirs], rtol=1e-4, atol=1e-6):
                    raise Wrong(f"{name}, step {step}: {label} was not updated as Adam does")


CHECKS = {
    "memory-1": _state_bytes,
    "memory-2": _kv_per_gpu,
    "memory-3": _largest_batch,
    "memory-4": _held_bytes,
    "memory-5": _lora_saved,
    "memory-6": _adam_step,
}
