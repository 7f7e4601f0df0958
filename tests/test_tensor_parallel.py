"""Tensor parallelism against one process: outputs, gradients, several steps, bytes, memory.

One launch of four ranks runs many random cases: ranks 0 to n-1 are the group of size n.
"""
import pytest

from companion import ranks

# On the ranks: a decoder in float64 throughout (the plain one rotates in fp32), and how far a
# cut model is from the whole one in loss, logits, gradients, their norm, and after AdamW's steps.
COMMON = """
import copy, random, time
import torch.nn.functional as F
from companion import gpt
import companion.tensor_parallel as tp
from companion.wire import counted, recorded, ring_bytes
from companion.counting import Film, storage_bytes


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


gpt.rotate = rotate
groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 3, 4)}


def decoder(seed, layers=2, **sizes):
    torch.manual_seed(seed)
    model = gpt.Decoder(gpt.Config(layers=layers, context=64, **sizes)).double()
    for p in model.parameters():  # norms' weights of ones would hide which is which
        p.data += 0.1 * torch.randn_like(p)
    return model


def with_gradients(model):
    twin = copy.deepcopy(model)
    for a, b in zip(twin.parameters(), model.parameters()):
        a.data = b.grad.clone()
    return twin


def apart(a, b):
    names = [name for name, _ in a.named_parameters()]
    assert names == [name for name, _ in b.named_parameters()]
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))


def worst(whole, n, sequence, regather, batches, steps=3):
    # batches: token tensors whose gradients are accumulated into one step
    group = groups[n]
    mine = tp.parallelize(copy.deepcopy(whole), group, sequence, regather)
    ways = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (whole, mine)]
    off = []
    for _ in range(steps):
        for way in ways:
            way.zero_grad()
        for ids, targets in batches:
            logits = whole(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            own = mine(ids)
            same = tp.vocabulary_cross_entropy(own, targets, group)
            same.backward()
            off += [abs(loss.item() - same.item()),
                    (logits.chunk(n, -1)[rank] - own).abs().max().item()]
        grads = tp.parallelize(with_gradients(whole), group)
        off.append(max((g - p.grad).abs().max().item()
                       for g, p in zip(grads.parameters(), mine.parameters())))
        norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        off.append(abs(norm.item() - tp.grad_norm(mine, group).item()))
        for way in ways:
            way.step()
    off.append(apart(tp.parallelize(copy.deepcopy(whole), group), mine))
    return max(off)
"""
# Few heads and many, one key/value head, as many as heads, fewer than ranks; odd widths.
EQUAL = COMMON + """
draw, results = random.Random(0), []
for case in range(20):
    n = case % 4 + 1
    kv = draw.choice([k for k in (1, 2, 3, 4, 6) if k % n == 0 or n % k == 0])
    heads = kv * draw.choice([m for m in (1, 2, 3, 4) if kv * m % n == 0])
    sizes = dict(heads=heads, kv_heads=kv, width=heads * draw.choice([2, 4, 6]),
                 hidden=n * draw.randint(1, 9), vocab=n * draw.randint(2, 9))
    B, T = draw.randint(1, 3), n * draw.randint(1, 4)
    sequence = draw.random() < 0.7
    regather = sequence and draw.random() < 0.5
    batches = []
    for _ in range(draw.randint(1, 2)):
        ids, targets = torch.randint(0, sizes["vocab"], (2, B, T),
                                     generator=torch.Generator().manual_seed(case))
        targets[0, 0] = -100 if T > 1 else targets[0, 0]
        batches.append((ids, targets))
    if rank < n:
        whole = decoder(case, **sizes)
        results.append((n, sequence, regather, sizes, B, T,
                        worst(whole, n, sequence, regather, batches)))
"""
# Each change is one that people make. It must move the result by far more than the tolerance.
BROKEN = COMMON + """
def attempt(**changes):
    kept = {name: getattr(tp, name) for name in changes}
    for name, value in changes.items():
        setattr(tp, name, value)
    ids, targets = torch.randint(0, 16, (2, 2, 8), generator=torch.Generator().manual_seed(1))
    sizes = dict(heads=4, kv_heads=2, width=16, hidden=24, vocab=16)
    off = worst(decoder(3, **sizes), 4, True, False, [(ids, targets)], steps=1)
    for name, value in kept.items():
        setattr(tp, name, value)
    return off


class ByModulo(tp.ColumnLinear):
    def __init__(self, linear, piece, pieces, copies=1):
        super().__init__(linear, rank % pieces, pieces, copies)


off = {"as it is": attempt(), "gradients of norms and shared heads": attempt(
           _sum_gradient=lambda parameter, group: None),
       "key/value head by modulo": attempt(ColumnLinear=ByModulo)}
plain, tp._Gather.backward = tp._Gather.backward, staticmethod(
    lambda ctx, grad: (grad.chunk(4, 1)[rank].contiguous(), None))
off["no sum where a region begins"] = attempt()
tp._Gather.backward = plain
"""
LINEAR = COMMON + """
off, exact = 0, []
for case in range(12):
    n = case % 4 + 1
    make = torch.Generator().manual_seed(case)
    linear = torch.nn.Linear(3 * n, 2 * n).double()
    x = torch.randn(2, 2 * n, 3 * n, generator=make, dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(linear.weight, generator=make)
    torch.nn.init.normal_(linear.bias, generator=make)
    g = torch.randn(2, 2 * n, 2 * n, generator=make, dtype=torch.float64)
    linear(x).backward(g)
    if rank >= n:
        continue
    for sequence in False, True:
        row = tp.RowLinear(linear, groups[n], sequence)
        y = row(x.detach().chunk(n, -1)[rank])
        tokens = (lambda t: t.chunk(n, 1)[rank]) if sequence else (lambda t: t)
        y.backward(tokens(g))
        column = tp.ColumnLinear(linear, rank, n)
        mine = tokens(x.detach()).requires_grad_()
        z = column(tp.enter(mine, groups[n], sequence))
        z.backward(g.chunk(n, -1)[rank])
        pairs = [(y, tokens(linear(x))), (row.bias.grad, linear.bias.grad),
                 (row.weight.grad, linear.weight.grad.chunk(n, 1)[rank]),
                 (z, linear(x).chunk(n, -1)[rank]), (mine.grad, tokens(x.grad)),
                 (column.weight.grad, linear.weight.grad.chunk(n, 0)[rank]),
                 (column.bias.grad, linear.bias.grad.chunk(n, 0)[rank])]
        off = max(off, *((a - b).abs().max().item() for a, b in pairs))
if rank < 2:  # the bias of a row-parallel layer counts once, forward and backward
    linear = torch.nn.Linear(4, 2)
    linear.weight.data.fill_(1)
    linear.bias.data = torch.tensor([10.0, 20.0])
    row = tp.RowLinear(linear, groups[2])
    y = row(torch.ones(1, 1, 2))
    y.sum().backward()
    exact = y.flatten().tolist(), row.bias.grad.tolist()
"""
LOSS = COMMON + """
off, kept, wide = 0, [], []
for case in range(16):
    n = case % 4 + 1
    make = torch.Generator().manual_seed(case)
    scale = [1, 1e4, 0, 30][case // 4]
    logits = scale * torch.randn(2, 5, 3 * n, generator=make, dtype=torch.float64)
    targets = torch.randint(0, 3 * n, (2, 5), generator=make)
    targets[0, :case % 4] = -100
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    (3 * want).backward()
    if rank < n:
        mine = logits.chunk(n, -1)[rank].clone().requires_grad_()
        got = tp.vocabulary_cross_entropy(mine, targets, groups[n])
        (3 * got).backward()
        off = max(off, abs(got.item() - want.item()) / max(1, want.item()),
                  (mine.grad - whole.grad.chunk(n, -1)[rank]).abs().max().item())
short = torch.full((1, 1, 2), float(rank), dtype=torch.bfloat16, requires_grad=True)
loss = tp.vocabulary_cross_entropy(short, torch.tensor([[7]]))
loss.backward()
low = loss.dtype == torch.float32 and short.grad.dtype == torch.bfloat16
none = tp.vocabulary_cross_entropy(torch.zeros(1, 1, 2), torch.tensor([[-100]])).isnan().item()
"""
COST = COMMON + """
sizes = dict(heads=4, kv_heads=4, width=64, hidden=96, vocab=64)
L, B, T, D, n = 2, 4, 64, 64, 4
ids, targets = torch.randint(0, 64, (2, B, T), generator=torch.Generator().manual_seed(1))
calls, wire, held = {}, {}, {}
for name, how in dict(tp=(), sp=(True,), again=(True, True)).items():
    model = tp.parallelize(decoder(0, **sizes), None, *how)
    step = lambda: tp.vocabulary_cross_entropy(model(ids), targets).backward()
    with recorded() as calls[name]:
        step()
    wire[name] = counted(step), sum(map(ring_bytes, calls[name]))
    film = Film(known=[ids, *model.parameters()])
    with film:
        graph = model(ids).grad_fn
    counts = []
    for _ in range(20):  # gloo's threads let go of its last buffer late
        time.sleep(0.01)
        counts.append(sum(s["bytes"] for s in film.open.values() if s["label"] != "known"))
    held[name] = min(counts)
    del graph
states = storage_bytes(model.parameters())
"""
BAD = COMMON + """
said = []
def refused(f, *arguments):
    try:
        f(*arguments)
    except ValueError as error:
        said.append(str(error))
    else:
        said.append("nothing")
for sizes in (dict(heads=2, kv_heads=1, width=16, hidden=24, vocab=16),
              dict(heads=12, kv_heads=3, width=48, hidden=24, vocab=16),
              dict(heads=4, kv_heads=2, width=16, hidden=22, vocab=16),
              dict(heads=4, kv_heads=2, width=16, hidden=24, vocab=18)):
    model = gpt.Decoder(gpt.Config(layers=1, **sizes))
    refused(tp.parallelize, model)
    assert type(model.blocks[0].attention.q) is torch.nn.Linear  # untouched
model = tp.parallelize(decoder(0, heads=4, kv_heads=2, width=16, hidden=24, vocab=16), None, True)
refused(model, torch.zeros(1, 6, dtype=torch.long))
refused(tp.vocabulary_cross_entropy, torch.zeros(1, 1, 2), torch.tensor([[8]]))
"""


