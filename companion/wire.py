"""Bytes that a rank sends: counted in the kernel of the operating system, and call by call.

``counted`` reads what Linux has sent through this process's TCP sockets, which is what gloo
uses: a measurement that no library can embellish. ``recorded`` lists the collectives that
PyTorch was asked for, on any backend (NCCL's bytes never pass the kernel). ``all_gather`` and
``reduce_scatter`` are PyTorch's, under whichever name this version has.

All are for ranks, that is for cells under ``%%torchrun`` and scripts under ``torchrun``.

Taught in: chapters/collectives.
"""
import contextlib
import os
import socket
import struct
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group as resolve
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Call", "all_gather", "counted", "recorded", "reduce_scatter", "ring_bytes",
           "sent_bytes"]

# Of Linux's struct tcp_info (include/uapi/linux/tcp.h): 64-bit counts at these offsets
_SENT, _TCP_INFO_BYTES = 200, 256
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def all_gather(into, x, group=None):
    """Fill ``into`` with ``x`` of every rank, in the order of ranks.

    into: (n * len(x), ...), x: (k, ...), both contiguous, of one dtype and device.
    """
    new = getattr(dist, "all_gather_single", None)
    return (new or dist.all_gather_into_tensor)(into, x, group=group)


def reduce_scatter(into, x, group=None):
    """Fill ``into`` with this rank's slice of the sum of ``x`` over all ranks.

    into: (k, ...), x: (n * k, ...), both contiguous, of one dtype and device.
    """
    new = getattr(dist, "reduce_scatter_single", None)
    return (new or dist.reduce_scatter_tensor)(into, x, group=group)


def sent_bytes():
    """Bytes this process has sent through its open TCP sockets, resent ones left out.

    The headers of TCP and IP do not count. Raises ValueError where the system keeps no count
    (macOS, or a sandbox that stands in for Linux's kernel).
    """
    if not hasattr(socket, "TCP_INFO"):
        raise ValueError("sent_bytes: only Linux counts the bytes of a TCP socket")
    total, folder = 0, "/proc/self/fd"
    for number in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP socket
            if os.readlink(f"{folder}/{number}").startswith("socket"):
                total += _of_socket(int(number))
    return total


def _of_socket(number):
    with socket.socket(fileno=os.dup(number)) as s:
        if s.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _SENT + 16:
        raise ValueError("sent_bytes: this kernel does not count the bytes of a TCP socket")
    sent, again = struct.unpack_from("2Q", info, _SENT)
    return sent - again


def counted(send, *arguments, **options):
    """Bytes that this rank sends through TCP in ``send(*arguments, **options)``.

    Every rank must call it, since it puts a barrier on both sides; the second one's messages,
    a few hundred bytes, are counted too. Raises ValueError where the system keeps no count.
    """
    dist.barrier()
    time.sleep(0.02)  # the barrier's own messages must have left
    start = sent_bytes()
    send(*arguments, **options)
    dist.barrier()
    sent = sent_bytes() - start
    if not sent and dist.get_world_size() > 1:  # not even the barrier
        raise ValueError("counted: this kernel's count of sent bytes stays zero")
    return sent


# Operators of PyTorch's dispatcher, in the namespaces c10d and _c10d_functional
_NAMES = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "reduce_": "reduce",
    "gather_": "gather", "scatter_": "scatter", "send": "send",
}


@dataclass(frozen=True)
class Call:
    """One collective that PyTorch was asked for.

    name: such as "all_reduce"; bytes: of the whole buffer (for an all-gather the gathered one,
    for a reduce-scatter the one before); ranks: how many took part.
    """
    name: str
    bytes: int
    ranks: int


def ring_bytes(call):
    """Bytes that one rank sends for ``call``: by a ring for collectives, all of a "send".

    Raises ValueError for a collective without a formula here, such as "broadcast", where what
    a rank sends depends on which rank it is.
    """
    if call.name == "send":
        return call.bytes
    if call.name not in _ROUNDS:
        raise ValueError(f"ring_bytes: no formula for {call.name!r}")
    return _ROUNDS[call.name] * (call.ranks - 1) * call.bytes / call.ranks


@contextlib.contextmanager
def recorded():
    """Yield a list that fills with a ``Call`` for each collective or send of this rank.

    Those of DistributedDataParallel, ``fully_shard`` and DTensor's ``redistribute`` are among
    them, in forward and backward. Not seen are those that DTensor runs inside an operator on
    DTensors, such as in ``loss_parallel``; those captured in a CUDA graph or compiled away by
    ``torch.compile`` may be missing, too.
    """
    calls = []
    with _Recorder(calls):
        yield calls


class _Recorder(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _NAMES.get(operator._schema.name.split("::")[1])
        if name and operator.namespace in ("c10d", "_c10d_functional"):
            given = {a.name: v for a, v in zip(operator._schema.arguments, args)} | kwargs
            self.calls.append(_call(name, operator.namespace, given))
        return operator(*args, **kwargs)


def _call(name, namespace, given):
    sizes = [_bytes(v) for v in given.values()]
    if namespace == "c10d":
        ranks = dist.ProcessGroup.unbox(given["process_group"]).size()
        return Call(name, max(sizes), ranks)
    ranks = resolve(given["group_name"]).size()
    whole = ranks if name == "all_gather" and "out" not in given else 1
    return Call(name, max(sizes) * whole, ranks)


def _bytes(value):
    """Bytes of a tensor, of a list of tensors, or of lists of them; 0 for anything else."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0
