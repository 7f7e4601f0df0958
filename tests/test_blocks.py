"""The Llama block with exchangeable parts, and what recomputing it must not change."""
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from companion import gpt
from companion.blocks import (LeanNorm, LlamaBlock, RMSNorm, attention_eager, attention_fused,
                              rope_tables)
from companion.counting import saved_tensors, storage_bytes
from companion.memory import Shape, llama_block_bytes

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
SHAPE = Shape(layers=1, hidden=32, heads=4, kv_heads=1, ffn=88, vocab=1)


def block_and_input(attention=attention_fused, norm=LeanNorm, seq=7, dtype=torch.float32):
    torch.manual_seed(0)
    block = LlamaBlock(SHAPE, attention, norm).to(dtype)
    tables = [t.to(dtype) for t in rope_tables(seq, SHAPE.head_dim)]
    return block, torch.randn(2, seq, SHAPE.hidden).to(dtype).requires_grad_(), tables


# Catches another rotation, a missing scale, a wrong causal mask, heads shared wrongly.
@pytest.mark.parametrize("attention", [attention_eager, attention_fused])
@pytest.mark.parametrize("norm", [RMSNorm, LeanNorm])
def test_it_is_the_block_of_the_book_model(attention, norm):
    block, x, tables = block_and_input(attention, norm)
    config = gpt.Config(width=32, heads=4, kv_heads=1, hidden=88)
    other = gpt.Block(config)
    names = {"attention.q": "q", "attention.k": "k", "attention.v": "v", "attention.o": "o",
             "mlp.gate": "gate", "mlp.up": "up", "mlp.down": "down",
             "norm_attention": "norm1", "norm_mlp": "norm2"}
    other.load_state_dict({f"{theirs}.weight": block.get_submodule(mine).weight
                           for theirs, mine in names.items()})
    table = gpt.rotary_table(torch.arange(7), SHAPE.head_dim, 10_000.0)
    torch.testing.assert_close(block(x, *tables), other(x, *table), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", [RMSNorm, LeanNorm])
def test_bytes_are_those_of_the_formula(fused, norm):
    block, x, tables = block_and_input(attention_fused if fused else attention_eager, norm,
                                       seq=64, dtype=torch.bfloat16)
    saved = storage_bytes(saved_tensors(lambda: block(x, *tables), [*block.parameters(), *tables]))
    assert saved == llama_block_bytes(SHAPE, 2, 64, fused=fused, fused_norm=norm is LeanNorm)


def test_the_lean_norm_has_the_same_gradients():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, requires_grad=True)
    grads = []
    for norm in RMSNorm(8), LeanNorm(8):
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, 8))
        grads.append(torch.autograd.grad(norm(x).sin().sum(), [x, norm.weight]))
    for plain, lean in zip(*grads):
        torch.testing.assert_close(plain, lean, rtol=1e-5, atol=1e-6)


# Where the second run draws another mask, about half of the entries differ.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [True, False])
def test_recomputed_dropout_draws_the_same_mask(device, keep):
    x = torch.ones(1000, device=device, requires_grad=True)
    y = checkpoint(lambda x: torch.dropout(x, 0.5, True), x, use_reentrant=False,
                   preserve_rng_state=keep)
    y.sum().backward()
    differ = int((y != x.grad).sum())
    assert differ == 0 if keep else 400 < differ < 600
