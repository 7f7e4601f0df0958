"""Attention over a sequence that lies on several ranks: a ring, or two all-to-alls.

    from companion.ring_attention import positions, ring_attention
    mine = positions(T, rank, n, "zigzag")             # which tokens this rank holds
    y = ring_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine])

``ring_attention``: queries stay, keys and values go round in n - 1 messages; every rank merges
what it saw by the online softmax. ``ulysses_attention``: each rank gets the whole sequence of
a part of the heads. ``decoder_logits`` runs the book's decoder on a part of a sequence.

Letters: B batch, H query heads, K key/value heads (K divides H), c tokens of one rank,
T = n * c tokens in all, d head width.

Limits: all ranks hold equally many tokens; no dropout, no other masks. On a GPU of compute
capability 8.0 or more, 16-bit blocks run in PyTorch's flash attention; elsewhere a block's
scores are stored while it is computed.
Sources: Liu et al. 2023, arXiv:2310.01889 (ring); Jacobs et al. 2023, arXiv:2309.14509
(Ulysses); Llama 3 report 2024, arXiv:2407.21783 (two chunks a rank).
Taught in: chapters/context_expert_parallel.
"""
import math

import torch
import torch.distributed as dist

__all__ = ["LAYOUTS", "all_to_all", "chunks_of", "decoder_logits", "merge", "positions",
           "ring_attention", "ulysses_attention"]

LAYOUTS = ("contiguous", "zigzag")


# ---------------------------------------------------------------- who holds what

def chunks_of(rank, n, layout):
    """Numbers of the chunks that ``rank`` of ``n`` holds, in order.

    "contiguous": chunk ``rank`` of n. "zigzag": chunks ``rank`` and ``2n - 1 - rank`` of 2n, so
    that an early one, which sees few keys under a causal mask, goes with a late one.
    Raises ValueError for another layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"ring: layout must be one of {LAYOUTS}, got {layout!r}")
    return [rank] if layout == "contiguous" else [rank, 2 * n - 1 - rank]


def positions(T, rank, n, layout="zigzag"):
    """Places in the whole sequence of the tokens that ``rank`` holds: [T / n] int64.

    Raises ValueError if the sequence cannot be cut into equal chunks.
    """
    chunks = chunks_of(rank, n, layout)
    pieces = n * len(chunks)
    if T % pieces:
        raise ValueError(f"ring: {T} tokens do not make {pieces} equal chunks "
                         f"({n} ranks, {layout})")
    size = T // pieces
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])


# ---------------------------------------------------------------- one block of scores

def merge(out, lse, more, more_lse):
    """Join attention over two sets of keys: (out, lse), softmax-weighted by their shares.

    out, more: [..., t, d], each normalized over its own keys; lse, more_lse: [..., t], the
    logarithm of the sum of exponentials that each was divided by.
    """
    total = torch.logaddexp(lse, more_lse)
    return (out * (lse - total).exp()[..., None]
            + more * (more_lse - total).exp()[..., None]), total


def _flash(q):
    """True where PyTorch's flash attention can compute a block of ``q``."""
    return (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
            and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
            and torch.cuda.get_device_capability(q.device) >= (8, 0))


def _wide(x):
    """``x`` in at least float32, in which sums over many keys are kept."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q, k, causal, scale):
    """[B, H, t, u] scores; causal: query i of this chunk sees keys 0 to i."""
    s = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -math.inf)
    return s


def _block(q, k, v, causal, scale):
    """Attention of [B, H, t, d] to one chunk of keys: (out, lse [B, H, t])."""
    if _flash(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale)[:2]
        return out, lse
    q, k, v = (_wide(x) for x in (q, k, v))
    s = _scores(q, k, causal, scale)
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp() @ v, lse


def _block_backward(grad, q, k, v, out, lse, causal, scale):
    """Gradients of q, k, v through one block. out and lse are those over *all* keys."""
    if _flash(q):
        t, seed = q.shape[-2], torch.empty(2, dtype=torch.uint64, device=q.device)  # not read
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, t, k.shape[-2], 0.0, causal, seed, seed[:0],
            scale=scale)
    grad, q, k, v, out = (_wide(x) for x in (grad, q, k, v, out))
    p = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    through_softmax = grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    s_grad = p * through_softmax * scale
    return s_grad @ k, s_grad.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


# ---------------------------------------------------------------- the ring

class _Turn:
    """A tensor on its way to the right neighbor, while the left one's arrives."""

    def __init__(self, x, group, tag):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        group = group or dist.group.WORLD
        right, left = (dist.get_global_rank(group, (rank + s) % n) for s in (1, -1))
        self.sent, self.got = x.contiguous(), torch.empty_like(x)
        self.works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, self.sent, right, group, tag),
            dist.P2POp(dist.irecv, self.got, left, group, tag)])

    def wait(self):
        for work in self.works:
            work.wait()
        return self.got


