"""Checkers of the exercises in chapters/context_expert_parallel."""
import math
import threading
from fractions import Fraction

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..exercise import Wrong
from ..grading import number, refuses, run
from ..grading_ranks import on_ranks

SECONDS = 5  # how long a rank waits for the others: a thread's turn takes milliseconds


# ---------------------------------------------------------------- simulated ranks

class _Ranks:
    """n ranks as threads of this process; what they send each other is counted.

    Every rank calls ``answer(rank, send)``, where send(items) gives item s to rank s and
    returns what each rank gave to this one.
    """

    def __init__(self, n):
        self.n, self.table = n, {}
        self.numbers, self.calls = [0] * n, [0] * n
        self.gate = threading.Barrier(n)

    def send(self, rank, items):
        self.calls[rank] += 1
        self.numbers[rank] += sum(x.numel() for s, x in enumerate(items) if s != rank)
        self.table[rank] = [x.clone() for x in items]
        self.gate.wait(SECONDS)
        got = [self.table[s][rank] for s in range(self.n)]
        self.gate.wait(SECONDS)
        return got

    def run(self, where, answer):
        outs, errors = [None] * self.n, [None] * self.n

        def one(rank):
            try:
                outs[rank] = run(f"{where}, rank {rank}", answer, rank)
            except BaseException as error:
                errors[rank] = error
                self.gate.abort()
        threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stuck = [e for e in errors if e and isinstance(e.__cause__, threading.BrokenBarrierError)]
        real = [e for e in errors if e and e not in stuck]
        if real:
            raise real[0]
        if stuck:
            raise Wrong(f"{where}: a rank waited for the others, which sent less often")
        return outs


class Largest(TorchDispatchMode):
    """Notes the most numbers that one tensor made under it has."""
    # For ranks only: to enter a mode imports torch._dynamo, a second's work that they have behind them
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return out


