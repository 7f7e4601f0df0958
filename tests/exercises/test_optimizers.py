"""Right and wrong answers to the exercises of chapters/optimizers."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below

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
}
