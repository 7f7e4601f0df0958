"""Ring attention, Ulysses and experts on ranks: equal to one process; what they send and keep."""
import textwrap

import pytest

torch = pytest.importorskip("torch")
from companion import experts, ranks, ring_attention  # noqa: E402

GROUPS = "groups = [dist.new_group(list(range(n))) for n in (1, 2, 3, 4)]\n"


def run(cell, *get, nproc=4):
    got = ranks.run(GROUPS * (nproc == 4) + textwrap.dedent(cell), nproc, get=get, backend="gloo",
                    timeout=100).values
    return [got[name] for name in get]


# ---------------------------------------------------------------- attention

ATTENTION = """
import random

from companion import ring_attention as module
from companion.ring_attention import LAYOUTS, positions, ring_attention, ulysses_attention

def case(draw, seed):
    n, K, B = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3]), draw.choice([1, 2])
    H, T = K * draw.choice([1, 2, 4]), 2 * n * draw.choice([1, 2, 5])
    d, causal = draw.choice([1, 3, 8]), draw.random() < 0.6
    g = torch.Generator().manual_seed(seed)
    x = [torch.randn(B, h, T, d, generator=g, dtype=torch.float64) for h in (H, K, K, H)]
    x = [t.requires_grad_() for t in x[:3]] + x[3:]
    y = torch.nn.functional.scaled_dot_product_attention(*x[:3], is_causal=causal, enable_gqa=True)
    return n, T, causal, x, [y, *torch.autograd.grad((y * x[3]).sum(), x[:3])]

def error(f, at, x, want):
    mine = [t[:, :, at].detach().requires_grad_() for t in x[:3]]
    y = f(*mine)
    got = [y, *torch.autograd.grad((y * x[3][:, :, at]).sum(), mine)]
    return max((a - b[:, :, at]).abs().max().item() for a, b in zip(got, want))
"""


def test_attention_equals_one_process():
    errors, heads = run(ATTENTION + """
draw, errors, heads = random.Random(0), [], 0
for seed in range(40):
    n, T, causal, x, want = case(draw, seed)
    if rank >= n:
        continue
    group, (H, K) = groups[n - 1], (x[0].shape[1], x[1].shape[1])
    for layout in LAYOUTS:
        at = positions(T, rank, n, layout)
        ring = lambda *t: ring_attention(*t, causal, layout, group=group)
        errors.append(error(ring, at, x, want))
    if H % n == 0 and (K % n == 0 or n % K == 0):
        at, heads = positions(T, rank, n, "contiguous"), heads + 1
        errors.append(error(lambda *t: ulysses_attention(*t, causal, group=group), at, x, want))
""", "errors", "heads")
    assert max(map(max, errors)) < 1e-12 and len(errors[0]) >= 80 and heads[0] >= 10


