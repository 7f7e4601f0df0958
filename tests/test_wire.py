"""What ranks send: the kernel's count and the list of calls, against each other and formulas."""
import pytest

from companion import ranks
from companion.wire import Call, ring_bytes, sent_bytes

CALLS = """
import torch.distributed as dist
from companion.wire import all_gather, recorded, reduce_scatter
x, part = torch.ones(400), torch.ones(100)
with recorded() as calls:
    dist.all_reduce(x)
    all_gather(x, part)
    reduce_scatter(part, x)
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.broadcast(x, src=0)
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, part, (rank + 1) % 4),
                                   dist.P2POp(dist.irecv, x[:100].clone(), (rank - 1) % 4)])
    [w.wait() for w in work]
"""
ENGINES = """
import companion.data_parallel  # mends fully_shard in torch 2.6
from companion.wire import recorded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import warnings; warnings.simplefilter("ignore")
x, mesh = torch.ones(2, 16), init_device_mesh("cpu", (2,))
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16, bias=False))
with recorded() as of_ddp:
    ddp(x).sum().backward()
fsdp = fully_shard(torch.nn.Linear(16, 16, bias=False), mesh=mesh)
with recorded() as of_fsdp:
    fsdp(x).sum().backward()
d = distribute_tensor(torch.ones(16, 16), mesh, [Shard(0)])
with recorded() as of_dtensor:
    d.redistribute(mesh, [Replicate()]).to_local()
"""
COUNTED = """
import torch.distributed as dist
from companion.wire import all_gather, counted, recorded, ring_bytes
x, part = torch.ones(2**16), torch.ones(2**14)
wire = counted(dist.all_reduce, x), counted(all_gather, x, part), counted(lambda: None)
with recorded() as calls:
    dist.all_reduce(x)
    all_gather(x, part)
said = [ring_bytes(c) for c in calls]
"""


def test_every_kind_of_call_is_recorded_with_its_bytes_and_ranks():
    calls = ranks.run(CALLS, 4, get=["calls"], backend="gloo").values["calls"]
    names = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
    assert calls == 4 * [[*(Call(n, 1600, 4) for n in names), Call("send", 400, 4)]]


def test_calls_of_ddp_fsdp_and_dtensor_are_recorded():
    got = ranks.run(ENGINES, 2, get=["of_ddp", "of_fsdp", "of_dtensor"], backend="gloo").values
    whole = 16 * 16 * 4
    for calls in got["of_ddp"]:
        assert [c for c in calls if c.name != "broadcast"] == [Call("all_reduce", whole, 2)]
    for calls in got["of_fsdp"]:
        assert calls[0] == Call("all_gather", whole, 2)
        assert calls[-1] == Call("reduce_scatter", whole, 2)
    assert got["of_dtensor"] == 2 * [[Call("all_gather", whole, 2)]]


def test_the_kernel_counts_what_the_formula_says():
    got = ranks.run(COUNTED, 4, get=["wire", "said"], backend="gloo").values
    for wire, said in zip(got["wire"], got["said"]):
        assert wire[2] < 2000  # nothing but barriers
        for count, formula in zip(wire, said):
            assert formula <= count < 1.03 * formula


def test_bad_input():
    with pytest.raises(ValueError, match="no formula for 'broadcast'"):
        ring_bytes(Call("broadcast", 8, 2))
    assert ring_bytes(Call("send", 8, 2)) == 8 and ring_bytes(Call("all_reduce", 8, 4)) == 12


def test_a_system_that_keeps_no_count_is_said(monkeypatch):
    import socket
    monkeypatch.delattr(socket, "TCP_INFO")
    with pytest.raises(ValueError, match="only Linux counts"):
        sent_bytes()


def test_a_count_that_stays_zero_is_said():
    """A sandbox may answer with the right length and nothing in it."""
    cell = """
from companion import wire
wire._of_socket = lambda number: 0
try:
    wire.counted(lambda: None)
except ValueError as error:
    said = str(error)
"""
    said = ranks.run(cell, 2, get=["said"], backend="gloo").values["said"]
    assert said == 2 * ["counted: this kernel's count of sent bytes stays zero"]