def _pairs(mine, theirs, causal):
    """(query chunk, key chunk, on the diagonal) of the blocks that are not masked out."""
    return [(i, j, causal and a == b) for i, a in enumerate(mine) for j, b in enumerate(theirs)
            if not causal or a >= b]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, layout, scale, group):
        ctx.options = causal, layout, scale, group
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        mine = chunks_of(rank, n, layout)
        queries = q.chunk(len(mine), 2)
        outs = [torch.zeros_like(_wide(x)) for x in queries]
        lses = [x.new_full(x.shape[:-1], -math.inf) for x in outs]
        kv, repeats = torch.stack([k, v]), q.shape[1] // k.shape[1]
        for step in range(n):
            turn = _Turn(kv, group, 0) if step < n - 1 else None  # travels while we compute
            theirs = chunks_of((rank - step) % n, n, layout)
            blocks = [_all_heads(x, repeats) for x in kv.chunk(len(theirs), 3)]
            for i, j, diagonal in _pairs(mine, theirs, causal):
                out, lse = _block(queries[i], *blocks[j], diagonal, scale)
                outs[i], lses[i] = merge(outs[i], lses[i], _wide(out), lse)
            if turn:
                kv = turn.wait()
        out, lse = torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        causal, layout, scale, group = ctx.options
        q, k, v, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        mine = chunks_of(rank, n, layout)
        cut = [[x.contiguous() for x in t.chunk(len(mine), 2)] for t in (grad, q, out, lse)]
        q_grads = [torch.zeros_like(_wide(x)) for x in cut[1]]
        kv, repeats, home = torch.stack([k, v]), q.shape[1] // k.shape[1], None
        for step in range(n):
            turn = _Turn(kv, group, 0) if step < n - 1 else None
            theirs = chunks_of((rank - step) % n, n, layout)
            blocks = [_all_heads(x, repeats) for x in kv.chunk(len(theirs), 3)]
            kv_grad = torch.zeros_like(_wide(kv))
            pieces = kv_grad.chunk(len(theirs), 3)  # views
            for i, j, diagonal in _pairs(mine, theirs, causal):
                g, x, y, z = (t[i] for t in cut)
                dq, *dkv = _block_backward(g, x, *blocks[j], y, z, diagonal, scale)
                q_grads[i] += dq
                pieces[j].add_(_sum_heads(_wide(torch.stack(dkv)), repeats))
            if home:  # what earlier ranks found for these keys and values
                kv_grad += home.wait()
            home = _Turn(kv_grad, group, 1) if n > 1 else None
            if turn:
                kv = turn.wait()
        k_grad, v_grad = (home.wait() if home else kv_grad).to(k.dtype)
        return torch.cat(q_grads, 2).to(q.dtype), k_grad, v_grad, None, None, None, None


def _all_heads(kv, repeats):
    """[2, B, K, t, d] -> [2, B, H, t, d]: each key/value head beside each of its queries."""
    return kv.repeat_interleave(repeats, dim=2) if repeats > 1 else kv.contiguous()


def _sum_heads(grads, repeats):
    """The reverse: [2, B, H, t, d] -> [2, B, K, t, d]."""
    return grads.unflatten(2, (-1, repeats)).sum(3)


