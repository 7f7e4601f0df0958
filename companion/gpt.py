"""A small decoder over bytes: the model that the chapters train, quantize, prune and serve.

RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU,
tied embedding; no biases, no dropout. Chapters act on it from outside, so it stays plain.

Letters in names: B batch, T positions, D width, H query heads, K key/value heads,
d head width, F hidden width of the MLP, V vocabulary.
Sources: Touvron et al. 2023, arXiv:2302.13971; Su et al. 2021, arXiv:2104.09864;
Ainslie et al. 2023, arXiv:2305.13245; Shazeer 2020, arXiv:2002.05202.
"""
import hashlib
from dataclasses import dataclass
from importlib import resources

import torch
import torch.nn.functional as F
from torch import nn

WEIGHTS_SHA256 = "dc2aafb18552e60001cc3da6be51b8329a79fe6e734afa5039365cdd86379963"


@dataclass(frozen=True)
class Config:
    """Sizes of a ``Decoder``; the defaults are those of the weights that ship with the book."""
    vocab: int = 256        # V: bytes
    width: int = 256        # D
    layers: int = 4
    heads: int = 8          # H
    kv_heads: int = 4       # K: divides heads
    hidden: int = 768       # F
    context: int = 1024     # longest sequence that the rotary table covers
    theta: float = 10_000.0

    def __post_init__(self):
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must divide width {self.width}, "
                             f"and kv_heads {self.kv_heads} must divide heads")
        if self.width // self.heads % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.width // self.heads}")


def rotary_table(positions_T, head_width, theta):
    """cos and sin of every position and frequency: two tensors [T, d/2], float32."""
    frequencies = theta ** (-torch.arange(0, head_width, 2, device=positions_T.device) / head_width)
    angles = positions_T[:, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTd, cos, sin):
    """Turn each pair (i, i + d/2) of head dimensions by its position's angle."""
    a, b = x_BHTd.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BHTd.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = c.heads, c.kv_heads, c.width // c.heads
        kv_width = c.kv_heads * self.head_width
        self.q = nn.Linear(c.width, c.width, bias=False)
        self.k = nn.Linear(c.width, kv_width, bias=False)
        self.v = nn.Linear(c.width, kv_width, bias=False)
        self.o = nn.Linear(c.width, c.width, bias=False)

    def forward(self, x_BTD, cos, sin):
        B, T, _ = x_BTD.shape
        q, k, v = (proj(x_BTD).view(B, T, -1, self.head_width).transpose(1, 2)
                   for proj in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y_BHTd.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c):
        super().__init__()
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x_BTD):
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream after a norm of its input."""

    def __init__(self, c):
        super().__init__()
        self.norm_attention, self.attention = nn.RMSNorm(c.width, eps=1e-5), Attention(c)
        self.norm_mlp, self.mlp = nn.RMSNorm(c.width, eps=1e-5), MLP(c)

    def forward(self, x_BTD, cos, sin):
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), cos, sin)
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out: [B, T] integers -> [B, T, V]."""

    def __init__(self, config=Config()):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.embedding.weight  # tied: counted, stored and updated once
        for name, p in self.named_parameters():
            if p.ndim == 2:
                out = name.endswith(("o.weight", "down.weight"))  # 2 * layers of them add up
                nn.init.normal_(p, std=0.02 / (2 * config.layers) ** (0.5 * out))

    def forward(self, tokens_BT):
        T = tokens_BT.shape[1]
        if T > self.config.context:
            raise ValueError(f"{T} positions, but the model's context is {self.config.context}")
        cos, sin = rotary_table(torch.arange(T, device=tokens_BT.device),
                                self.config.width // self.config.heads, self.config.theta)
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        return self.head(self.norm(x_BTD))


def load(device="cpu", dtype=torch.float32):
    """The trained decoder that ships with the book, in evaluation mode.

    Stored in bfloat16 by ``benchmarks/train_decoder.py``, whose ledger states its held-out
    loss. Raises ValueError if the file is not the one that was trained.
    """
    from safetensors.torch import load as parse
    content = resources.files("companion").joinpath("data", "decoder.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != WEIGHTS_SHA256:
        raise ValueError("gpt: decoder.safetensors is damaged; install the package again")
    model = Decoder()
    weights = parse(content)
    model.load_state_dict({**weights, "head.weight": weights["embedding.weight"]})
    return model.to(device, dtype).eval()
