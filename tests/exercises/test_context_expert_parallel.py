"""Right and wrong answers to the exercises of chapters/context_expert_parallel."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below


def share_by(diagonal=0.5, source=lambda r, step, n: (r - step) % n, per=max):
    def share(owners):
        n, total, longest = len(owners), 0.0, 0.0
        for step in range(n):
            units = [sum((a > b) + (a == b) * diagonal for a in owners[r] for b in owners[source(r, step, n)])
                     for r in range(n)]
            total, longest = total + sum(units), longest + per(units)
        return total / (n * longest)
    return share


def share_without_steps(owners):
    """Waits at the end only, not after each step."""
    n = len(owners)
    busy = [sum((a > b) + (a == b) / 2 for a in own for other in owners for b in other) for own in owners]
    return sum(busy) / (n * max(busy))


def join_one_by_one(outs, lses):
    """Right until two pieces without a key meet: -inf minus -inf."""
    out, lse = outs[0], lses[0]
    for more, more_lse in zip(outs[1:], lses[1:]):
        total = torch.logaddexp(lse, more_lse)
        out = out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None]
        lse = total
    return out, lse


def join_by(stable=True, weigh=True, minus=True):
    def join(outs, lses):
        stacked = torch.stack(lses)
        total = stacked.logsumexp(0) if stable else stacked.exp().sum(0).log()
        if not minus:  # piece by piece, from the difference: -inf minus -inf
            one = stacked[len(outs) // 2]
            total = one + (stacked - one).exp().sum(0).log()
        weights = [(lse - total).exp()[..., None] if weigh else 1 / len(outs) for lse in lses]
        return sum(w * out for w, out in zip(weights, outs)), total
    return join


def shards_by(layout="zigzag", shift="before", guard=True, places="global"):
    def zigzag_shards(tokens, n):
        T = len(tokens) - 1
        if guard and T % (2 * n):
            raise ValueError(T)
        chunks, out = torch.arange(T - T % (2 * n)).chunk(2 * n), []
        for r in range(n):
            other = 2 * n - 1 - r if layout == "zigzag" else r + n
            at = torch.cat([chunks[r], chunks[other]])
            labels = tokens[at + 1] if shift == "before" else tokens[at].roll(-1)
            out.append((tokens[at], labels, at if places == "global" else torch.arange(len(at))))
        return out
    return zigzag_shards


def ring_by(rescale=True, mask=True, passes=None, group=True):
    def one_rank(q, k, v, rank, n, pass_right):
        kv, groups, out = torch.stack([k, v]), len(q) // len(k), torch.zeros_like(q)
        lse = torch.full_like(q[..., 0], -torch.inf)
        for step in range(n):
            source = (rank - step) % n
            if source <= rank:
                keys, values = (kv.repeat_interleave(groups, 1) if group else kv.repeat(1, groups, 1, 1))
                s = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
                if source == rank and mask:
                    s = s + torch.full_like(s, -torch.inf).triu(1)
                more = s.logsumexp(-1)
                total = torch.logaddexp(lse, more)
                a, b = ((lse - total).exp(), (more - total).exp()) if rescale else (torch.ones_like(lse),) * 2
                out, lse = out * a[..., None] + s.softmax(-1) @ values * b[..., None], total
            if step < (n - 1 if passes is None else n + passes(rank)):
                kv = pass_right(kv)
        return out
    return one_rank


def ring_gathers(at_once):
    """All keys and values come together; at_once: so do a block's scores, else row by row."""
    def one_rank(q, k, v, rank, n, pass_right):
        kv, c = torch.stack([k, v]), q.shape[1]
        parts = {rank: kv}
        for step in range(1, n):
            kv = pass_right(kv)
            parts[(rank - step) % n] = kv
        keys, values = (torch.cat([parts[r][i] for r in range(rank + 1)], 1) for i in (0, 1))
        keys, values = (x.repeat_interleave(len(q) // len(k), 0) for x in (keys, values))
        rows = []
        for first in range(0, c, c if at_once else 1):
            mine = q[:, first:first + (c if at_once else 1)]
            s = mine @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
            s = s + torch.full_like(s, -torch.inf).triu(1 + rank * c + first)
            rows.append(s.softmax(-1) @ values)
        return torch.cat(rows, 1)
    return one_rank


def ring_by_shared_memory(q, k, v, rank, n, pass_right, shared={}):
    """Right where ranks are played in one process; real ones share no dictionary."""
    shared[rank] = torch.stack([k, v])
    pass_right(q[:0])  # a barrier
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for source in range(rank + 1):
        keys, values = shared[source].repeat_interleave(len(q) // len(k), 1)
        s = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        if source == rank:
            s = s + torch.full_like(s, -torch.inf).triu(1)
        more = s.logsumexp(-1)
        total = torch.logaddexp(lse, more)
        out = out * (lse - total).exp()[..., None] + s.softmax(-1) @ values * (more - total).exp()[..., None]
        lse = total
    pass_right(q[:0])
    return out


def ring_of_names(q, k, v, rank, n, pass_right):
    """Right, but by a name of its module, which real ranks do not have."""
    return ring_by()(q, k, v, rank, n, pass_right)


def dispatch_by(weigh=True, softmax="chosen", add=True, everything=False):
    def moe_rank(x, logits, k, expert, all_to_all):
        best, n = logits.topk(k, -1), logits.shape[1]
        values = best.values.softmax(-1) if softmax == "chosen" else logits.softmax(-1).gather(1, best.indices)
        weights = torch.zeros_like(logits).scatter(1, best.indices, values if weigh else torch.ones_like(values))
        chosen = torch.zeros_like(logits).scatter(1, best.indices, 1).bool() | everything
        mine = [chosen[:, e].nonzero()[:, 0] for e in range(n)]
        got = all_to_all([x[rows] for rows in mine])
        back = all_to_all(list(expert(torch.cat(got)).split([len(rows) for rows in got])))
        out = torch.zeros_like(x)
        for e, rows in enumerate(mine):
            part = back[e] * weights[rows, e, None]
            out[rows] = out[rows] + part if add else part
        return out
    return moe_rank


WRONG = {
    "context_expert_parallel-1": [
        (share_by(diagonal=1), "contiguous, 2 ranks"), (share_by(diagonal=0), "contiguous"),
        (share_by(source=lambda r, step, n: r), "contiguous"),
        (share_by(per=lambda units: sum(units) / len(units)), "contiguous, 2 ranks"),
        (lambda owners: len(owners) / (2 * len(owners) - 1), "zigzag, 2 ranks"),
        (share_without_steps, "mixed, 3 ranks")],
    "context_expert_parallel-2": [
        (join_by(weigh=False), "three pieces, outputs"), (join_by(stable=False), "scores near 800"),
        (join_by(minus=False), "no key of the second piece"),
        (join_one_by_one, "no key of the first two pieces"),
        (lambda outs, lses: (join_by()(outs, lses)[0], sum(lses)), "logarithms")],
    "context_expert_parallel-3": [
        (shards_by(layout="dealt"), "rank 0's inputs"), (shards_by(shift="after"), "rank 0's labels"),
        (shards_by(places="local"), "rank 0's places"), (shards_by(guard=False), "should be a ValueError"),
        (lambda tokens, n: [[x.tolist() for x in y] for y in shards_by()(tokens, n)], "should be a tensor")],
    "context_expert_parallel-4": [
        (ring_by(rescale=False), "off by"), (ring_by(mask=False), "off by"),
        (ring_by(passes=lambda rank: 0), "are enough"), (ring_by(passes=lambda rank: -1 - (rank == 0)), "waited"),
        (ring_by(group=False), "4 query and 2"), (ring_gathers(True), "keep no more than"),
        (ring_gathers(False), "keep no more than"),
        (ring_by_shared_memory, "3 real ranks"), (ring_of_names, "anything else inside it")],
    "context_expert_parallel-5": [
        (dispatch_by(weigh=False), "off by"), (dispatch_by(softmax="all"), "off by"),
        (dispatch_by(add=False), "2 experts a token"), (dispatch_by(everything=True), "numbers; its slots")],
}
