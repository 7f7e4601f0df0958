"""Right and wrong answers to the exercises of chapters/pipeline_parallel."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below


def micro_batches_by(ratio=lambda p, m: (p - 1) / (m + p - 1), guard=True, first=1):
    def micro_batches(p, most):
        if guard and p > 1 and most <= 0:
            raise ValueError(most)
        return next((m for m in range(first, 10_000) if p == 1 or ratio(p, m) <= most), 10_000)
    return micro_batches


def micro_batches_endless(p, most):
    m = 1
    while p > 1 and (p - 1) / (m + p - 1) > most:
        m += 1
    return m


def rank_list_by(ahead=0, swap=False, drop=False):
    def one_forward_one_backward(r, p, m):
        warm = max(0, min(p - 1 - r + ahead, m))
        actions = [("F", k) for k in range(warm)]
        for k in range(m):
            pair = ([("F", warm + k)] if warm + k < m else []) + [("B", k)]
            actions += pair[::-1] if swap else pair
        return actions[:-1] if drop else actions
    return one_forward_one_backward


def finish_time_by(hops=True, reach=True, weights=True, guard=True):
    """hops, reach, weights: whether messages take time, waiting counts, I of the stage after is needed."""
    def finish_time(lists, cost, hop):
        ended, at, free, moved = {}, [0] * len(lists), [0] * len(lists), True
        while moved:
            moved = False
            for r, actions in enumerate(lists):
                while at[r] < len(actions):
                    kind, k = actions[at[r]]
                    needs = {"F": [("F", k, r - 1)] if r else [], "I": [("F", k, r)], "W": [("I", k, r)]}[kind]
                    if kind == "I" and r + 1 < len(lists):
                        needs.append(("I" if weights else "W", k, r + 1))
                    if any(n not in ended for n in needs):
                        break
                    ready = [ended[n] + hop * hops * (n[2] != r) for n in needs] if reach else []
                    ended[kind, k, r] = free[r] = cost[kind] + max([free[r], *ready])
                    at[r], moved = at[r] + 1, True
        if guard and any(a < len(x) for a, x in zip(at, lists)):
            raise ValueError("forever")
        return max(free)
    return finish_time


def balance_evenly(costs, p):
    if len(costs) < p:
        raise ValueError(p)
    return [len(costs) // p + (i < len(costs) % p) for i in range(p)]


def balance_greedily(costs, p):
    if len(costs) < p:
        raise ValueError(p)
    sizes, left = [], list(costs)
    for stage in range(p, 0, -1):
        goal, n = sum(left) / stage, 1
        while stage > 1 and len(left) - n > stage - 1 and sum(left[:n + 1]) <= goal:
            n += 1
        n = n if stage > 1 else len(left)
        sizes.append(n)
        left = left[n:]
    return sizes


def balance_fewest(costs, p):
    return [len(costs) - p + 1] + [1] * (p - 1)


def train_by(warm="fill", detach=True, average=False, twice=False, leaf=True):
    def train_rank(rank, p, stage, inputs, loss, send, recv, m):
        held = {}

        def forward(k):
            x = inputs[k] if rank == 0 else recv(rank - 1).requires_grad_(leaf)
            y = stage(x)
            if rank == p - 1:
                y = loss(y, k) / (m if average else 1)
            else:
                send(rank + 1, y.detach() if detach else y)
            held[k] = x, y

        def backward(k):
            x, y = held.pop(k)
            y.backward(None if rank == p - 1 else recv(rank + 1))
            if rank:
                send(rank - 1, x.grad)
                if twice and k == m - 1:
                    send(rank - 1, x.grad)

        ahead = min(m, {"fill": p - 1 - rank, "all": m, "none": 0, "upside down": rank}[warm])
        for k in range(ahead):
            forward(k)
        for k in range(m):
            if ahead + k < m:
                forward(ahead + k)
            backward(k)
    return train_rank


def train_from_a_list(rank, p, stage, inputs, loss, send, recv, m):
    """The list of 1F1B first, then its actions; torch.autograd.grad instead of backward."""
    warm = min(p - rank, m)
    actions = [("F", k) for k in range(warm)]
    for k in range(m):
        actions += [("B", k)] + [("F", warm + k)] * (warm + k < m)
    own, held = list(stage.parameters()), {}
    for kind, k in actions:
        if kind == "F":
            x = inputs[k].clone() if rank == 0 else recv(rank - 1)
            held[k] = x.requires_grad_(), stage(x)
            if rank < p - 1:
                send(rank + 1, held[k][1].detach())
            continue
        x, y = held.pop(k)
        last = rank == p - 1
        grads = torch.autograd.grad(loss(y, k) if last else y, [x, *own],
                                    None if last else recv(rank + 1))
        if rank:
            send(rank - 1, grads[0])
        for q, g in zip(own, grads[1:]):
            q.grad = g if q.grad is None else q.grad + g


def train_endlessly(rank, p, stage, inputs, loss, send, recv, m):
    while True:
        m += 1


def train_without_sending(rank, p, stage, inputs, loss, send, recv, m):
    for k in range(m):
        x = inputs[k] if rank == 0 else torch.zeros(3, 4, dtype=torch.float64)
        y = stage(x)
        (loss(y, k) if rank == p - 1 else y.sum()).backward()


RIGHT = [
    ("pipeline_parallel-5", train_by()), ("pipeline_parallel-5", train_from_a_list),
]
WRONG = {
    "pipeline_parallel-1": [
        (micro_batches_by(lambda p, m: (p - 1) / m), "micro_batches(4"),
        (micro_batches_by(lambda p, m: p / (m + p)), "micro_batches(4"),
        (micro_batches_by(lambda p, m: 1e-9 + (p - 1) / (m + p - 1)), "micro_batches(4, 0.5)"),
        (micro_batches_by(guard=False), "should be a ValueError"), (micro_batches_by(first=2), "micro_batches(1"),
        (micro_batches_endless, "micro_batches(4, 0): no answer within")],
    "pipeline_parallel-2": [
        (lambda r, p, m: [(k, i) for k in "FB" for i in range(m)], "rank 0 holds 8"),
        (rank_list_by(ahead=1), "holds"), (rank_list_by(ahead=-1), "GPipe takes"),
        (rank_list_by(swap=True), "waiting forever"), (rank_list_by(drop=True), "one F and one B")],
    "pipeline_parallel-3": [
        (finish_time_by(hops=False), "hop = 3"), (finish_time_by(reach=False), "s.zero_bubble(2, 3, 1), F = 1"),
        (finish_time_by(weights=False), "s.zero_bubble(2, 3, 1), F = 1"),
        (finish_time_by(guard=False), "should be a ValueError")],
    "pipeline_parallel-4": [
        (balance_evenly, "the slowest stage"), (balance_greedily, "the slowest stage"),
        (balance_fewest, "balance([1, 1"), (lambda costs, p: [len(costs)], "stages of at least one layer")],
    "pipeline_parallel-5": [
        (train_by(warm="all"), "p = 2, m = 3: rank 0 held 3 micro-batches at once, at most 2"),
        (train_by(detach=False), "is a detach missing"),
        (train_by(leaf=False), "sent None"), (train_by(average=True), "another gradient"),
        (train_by(warm="none"), "rank 0 never held more than 1"),
        (train_by(twice=True), "rank 1 sent 384 bytes, 288 suffice"),
        (train_by(warm="upside down"), "waits for a message of rank"),
        (train_endlessly, "does not wait for a message"),
        (train_without_sending, "p = 2, m = 3: rank 0 has another gradient"),
        (lambda *given: sum(given[1:1]), "rank 0 ended without gradients")],
}
