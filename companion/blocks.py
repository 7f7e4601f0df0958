"""A Llama block whose attention and norms can be exchanged, to count what each choice saves.

    from companion.blocks import LlamaBlock, attention_eager, rope_tables
    block = LlamaBlock(LLAMA_2_7B, attention_eager)
    y = block(x, *rope_tables(seq, LLAMA_2_7B.head_dim))    # x, y: [batch, seq, hidden]

``companion.memory.llama_block_bytes`` predicts what it saves for backward. The model
that the book trains is ``companion.gpt``.

Taught in: chapters/memory.
"""
import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """RMSNorm written out, its arithmetic in fp32: saves 4 + itemsize bytes an element.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.   Taught in: chapters/memory.
    """

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.weight


class _LeanNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = x.float()
        r = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, r)
        return (y * r).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        y, g = x.float() * r, grad.float()
        gw = g * weight
        gx = r * (gw - y * (gw * y).mean(-1, keepdim=True))
        return gx.to(x.dtype), (g * y).flatten(0, -2).sum(0).to(weight.dtype)


class LeanNorm(RMSNorm):
    """RMSNorm that saves its input and one fp32 number a token.  Taught in: chapters/memory."""

    def forward(self, x):
        return _LeanNorm.apply(x, self.weight)


def rope_tables(seq, head_dim):
    """cos and sin of RoPE, each [seq, head_dim].

    Source: Su et al. 2021, arXiv:2104.09864.   Taught in: chapters/memory.
    """
    steps = torch.arange(0, head_dim, 2) / head_dim
    angles = torch.arange(seq)[:, None] / 10000**steps
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def attention_eager(q, k, v):
    """Causal attention that writes the scores out. q: [batch, heads, seq, d] -> the same.

    k, v: [batch, kv_heads, seq, d], first repeated for each query head.
    Taught in: chapters/memory.
    """
    repeats, seq = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    future = torch.full((seq, seq), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    q = q * q.shape[-1] ** -0.5
    return (q @ k.transpose(-1, -2) + future).softmax(-1) @ v


def attention_fused(q, k, v):
    """The same by one kernel that keeps no scores.  Taught in: chapters/memory."""
    if k.shape[1] == 1:  # one head for all: a view suits any kernel
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


class LlamaBlock(nn.Module):
    """x: [batch, seq, hidden], cos and sin: [seq, head_dim] -> [batch, seq, hidden].

    shape: a ``companion.memory.Shape``; attention: a function of q, k, v; norm: a
    module class of one width.   Taught in: chapters/memory.
    """

    def __init__(self, shape, attention=attention_fused, norm=RMSNorm):
        super().__init__()
        self.shape, self.attention = shape, attention
        h, k, f = shape.hidden, shape.kv_width, shape.ffn
        sizes = {"q": (h, h), "k": (h, k), "v": (h, k), "o": (h, h),
                 "gate": (h, f), "up": (h, f), "down": (f, h)}
        for name, (inputs, outputs) in sizes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))
        self.norm1, self.norm2 = norm(h), norm(h)

    def attend(self, x, cos, sin):
        def heads(t):
            return t.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = self.attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))
