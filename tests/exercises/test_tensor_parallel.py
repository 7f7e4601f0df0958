"""Right and wrong answers to the exercises of chapters/tensor_parallel."""
import torch
import torch.distributed as dist

from .checking import *  # the tests; their answers are RIGHT and WRONG, below


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


WRONG = {
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
}
