"""Right and wrong answers to the exercises of chapters/data_parallel."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below


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


WRONG = {
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
}