def _close(where, got, want):
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        shape = list(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
        raise Wrong(f"{where}: expected a tensor {list(want.shape)}, got {shape}")
    error = (got - want).abs().max().item() if want.numel() else 0.0
    if not error < 1e-9:  # NaN fails too
        raise Wrong(f"{where}: off by {error:.3g}")


# ---------------------------------------------------------------- the exercises

def _utilization(answer):
    cases = {f"contiguous, {n} ranks": [[r] for r in range(n)] for n in (1, 2, 4, 8)}
    cases |= {f"zigzag, {n} ranks": [[r, 2 * n - 1 - r] for r in range(n)] for n in (2, 3, 8)}
    cases["two neighbors each, 3 ranks"] = [[0, 1], [2, 3], [4, 5]]
    cases["dealt like cards, 4 ranks"] = [[r, r + 4] for r in range(4)]
    cases["mixed, 3 ranks"] = [[0, 3], [1, 5], [2, 4]]  # the busiest rank changes
    for name, owners in cases.items():
        n, total, longest = len(owners), Fraction(0), Fraction(0)
        for step in range(n):
            work = [sum((Fraction(a > b) + Fraction(a == b, 2))
                        for a in owners[r] for b in owners[(r - step) % n]) for r in range(n)]
            total, longest = total + sum(work), longest + max(work)
        want = float(total / (n * longest))
        got = run(f"{name}, {owners}", answer, [list(o) for o in owners])
        got = number(name, float(got) if isinstance(got, Fraction) else got)
        if not math.isclose(got, want, abs_tol=1e-9):
            raise Wrong(f"{name}, {owners}: expected {want:.4f}, got {got:.4f}")


def _merge(answer):
    draw = torch.Generator().manual_seed(0)
    for name, sizes, shift in (("one piece", [5], 0), ("three pieces", [1, 4, 7], 0),
                               ("scores near 800", [3, 3], 800), ("scores near -800", [3, 3], -800),
                               ("no key of the second piece seen", [3, 0, 2], 0),
                               ("no key of the first two pieces seen", [0, 0, 4], 0)):
        scores = torch.randn(2, 6, sum(sizes), generator=draw, dtype=torch.float64) + shift
        v = torch.randn(2, sum(sizes), 3, generator=draw, dtype=torch.float64)
        outs, lses = [], []
        for s, w in zip(scores.split(sizes, -1), v.split(sizes, 1)):
            outs.append(s.softmax(-1) @ w)
            lses.append(s.logsumexp(-1) if s.shape[-1] else torch.full((2, 6), -math.inf).double())
        got = run(name, answer, [x.clone() for x in outs], [x.clone() for x in lses])
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{name}: return a pair, outputs and logarithms")
        _close(f"{name}, outputs", got[0], scores.softmax(-1) @ v)
        _close(f"{name}, logarithms", got[1], scores.logsumexp(-1))


def _shards(answer):
    for length, n in (9, 2), (9, 4), (5, 1), (25, 3):
        tokens = torch.arange(length) * 7 + 100
        call = f"zigzag_shards of {length} tokens on {n} ranks"
        got = run(call, answer, tokens.clone(), n)
        if not isinstance(got, (tuple, list)) or len(got) != n:
            raise Wrong(f"{call}: return a list of {n} triples")
        size = (length - 1) // (2 * n)
        for r, triple in enumerate(got):
            at = torch.tensor([c * size + i for c in (r, 2 * n - 1 - r) for i in range(size)])
            want = {"inputs": tokens[at], "labels": tokens[at + 1], "places": at}
            if not isinstance(triple, (tuple, list)) or len(triple) != 3:
                raise Wrong(f"{call}: rank {r}'s item is no triple")
            for (name, right), x in zip(want.items(), triple):
                if not isinstance(x, torch.Tensor):
                    raise Wrong(f"{call}: rank {r}'s {name} should be a tensor, got {x!r:.80}")
                if x.tolist() != right.tolist():
                    raise Wrong(f"{call}: rank {r}'s {name} should be {right.tolist()}, "
                                f"got {x.tolist()!r:.80}")
    refuses("zigzag_shards of 10 tokens on 2 ranks", answer, torch.arange(10), 2)


def _ring(answer):
    for n in 1, 2, 3, 4:
        for H, K in (1, 1), (4, 2):
            _one_ring(answer, n, H, K, c=8, d=3)
    for r, (largest, scores, room) in enumerate(_real(answer, "3 real ranks", 3, _REAL_RING)):
        if largest > room:
            raise Wrong(f"3 real ranks: rank {r} made a tensor of {largest} numbers; one block of "
                        f"scores has {scores}, so keep no more than {room} in one")


def _one_ring(answer, n, H, K, c, d):
    where = f"{n} ranks, {H} query and {K} key/value heads"
    draw = torch.Generator().manual_seed(10 * n + H)
    q, k, v = (torch.randn(h, n * c, d, generator=draw, dtype=torch.float64) for h in (H, K, K))
    want = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    ranks = _Ranks(n)

    def one(rank):
        mine = [x[:, rank * c:(rank + 1) * c].clone() for x in (q, k, v)]

        def pass_right(x):
            empty = x.new_empty(0)
            items = [x if s == (rank + 1) % n else empty for s in range(n)]
            return ranks.send(rank, items)[(rank - 1) % n]
        return answer(*mine, rank, n, pass_right)
    outs = ranks.run(where, one)
    for r, out in enumerate(outs):
        _close(f"{where}: rank {r}", out, want[:, r * c:(r + 1) * c])
        most = (n - 1) * 2 * K * c * d
        if ranks.numbers[r] > most:
            raise Wrong(f"{where}: rank {r} sent {ranks.numbers[r]} numbers; {most} are enough")


def _dispatch(answer):
    for n, c, k in (1, 5, 1), (2, 6, 1), (3, 7, 2), (4, 9, 2), (4, 1, 3):
        for crowded in False, True:
            _one_dispatch(answer, n, c, k, crowded)
    _real(answer, "4 real ranks", 4, _REAL_DISPATCH)


def _one_dispatch(answer, n, c, k, crowded):
    where = f"{n} ranks, {c} tokens each, {k} experts a token" + ", all alike" * crowded
    draw = torch.Generator().manual_seed(100 * n + c)
    x = torch.randn(n, c, 4, generator=draw, dtype=torch.float64)
    logits = torch.randn(n, c, n, generator=draw, dtype=torch.float64)
    logits = logits + 50 * torch.arange(n) if crowded else logits
    matrices = torch.randn(n, 4, 4, generator=draw, dtype=torch.float64)
    best = logits.topk(k, -1)
    gates = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
    want = torch.einsum("rce,rcef->rcf", gates, torch.einsum("rcd,edf->rcef", x, matrices).tanh())
    ranks = _Ranks(n)

    def one(rank):
        return answer(x[rank].clone(), logits[rank].clone(), k,
                      lambda rows: (rows @ matrices[rank]).tanh(),
                      lambda items: ranks.send(rank, _list(items, n)))
    outs = ranks.run(where, one)
    chosen = (gates > 0).sum(1)  # [rank, expert]
    for r, out in enumerate(outs):
        _close(f"{where}: rank {r}", out, want[r])
        away = chosen[r].sum() + chosen[:, r].sum() - 2 * chosen[r, r]
        if ranks.numbers[r] > 4 * away:
            raise Wrong(f"{where}: rank {r} sent {ranks.numbers[r]} numbers; its slots elsewhere "
                        f"and others' slots here need {4 * away.item()}")


# ---------------------------------------------------------------- real ranks

_REAL_RING = """
from companion.exercises.context_expert_parallel import Largest
from companion.wire import counted
H, K, c, d, outs = 2, 2, 64, 32, []
draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(h, world_size * c, d, generator=draw, dtype=torch.float64)
           for h in (H, K, K))
want = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True,
                                      enable_gqa=True)[0]
here = slice(rank * c, (rank + 1) * c)
def pass_right(x):
    x, got = x.contiguous(), torch.empty_like(x)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, got, (rank - 1) % world_size)]):
        work.wait()
    return got
mine = [x[:, here].clone() for x in (q, k, v)]
with Largest() as seen:
    sent = counted(lambda: outs.append(answer(*mine, rank, world_size, pass_right)))
off = (outs[0] - want[:, here]).abs().max().item()
report = off, sent, 8 * 2 * (world_size - 1) * K * c * d, (
    seen.numbers, H * c * c, max(H * c * c, 2 * H * c * d))
"""

_REAL_DISPATCH = """
from companion.wire import counted
c, D, k, outs = 50, 32, 2, []
draw = torch.Generator().manual_seed(0)
x = torch.randn(world_size, c, D, generator=draw, dtype=torch.float64)
logits = torch.randn(world_size, c, world_size, generator=draw, dtype=torch.float64)
matrices = torch.randn(world_size, D, D, generator=draw, dtype=torch.float64)
best = logits.topk(k, -1)
gates = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
each = torch.einsum("cd,edf->cef", x[rank], matrices).tanh()
want = torch.einsum("ce,ced->cd", gates[rank], each)
def all_to_all(items):
    sent = torch.tensor([len(i) for i in items])
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    out = torch.empty(int(got.sum()), D, dtype=torch.float64)
    dist.all_to_all_single(out, torch.cat(list(items)), got.tolist(), sent.tolist())
    return list(out.split(got.tolist()))
def expert(rows):
    return (rows @ matrices[rank]).tanh()
mine = x[rank].clone(), logits[rank].clone(), k, expert, all_to_all
sent = counted(lambda: outs.append(answer(*mine)))
off = (outs[0] - want).abs().max().item()
chosen = (gates > 0).sum(1)
away = chosen[rank].sum() + chosen[:, rank].sum() - 2 * chosen[rank, rank]
report = off, sent, 8 * D * away.item(), None
"""


def _real(answer, where, n, cell):
    """What else ``cell`` reports of the answer on ``n`` processes, its bytes counted on the wire.

    3 KB of them are headers.
    """
    try:
        reports = on_ranks(where, answer, n, cell)
    except Wrong as wrong:
        if "NameError" not in str(wrong):
            raise
        raise Wrong(f"{wrong}. On real ranks your function finds torch and F only; import or "
                    "define anything else inside it") from wrong
    for r, (off, sent, needed, _) in enumerate(reports):
        if not off < 1e-9:
            raise Wrong(f"{where}: rank {r} is off by {off:.3g}")
        if sent > 1.02 * needed + 3000:
            raise Wrong(f"{where}: rank {r} sent {sent:,} bytes; {needed:,} are enough")
    return [more for *_, more in reports]


def _list(items, n):
    if not isinstance(items, (tuple, list)) or len(items) != n:
        raise Wrong(f"all_to_all takes a list of {n} tensors, one for each rank")
    return items


CHECKS = {
    "context_expert_parallel-1": _utilization,
    "context_expert_parallel-2": _merge,
    "context_expert_parallel-3": _shards,
    "context_expert_parallel-4": _ring,
    "context_expert_parallel-5": _dispatch,
}
