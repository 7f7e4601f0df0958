"""Right and wrong answers to the exercises of chapters/collectives."""
import torch
import torch.distributed as dist

from .checking import *  # the tests; their answers are RIGHT and WRONG, below


def sent_by(factor=2, less=1, guard=True):
    def bytes_sent(collective, n, size):
        if guard and collective not in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all"):
            raise ValueError(collective)
        return (factor if collective == "all-reduce" else 1) * (n - less) * size // n
    return bytes_sent


def crossing_by(log=lambda n: (n - 1).bit_length(), more=lambda n, steps: steps - 2 * (n - 1) / n):
    def crossing(n, alpha, beta):
        steps = 2 * log(n)
        extra = more(n, steps)
        return (2 * (n - 1) - steps) * alpha / (extra * beta) if extra else float("inf")
    return crossing


def own_chunk_by(begin=1, copy=False, in_place=False):
    """A ring of isend and recv. begin: how far left of its own chunk a rank begins."""
    def own_chunk(x, rank, n):
        chunks = (x.clone() if copy else x).tensor_split(n)
        passed = chunks[(rank - begin) % n].clone()
        for step in range(1, n):
            mine = chunks[(rank - begin - step) % n]
            work = dist.isend(passed, (rank + 1) % n)
            got = torch.empty_like(mine)
            dist.recv(got, (rank - 1) % n)
            work.wait()
            passed = mine.add_(got) if in_place else got + mine
        return passed
    return own_chunk


def own_chunk_directly(x, rank, n):
    """No ring: each chunk goes straight to its rank; as many bytes."""
    chunks = x.tensor_split(n)
    total, got = chunks[rank].clone(), torch.empty_like(chunks[rank])
    for step in range(1, n):
        work = dist.isend(chunks[(rank + step) % n], (rank + step) % n)
        dist.recv(got, (rank - step) % n)
        work.wait()
        total += got
    return total


def own_chunk_in_turn(x, rank, n):
    """Blocking sends, rank 0 first: each other rank receives before it sends."""
    chunks = x.tensor_split(n)
    passed = chunks[rank - 1].clone()
    for step in range(n - 1):
        got = torch.empty_like(chunks[(rank - step - 2) % n])
        if rank == 0:
            dist.send(passed, 1)
        dist.recv(got, (rank - 1) % n)
        if rank:
            dist.send(passed, (rank + 1) % n)
        passed = got + chunks[(rank - step - 2) % n]
    return passed


def everything_to_everyone(x, rank, n):
    works, total = [dist.isend(x, r) for r in range(n) if r != rank], x.clone()
    for r in range(n):
        if r != rank:
            got = torch.empty_like(x)
            dist.recv(got, r)
            total += got
    for work in works:
        work.wait()
    return total.tensor_split(n)[rank].clone()


def own_chunk_of_all_reduce(x, rank, n):
    total = x.clone()
    dist.all_reduce(total)
    return total.tensor_split(n)[rank]


def own_chunk_stuck(x, rank, n):
    got = torch.empty_like(x)
    dist.send(x, (rank + 1) % n)
    dist.recv(got, (rank - 1) % n)
    return got


def own_chunk_of_equal_ones(x, rank, n):
    part = x[rank * (len(x) // n):(rank + 1) * (len(x) // n)]
    return part * n


def levels_by(piece=True, phases=2, swap=False):
    def two_levels(nodes, per_node, size, inside, between):
        if swap:
            inside, between = between, inside
        within = phases * (per_node - 1) / per_node * size / inside
        return within + 2 * (nodes - 1) / nodes * size / (per_node if piece else 1) / between
    return two_levels


def stuck_by_length(calls):
    return None if len({len(c) for c in calls}) == 1 else (min(map(len, calls)), ["sum", None])


def stuck_by_zip(calls):
    for done, now in enumerate(zip(*calls)):
        if len(set(now)) > 1:
            return done, list(now)
    return None


def stuck_one_early(calls):
    longest = max(map(len, calls))
    for done in range(longest):
        now = [c[done] if done < len(c) else None for c in calls]
        if len(set(now)) > 1:
            return done + 1, now
    return None


RIGHT = [
    ("collectives-3", own_chunk_by()), ("collectives-3", own_chunk_directly),
    ("collectives-3", own_chunk_in_turn),
]
WRONG = {
    "collectives-1": [
        (sent_by(factor=1), "bytes_sent('all-reduce', 8"), (sent_by(less=0), "bytes_sent('all-reduce', 8"),
        (sent_by(guard=False), "should be a ValueError")],
    "collectives-2": [
        (crossing_by(log=lambda n: n.bit_length()), "crossing("),
        (crossing_by(log=lambda n: n.bit_length() - 1), "crossing(3"),
        (crossing_by(more=lambda n, steps: steps - 2), "crossing("), (lambda n, a, b: a / b, "crossing(1")],
    "collectives-3": [
        (own_chunk_by(begin=0), "rank 0 returned the sum of chunk 1, not the sum of chunk 0"),
        (own_chunk_by(in_place=True), "rank 0: x was changed"),
        (own_chunk_by(copy=True, in_place=True), "bytes of new tensors at once"),
        (everything_to_everyone, "rank 0 sent 112 bytes; 32 are enough"),
        (own_chunk_of_all_reduce, "called all_reduce; only messages"),
        (own_chunk_of_equal_ones, "3 ranks, 7 numbers: rank 0 returned"),
        (own_chunk_stuck, "still in line 3 of your function; does every rank wait"),
        (lambda x, rank, n: x.tensor_split(n)[rank].tolist(), "returned a list, not a tensor")],
    "collectives-4": [
        (levels_by(piece=False), "two_levels(2"), (levels_by(phases=1), "two_levels(1, 8"),
        (levels_by(swap=True), "two_levels(1, 8")],
    "collectives-5": [
        (stuck_by_length, "another order"), (stuck_by_zip, "one batch fewer"),
        (stuck_one_early, "another order"), (lambda calls: (0, []), "all finish")],
}