FAULTS = {  # each would leave a shape right and a value wrong
    "pieces are not rescaled": "module.merge = lambda a, l, b, m: (a + b, torch.logaddexp(l, m))",
    "key gradients stay where they are": "module._Turn = Stay",
    "a diagonal block is computed in full":
        "module._pairs = lambda *a: [(i, j, False) for i, j, _ in pairs(*a)]",
    "shared heads lose all but one gradient": "module._sum_heads = lambda g, r: g[:, :, ::r]",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    errors, = run(ATTENTION + f"""
pairs = module._pairs

class Stay(module._Turn):
    def __init__(self, x, group, tag):
        super().__init__(x, group, tag)
        self.tag = tag

    def wait(self):
        got = super().wait()
        return self.sent if self.tag else got

{FAULTS[fault]}
torch.manual_seed(0)
x = [torch.randn(1, h, 16, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2, 4)]
y = torch.nn.functional.scaled_dot_product_attention(*x[:3], is_causal=True, enable_gqa=True)
want = [y, *torch.autograd.grad((y * x[3].detach()).sum(), x[:3])]
at = positions(16, rank, 2, "zigzag")
errors = error(ring_attention, at, x[:3] + [x[3].detach()], want)
""", "errors", nproc=2)
    assert max(errors) > 1e-3 or max(errors) != max(errors)


def test_ranks_apart_share_a_sequence_and_experts():
    """Groups {0, 2} and {1, 3}: neighbors by the group's ranks, two copies of each expert."""
    errors, second = run(ATTENTION + """
from companion.experts import ExpertParallel, MoE

group = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
torch.manual_seed(rank % 2)
x = [torch.randn(1, h, 24, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
weights = torch.randn(1, 4, 24, 4, dtype=torch.float64)
y = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
want = [y, *torch.autograd.grad((y * weights).sum(), x)]
at = positions(24, rank // 2, 2, "zigzag")
errors = [error(lambda *t: ring_attention(*t, group=group), at, x + [weights], want)]
at = positions(24, rank // 2, 2, "contiguous")
errors.append(error(lambda *t: ulysses_attention(*t, group=group), at, x + [weights], want))

q = x[0].detach()[:, :, at].requires_grad_()
g, = torch.autograd.grad(ring_attention(q, q, q, group=group).square().sum(), q, create_graph=True)
try:
    g.sum().backward()
    second = None
except RuntimeError as refused:
    second = str(refused)

torch.manual_seed(0)
whole = MoE(6, 5, 4, 2).double()
mine, tokens = ExpertParallel(whole, group), torch.randn(4, 30, 6, dtype=torch.float64)
copies = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
whole(tokens.flatten(0, 1)).square().sum(1).mean().backward()
mine(tokens[rank]).square().sum(1).mean().backward()
for p, q in zip(mine.experts.parameters(), whole.experts.parameters()):
    dist.all_reduce(p.grad, group=copies)
    errors.append((p.grad / 4 - q.grad.chunk(2)[rank // 2]).abs().max().item())
""", "errors", "second")
    assert max(map(max, errors)) < 1e-12
    assert all("once_differentiable" in text for text in second)


def test_bytes_and_memory_of_attention():
    sent, kept = run("""
    from companion.counting import saved_tensors, storage_bytes
    from companion.ring_attention import ring_attention, ulysses_attention
    from companion.wire import counted

    sent, kept = [], []
    for n, B, H, K, d, dtype in (2, 2, 6, 2, 32, torch.float64), (3, 1, 6, 6, 32, torch.float32), \\
            (4, 1, 8, 2, 64, torch.float32), (4, 1, 8, 4, 64, torch.float16):
        c, size = 64, torch.empty(0, dtype=dtype).element_size()
        x = [torch.randn(B, h, c, d).to(dtype).requires_grad_() for h in (H, K, K)]
        for f in ring_attention, ulysses_attention:
            if H % n or rank >= n:  # outside the group: the barriers of counted only
                counted(lambda: None), counted(lambda: None)
                continue
            ys, unit = [], B * c * d * size
            a = counted(lambda: ys.append(f(*x, group=groups[n - 1])))
            b = counted(lambda: ys[0].sum().backward())
            if f is ring_attention:
                wide = 2 if dtype == torch.float16 else 1  # gradients travel in float32
                want = 2 * (n - 1) * K * unit, (2 * (n - 1) + 2 * n * wide) * K * unit
            else:
                want = [(n - 1) * (2 * H + 2 * max(K, n)) * unit // n] * 2
            sent += [(a, want[0]), (b, want[1])]
        if rank < n:
            wide = torch.promote_types(dtype, torch.float32).itemsize
            got = storage_bytes(saved_tensors(lambda: ring_attention(*x, group=groups[n - 1])))
            kept.append((got, B * c * (size * d * (2 * H + 2 * K) + wide * H)))
    """, "sent", "kept")
    for rank_sent, rank_kept in zip(sent, kept):
        assert all(want < got < 1.03 * want + 2000 for got, want in rank_sent), rank_sent
        assert all(got == want for got, want in rank_kept), rank_kept
    assert len(sent[0]) >= 14 and len(kept[0]) == 4


def test_a_decoder_trains_as_on_one_process():
    errors, = run("""
    from companion.gpt import Config, Decoder
    from companion.ring_attention import (decoder_logits, positions, ring_attention,
                                          ulysses_attention)

    attention = torch.nn.functional.scaled_dot_product_attention
    errors = []
    for n, heads, kv in (1, 2, 1), (2, 4, 2), (3, 3, 3), (4, 4, 1):
        config = Config(vocab=32, width=8 * heads, layers=2, heads=heads, kv_heads=kv, hidden=24)
        data = torch.randint(32, (4, 2, 49), generator=torch.Generator().manual_seed(n))
        ends = []
        for form in None, "contiguous", "zigzag", "ulysses":
            torch.manual_seed(n)
            model = Decoder(config).double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            group, at = groups[n - 1], torch.arange(48)
            if form and rank < n:
                at = positions(48, rank, n, "zigzag" if form == "zigzag" else "contiguous")
            def attend(q, k, v):
                if form is None:
                    return attention(q, k, v, is_causal=True, enable_gqa=True)
                if form == "ulysses":
                    return ulysses_attention(q, k, v, group=group)
                return ring_attention(q, k, v, layout=form, group=group)
            for batch in data if rank < n or form is None else []:
                y = decoder_logits(model, batch[:, at], at, attend).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(y, batch[:, at + 1].flatten())
                optimizer.zero_grad()
                (loss * len(at) / 48).backward()
                for p in model.parameters() if form else []:
                    dist.all_reduce(p.grad, group=group)
                optimizer.step()
            ends.append(list(model.parameters()))
        for end in ends[1:] if rank < n else []:
            errors.append(max((a - b).abs().max().item() for a, b in zip(end, ends[0])))
    """, "errors")
    assert max(map(max, errors)) < 1e-9 and len(errors[0]) == 12


def test_decoder_logits_are_the_models():
    from companion.gpt import Config, Decoder
    torch.manual_seed(0)
    model = Decoder(Config(vocab=32, width=32, layers=2, heads=4, kv_heads=2, hidden=24))
    tokens = torch.randint(32, (2, 20))
    got = ring_attention.decoder_logits(
        model, tokens, torch.arange(20), lambda q, k, v:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    torch.testing.assert_close(got, model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ring_attention.LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_token_has_one_place(layout, n):
    parts = [ring_attention.positions(24, r, n, layout) for r in range(n)]
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert {len(p) for p in parts} == {24 // n}


@pytest.mark.parametrize("T, n, layout, named", [
    (10, 4, "contiguous", "4 equal chunks"), (12, 4, "zigzag", "8 equal chunks"),
    (8, 2, "striped", "'striped'")])
def test_no_such_cut(T, n, layout, named):
    with pytest.raises(ValueError, match=named):
        ring_attention.positions(T, 0, n, layout)


@pytest.mark.parametrize("shapes", [
    ((1, 4, 8, 2), (1, 3, 8, 2), (1, 3, 8, 2)), ((1, 4, 8, 2), (1, 2, 8, 2), (1, 4, 8, 2)),
    ((1, 4, 8, 2), (1, 2, 6, 2), (1, 2, 6, 2)), ((4, 8, 2), (2, 8, 2), (2, 8, 2)),
    ((1, 4, 7, 2), (1, 2, 7, 2), (1, 2, 7, 2))])
def test_shapes_that_do_not_fit_are_named(shapes):
    with pytest.raises(ValueError, match="no fit|in two"):
        ring_attention.ring_attention(*map(torch.zeros, shapes))


# ---------------------------------------------------------------- experts

def test_experts_equal_one_process():
    errors, dropped, cases = run("""
    import random

    from companion.experts import ExpertParallel, MoE

    draw, errors, dropped, cases = random.Random(1), [0.0], 0, 0
    for seed in range(24):
        n = draw.choice([1, 2, 3, 4])
        E, D = n * draw.choice([1, 2, 3]), draw.choice([3, 8])
        k, capacity = draw.randint(1, min(3, E)), draw.choice([None, 1, 4])
        sizes = [draw.choice([0, 1, 7, 20]) for _ in range(n)]
        sizes[0] = max(1, sizes[0])
        torch.manual_seed(seed)
        whole = MoE(D, 5, E, k, capacity).double()
        whole.bias.copy_(torch.randn(E))
        data = [[torch.randn(2, s, D, dtype=torch.float64) for s in sizes] for _ in range(3)]
        if rank >= n:
            continue
        cases += 1
        mine = ExpertParallel(whole, groups[n - 1])
        both = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (whole, mine)]
        for step in data:
            xs = [x.clone().requires_grad_() for x, _ in step]
            ys = [whole(x) for x in xs]
            loss = sum((y - t).square().sum() for y, (_, t) in zip(ys, step)) / sum(sizes)
            loss.backward()
            x = step[rank][0].clone().requires_grad_()
            y = mine(x)
            ((y - step[rank][1]).square().sum() / sum(sizes)).backward()
            dist.all_reduce(mine.router.weight.grad, group=groups[n - 1])
            pairs = [(y, ys[rank]), (x.grad, xs[rank].grad),
                     (mine.router.weight.grad, whole.router.weight.grad)]
            pairs += [(p.grad, q.grad.chunk(n)[rank]) for p, q in zip(
                mine.experts.parameters(), whole.experts.parameters())]
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            pairs += [(p, q.chunk(n)[rank]) for p, q in zip(
                mine.experts.parameters(), whole.experts.parameters())]
            pairs.append((mine.router.weight, whole.router.weight))
            errors += [(a - b).abs().max().item() for a, b in pairs if a.numel()]
            dropped += (~mine.seen[2]).sum().item()
    """, "errors", "dropped", "cases")
    assert max(map(max, errors)) < 1e-9 and sum(dropped) > 50 and cases[0] == 24


def test_bytes_of_experts():
    sent, loads = run("""
    from companion.experts import ExpertParallel, MoE, load
    from companion.wire import counted

    torch.manual_seed(0)
    mine = ExpertParallel(MoE(64, 8, 8, 2, capacity=90).double())
    x, ys = torch.randn(4, 300, 64, dtype=torch.float64)[rank].requires_grad_(), []
    sent = counted(lambda: ys.append(mine(x))), counted(lambda: ys[0].sum().backward())
    loads = load(mine.seen[0][mine.seen[2]], 8).tolist()
    """, "sent", "loads")
    slots = torch.tensor(loads).view(4, 4, 2).sum(2)
    away = slots - slots.diag().diag()
    assert slots.sum() < 4 * 300 * 2  # the capacity dropped some
    for r in range(4):
        want = 64 * 8 * (away[r].sum() + away[:, r].sum()).item()
        assert all(want < got < 1.02 * want + 2000 for got in sent[r]), (r, want, sent[r])


def test_experts_that_cannot_be_shared():
    refused, = run("""
    from companion.experts import ExpertParallel, MoE
    refused = None
    try:
        ExpertParallel(MoE(4, 4, 3, 1))
    except ValueError as error:
        refused = str(error)
    """, "refused", nproc=2)
    assert refused == ["ExpertParallel: 2 ranks do not divide 3 experts"] * 2


@pytest.mark.parametrize("options, named", [
    (dict(k=0), "got 0"), (dict(k=5), "got 5"), (dict(k=1, capacity=0), "got 0")])
def test_no_such_layer(options, named):
    with pytest.raises(ValueError, match=named):
        experts.MoE(4, 4, 4, **options)


def test_the_layer_is_its_definition():
    torch.manual_seed(0)
    layer = experts.MoE(6, 5, 4, 2).double()
    x = torch.randn(9, 6, dtype=torch.float64)
    shares = (x @ layer.router.weight.T).softmax(-1)
    for t in range(9):
        best = shares[t].argsort(descending=True)[:2]
        e = layer.experts
        hidden = [torch.nn.functional.silu(x[t] @ e.gate[i]) * (x[t] @ e.up[i]) for i in best]
        want = sum(shares[t, i] / shares[t, best].sum() * h @ e.down[i]
                   for i, h in zip(best, hidden))
        torch.testing.assert_close(layer(x)[t], want)


def test_first_choices_are_seated_first():
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
    assert experts.fits(chosen, 2, 2).tolist() == [[True, False]] * 4
    assert experts.fits(chosen, 2, 3).tolist() == [[True, True]] * 2 + [[True, False]] * 2
    assert experts.fits(chosen, 2, 4).all()


def test_the_bias_chooses_and_does_not_weigh():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    chosen, weights, shares = experts.route(logits, 2, torch.tensor([0.0, -1.0, 1.0]))
    assert chosen.tolist() == [[2, 0]]
    torch.testing.assert_close(weights[0], shares[0, [2, 0]] / shares[0, [2, 0]].sum())


def test_balance_loss_is_one_where_even():
    even = torch.full((6, 4), 0.25)
    assert experts.balance_loss(even, torch.tensor([0.7, 0.1, 0.1, 0.1])).item() == pytest.approx(1)
    sharp = torch.eye(4)[[0, 0, 0, 1]]
    got = experts.balance_loss(sharp, torch.tensor([0.75, 0.25, 0, 0]))
    assert got.item() == pytest.approx(2.5)