def ring_attention(q, k, v, causal=True, layout="zigzag", scale=None, group=None):
    """Attention over the whole sequence, of which every rank holds a part: [B, H, c, d].

    q: [B, H, c, d]; k, v: [B, K, c, d], the tokens of ``positions(n * c, rank, n, layout)``, in
    that order; scale: of the scores, by default 1 / sqrt(d); group: the ranks that share the
    sequence. Every rank of the group must call it, and its backward. Differentiable once.

    A rank sends 2(n - 1) B K c d numbers forward; backward as many again, and with them
    2n B K c d gradients (in float32 for 16-bit inputs). It keeps q, k, v, the output, and H c B
    logarithms for the backward pass.
    Raises ValueError for shapes that do not fit, and for an odd c with "zigzag".
    """
    _check(q, k, v)
    held = len(chunks_of(0, 1, layout))
    if q.shape[2] % held:
        raise ValueError(f"ring: zigzag cuts a rank's tokens in two, got {q.shape[2]}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(q, k, v, causal, layout, scale, group)


def _check(q, k, v):
    fits = q.ndim == 4 and k.shape == v.shape and k.ndim == 4 and q.shape[1] % k.shape[1] == 0
    if not fits or (*q.shape[:1], *q.shape[2:]) != (*k.shape[:1], *k.shape[2:]):
        raise ValueError(f"attention: no fit: q {list(q.shape)}, k {list(k.shape)}, "
                         f"v {list(v.shape)}")


# ---------------------------------------------------------------- all-to-all

class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent, group):
        ctx.options = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.options), None, None, None


def all_to_all(x, received, sent, group=None):
    """Send rows of ``x`` to all ranks of the group, and get theirs; differentiable.

    x: [sum(sent), ...], first the ``sent[0]`` rows for rank 0; received: how many come from
    each rank. Returns [sum(received), ...]. Its gradient goes the same way back, so either
    all ranks need it or none does.
    """
    return _AllToAll.apply(x, received, sent, group)


def _to_heads(x, n, group):
    """[B, h, c, d], a part of the tokens -> [B, h / n, T, d], a part of the heads."""
    parts = torch.stack(x.chunk(n, 1))            # [n, B, h/n, c, d]: one for each rank
    got = all_to_all(parts, [1] * n, [1] * n, group)
    return torch.cat(got.unbind(), 2)


def _to_tokens(x, n, group):
    """The reverse of ``_to_heads``."""
    got = all_to_all(torch.stack(x.chunk(n, 2)), [1] * n, [1] * n, group)
    return torch.cat(got.unbind(), 1)


def ulysses_attention(q, k, v, causal=True, scale=None, group=None):
    """As ``ring_attention`` on contiguous chunks, by two all-to-alls: [B, H, c, d].

    Each rank computes H / n heads on all tokens. Where there are fewer key/value heads than
    ranks, each is sent to n / K ranks. A rank sends (n - 1) / n * B c d (2H + 2 max(K, n))
    numbers forward, and as many backward.
    Raises ValueError if n does not divide H, or if neither of n and K divides the other.
    """
    _check(q, k, v)
    n, H, K = dist.get_world_size(group), q.shape[1], k.shape[1]
    if H % n or (K % n and n % K):
        raise ValueError(f"ulysses: {n} ranks cannot share {H} query heads and {K} key/value "
                         f"heads")
    copies = max(1, n // K)
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (_to_heads(x, n, group) for x in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return _to_tokens(y, n, group)


# ---------------------------------------------------------------- a decoder on a part

def decoder_logits(model, tokens, at, attend, theta=None):
    """Logits [B, c, V] of a ``gpt.Decoder`` for tokens that stand at places ``at``.

    tokens: [B, c] integers; at: [c], places in the whole sequence; attend: a function
    of q [B, H, c, d] and k, v [B, K, c, d], positions turned in; theta: base of the rotary
    frequencies, or the frequencies themselves [d / 2] (default: the model's base).
    Unlike the model's own forward it keeps float64, and does not limit the context.
    """
    c = model.config
    d = c.width // c.heads
    x = model.embedding(tokens)
    if not isinstance(theta, torch.Tensor):
        pairs = torch.arange(0, d, 2, dtype=torch.float64, device=x.device)
        theta = (theta or c.theta) ** (-pairs / d)
    angles = at.to(x.device, torch.float64)[:, None] * theta.to(x.device, torch.float64)
    cos, sin = (t.to(_wide(x).dtype) for t in (angles.cos(), angles.sin()))
    for block in model.blocks:
        own, h = block.attention, block.norm_attention(x)
        q, k, v = (p(h).unflatten(-1, (-1, d)).transpose(1, 2) for p in (own.q, own.k, own.v))
        y = attend(_turned(q, cos, sin), _turned(k, cos, sin), v)
        x = x + own.o(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm_mlp(x))
    return model.head(model.norm(x))


def _turned(x, cos, sin):
    """``gpt.rotate`` without its rounding to float32."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
