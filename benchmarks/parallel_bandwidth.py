"""How fast ranks exchange bytes: four collectives, from 1 KiB to 1 GiB.

Bus bandwidth: the bytes that a ring algorithm makes each rank send, over the time of the slowest
rank; it compares with the link's ceiling per direction, whatever the number of ranks. Buffers
are in bf16; "bytes" is the whole buffer (what is gathered, or what there is to scatter).

PYTHONPATH=. torchrun --standalone --nproc-per-node 2 benchmarks/parallel_bandwidth.py
"""
import statistics
import time

import torch
import torch.distributed as dist

from companion.wire import Call, all_gather, reduce_scatter, ring_bytes
from parallel_kit import Ledger, on_ranks, setting

SIZES = [2**e for e in range(10, 31, 2)]
TINY = [2**10, 2**14]
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collective(name, ranks, nbytes):
    """(a function that runs it, what it fills, what must then stand there) on this rank."""
    n, rank = ranks.size, ranks.rank
    count = nbytes // 2 // n * n  # bf16
    def tensor(size, value):
        return torch.full((size,), value, dtype=torch.bfloat16, device=ranks.device)
    total = float(n * (n + 1) // 2)
    whole = torch.arange(1, n + 1, device=ranks.device).repeat_interleave(count // n)
    if name == "all_reduce":
        x = tensor(count, rank + 1)  # later calls sum it again and again, to infinity
        return lambda: dist.all_reduce(x), x, torch.full_like(x, total)
    if name == "all_gather":
        out, x = tensor(count, 0), tensor(count // n, rank + 1)
        return lambda: all_gather(out, x), out, whole.to(out.dtype)
    if name == "reduce_scatter":
        out, x = tensor(count // n, 0), tensor(count, rank + 1)
        return lambda: reduce_scatter(out, x), out, torch.full_like(out, total)
    out, x = tensor(count, 0), tensor(count, rank + 1)
    return lambda: dist.all_to_all_single(out, x), out, whole.to(out.dtype)


def measure(name, ranks, nbytes):
    """Time ``name`` on a buffer of ``nbytes``; it must give what it should first."""
    if ranks.size < 2:
        raise ValueError("bandwidth: needs at least two ranks")
    run, filled, expected = collective(name, ranks, nbytes)
    run()
    if not torch.equal(filled, expected):
        raise ValueError(f"bandwidth: {name} of {nbytes} bytes gave wrong values")
    del expected
    calls = 5 if nbytes > 2**24 or not ranks.cuda else 20
    clock = _events if ranks.cuda else _wall
    for _ in range(3):
        run()
    times = [max(t) for t in zip(*ranks.all([clock(ranks, run, calls) for _ in range(5)]))]
    seconds = statistics.median(times)
    sent = ring_bytes(Call(name, filled.nbytes if name != "reduce_scatter"
                           else filled.nbytes * ranks.size, ranks.size))
    link = ranks.gpu.link_bytes_per_s if ranks.gpu else None
    return {"collective": name, "bytes": nbytes, "seconds": seconds, "low": min(times),
            "high": max(times), "sent": sent, "bus_bytes_per_s": sent / seconds,
            "link_bytes_per_s": link, "of_link": sent / seconds / link if link else None,
            "summary": f"{sent / seconds / 1e9:.3f} GB/s"}


def _events(ranks, run, calls):
    """Seconds a call on the GPU, of ``calls`` one after the other."""
    dist.barrier(group=ranks.talk)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _wall(ranks, run, calls):
    dist.barrier(group=ranks.talk)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def main(o, ranks):
    ledger = Ledger(ranks, f"parallel_bandwidth_{ranks.size}", __file__, o.out,
                    setting(ranks), o.budget)
    for name in o.only.split(",") if o.only else NAMES:
        for nbytes in TINY if o.tiny else SIZES:
            ledger.run(f"{name} {nbytes}", lambda: measure(name, ranks, nbytes))


if __name__ == "__main__":
    on_ranks(main, __doc__)