def on_four(cell, *names):
    return ranks.run(cell, 4, get=names, backend="gloo", timeout=120).values


def test_equal_to_one_process():
    results = on_four(EQUAL, "results")["results"]
    assert [len(r) for r in results] == [20, 15, 10, 5]
    for rank, found in enumerate(results):
        for *case, off in found:
            assert off < 1e-10, (rank, case, off)
    modes = {(n, sequence, regather) for n, sequence, regather, *_ in results[0]}
    assert {mode[1:] for mode in modes} == {(False, False), (True, False), (True, True)}


def test_what_is_left_out_is_noticed():
    for off in on_four(BROKEN, "off")["off"]:
        assert off.pop("as it is") < 1e-10
        assert len(off) == 3 and all(value > 1e-3 for value in off.values()), off


def test_linear_layers_and_the_bias_once():
    got = on_four(LINEAR, "off", "exact")
    assert max(got["off"]) < 1e-12
    assert got["exact"][:2] == 2 * [([14.0, 24.0], [1.0, 1.0])]


def test_loss_over_a_cut_vocabulary():
    got = on_four(LOSS, "off", "low", "none")
    assert max(got["off"]) < 1e-12 and all(got["low"]) and all(got["none"])


def test_bytes_and_memory():
    got = on_four(COST, "calls", "wire", "held", "states", "L", "B", "T", "D")
    L, B, T, D = (got[name][0] for name in "LBTD")
    region, token, norms = B * T * D * 8, B * T * 8, 2 * L + 1
    for rank in range(4):
        calls = got["calls"][rank]
        sizes = {k: sorted((c.name, c.bytes) for c in v) for k, v in calls.items()}
        loss = [("all_reduce", token), ("all_reduce", 2 * token)]
        assert sizes["tp"] == sorted(loss + (4 * L + 2) * [("all_reduce", region)])
        sums = loss + norms * [("all_reduce", 8 * D)]
        halves = (4 * L + 2) * [("all_gather", region), ("reduce_scatter", region)]
        assert sizes["sp"] == sorted(sums + halves)
        assert sizes["again"] == sorted(sums + halves + (2 * L + 1) * [("all_gather", region)])
        sent, said = got["wire"][rank]["tp"]
        assert said <= sent < 1.02 * said
        held = got["held"][rank]
        kept = held["sp"] - held["again"]  # one gathered input a region, less the shard kept
        assert held["tp"] > held["sp"] and kept == (2 * L + 1) * region * 3 // 4, held
    # what is cut is a quarter; norms are whole
    cut = (64 * 64 + L * (4 * 64 * 64 + 3 * 64 * 96)) // 4
    assert got["states"] == 4 * [8 * (cut + norms * 64)]


def test_bad_input_names_the_value():
    for said in on_four(BAD, "said")["said"]:
        for message, part in zip(said, ("heads 2 does", "kv_heads 3 and 4", "hidden 22",
                                        "vocab 18", "6 tokens", "target 8 is")):
            assert part in message
        assert len(said) == 6


@pytest.mark.parametrize("pieces, piece, want", [(1, 0, [0, 1, 2, 3]), (2, 1, [2, 3])])
def test_cut(pieces, piece, want):
    import torch

    from companion.tensor_parallel import cut
    whole = torch.arange(4)
    part = cut(whole, 0, piece, pieces)
    assert part.tolist() == want and part.untyped_storage().nbytes() == 8 * len(want)
    with pytest.raises(ValueError, match="4 does not divide into 3"):
        cut(whole, 0, 0, 3)
