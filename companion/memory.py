"""What fills a GPU in training and in inference: formulas in bytes.

    from companion.memory import LLAMA_2_7B, count_parameters, training_bytes
    training_bytes(count_parameters(LLAMA_2_7B), "mixed")      # bytes, by part

Standard library only: this file also runs in a browser. Sizes are bytes
throughout, and GB is 1e9 of them, GiB 2**30.

Taught in: chapters/memory.
"""
from dataclasses import dataclass

KiB, MiB, GiB = 2**10, 2**20, 2**30
MB, GB = 10**6, 10**9


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama-style decoder: RMSNorm, RoPE, GQA, SwiGLU, no biases.

    Taught in: chapters/memory.
    """
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False

    @property
    def head_dim(self):
        return self.hidden // self.heads

    @property
    def kv_width(self):
        return self.kv_heads * self.head_dim


LLAMA_2_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000)
LLAMA_2_13B = Shape(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000)
LLAMA_3_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)


def linear_parameters(shape):
    """Parameters of the linear layers inside the blocks: neither embedding nor head.

    Taught in: chapters/memory.
    """
    h, k, f = shape.hidden, shape.kv_width, shape.ffn
    return shape.layers * (2 * h * h + 2 * h * k + 3 * h * f)


def count_parameters(shape):
    """All parameters: embedding, head (once if tied), linear layers, norms.

    Source: the published shapes, e.g. Touvron et al. 2023, arXiv:2307.09288.
    Taught in: chapters/memory.
    """
    tables = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden
    return tables + linear_parameters(shape) + norms


RECIPES = {
    # name: bytes per parameter of the weights, the gradients, a master copy of
    # the weights, Adam's two moments, and what comes and goes within the step
    "bf16": (2, 2, 0, 4, 0),
    "bf16, foreach step": (2, 2, 0, 4, 2),
    "bf16, fp32 moments": (2, 2, 0, 8, 0),
    "fp32 gradients, no master": (2, 4, 0, 8, 0),
    "bf16 moments, fp32 master": (2, 4, 4, 4, 0),
    "fp32": (4, 4, 0, 8, 0),
    "mixed": (2, 2, 4, 8, 0),
    "autocast": (4, 4, 0, 8, 2),
    "mixed, fp32 gradients": (2, 4, 4, 8, 0),
}
PARTS = ("weights", "gradients", "master", "moments", "transient")


def training_bytes(parameters, recipe):
    """Bytes of the model states under ``recipe`` (a key of RECIPES), by part.

    Raises ValueError for an unknown recipe.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, for "mixed".
    Taught in: chapters/memory.
    """
    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    return {part: parameters * each for part, each in zip(PARTS, RECIPES[recipe])}


def gpt_block_bytes(batch, seq, hidden, heads, fused=False, stat_bytes=0):
    """Bytes a 16-bit GPT block saves for its backward pass.

    LayerNorm, attention, MLP four times as wide with GELU, dropout with one-byte
    masks (none on the probabilities where attention is fused). stat_bytes: bytes
    of one mean or one rstd per token; 0, as in the paper, neglects them.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.1.
    Taught in: chapters/memory.
    """
    tokens = batch * seq
    attention = 2 * hidden + 6 * hidden + 2 * hidden + hidden
    mlp = 2 * hidden + 8 * hidden + 8 * hidden + hidden
    norms = 2 * (2 * hidden + 2 * stat_bytes)
    quadratic = heads * 4 if fused else heads * seq * (2 + 1 + 2)
    return tokens * (attention + mlp + norms + quadratic)


def llama_block_bytes(shape, batch, seq, itemsize=2, fused=True, fused_norm=True):
    """Bytes one block of ``shape`` saves for its backward pass, without dropout.

    itemsize: bytes per activation. fused: attention that keeps one fp32 number
    per head and query instead of the probabilities; unfused, keys and values are
    first repeated for each query head. fused_norm: False for RMSNorm written out
    with its arithmetic in fp32. RoPE's tables are not counted.
    Taught in: chapters/memory.
    """
    h, k, f, a = shape.hidden, shape.kv_width, shape.ffn, shape.heads
    norm = (itemsize * h if fused_norm else 4 * h + itemsize * h) + 4
    per_token = 2 * norm
    per_token += itemsize * h + itemsize * h  # the inputs of q, k, v and of gate, up
    per_token += itemsize * h + itemsize * 2 * (k if fused else h)  # q; k and v
    per_token += 4 * a if fused else itemsize * a * seq  # log-sum-exp; probabilities
    per_token += itemsize * h  # attention's output, the input of the o projection
    per_token += itemsize * 4 * f  # gate, silu(gate), up, and their product
    return batch * seq * per_token


def lora_parameters(shape, rank, targets=("q", "k", "v", "o")):
    """Parameters of LoRA pairs of ``rank`` on the ``targets`` of every block.

    Raises ValueError for an unknown target.
    Source: Hu et al. 2021, arXiv:2106.09685.
    Taught in: chapters/memory.
    """
    h, k, f = shape.hidden, shape.kv_width, shape.ffn
    ends = {"q": h + h, "k": h + k, "v": h + k, "o": h + h,
            "gate": h + f, "up": h + f, "down": f + h}
    if unknown := set(targets) - set(ends):
        raise ValueError(f"no layer {sorted(unknown)[0]!r}; there are {', '.join(ends)}")
    return shape.layers * rank * sum(ends[t] for t in targets)


def nf4_bytes(parameters, block=64, nested=256):
    """Bytes of NF4 weights with double quantization.

    A 4-bit code a weight, an 8-bit scale a block, an fp32 scale for each
    ``nested`` of those. Source: Dettmers et al. 2023, arXiv:2305.14314, section 3.
    Taught in: chapters/memory.
    """
    return parameters / 2 + parameters / block + 4 * parameters / (block * nested)


def kv_bytes(shape, tokens, itemsize=2):
    """Bytes of the keys and values of ``tokens`` tokens in every layer.

    Taught in: chapters/memory.
    """
    return 2 * shape.layers * shape.kv_width * itemsize * tokens


class CachingAllocator:
    """PyTorch's CUDA allocator in default settings, on one stream, in bookkeeping only.

    ``malloc(name, bytes)`` and ``free(name)``; ``allocated`` and ``reserved`` in
    bytes; ``segments`` is a list of lists of [name or None, bytes]. With
    ``expandable``, each pool is one segment that grows at its end.

    Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch.
    Taught in: chapters/memory.
    """

    def __init__(self, expandable=False):
        self.expandable, self.segments, self.small = expandable, [], []

    @property
    def reserved(self):
        return sum(size for blocks in self.segments for _, size in blocks)

    @property
    def allocated(self):
        return sum(size for blocks in self.segments for name, size in blocks
                   if name is not None)

    def malloc(self, name, nbytes):
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MiB
        fits = [(block[1], s, i) for s, blocks in enumerate(self.segments)
                for i, block in enumerate(blocks)
                if self.small[s] == small and block[0] is None and block[1] >= size]
        s, i = min(fits)[1:] if fits else self._grow(size, small)
        rest = self.segments[s][i][1] - size
        if rest >= 512 if small or self.expandable else rest > MiB:
            self.segments[s].insert(i + 1, [None, rest])
        else:
            size += rest
        self.segments[s][i] = [name, size]

    def _grow(self, size, small):
        page = 2 * MiB if small else 20 * MiB
        if self.expandable and small in self.small:
            s = self.small.index(small)
            last = self.segments[s][-1]
            if last[0] is not None:
                last = [None, 0]
                self.segments[s].append(last)
            last[1] += -(-(size - last[1]) // page) * page
            return s, len(self.segments[s]) - 1
        if self.expandable or size < 10 * MiB:
            total = -(-size // page) * page
        else:
            total = -(-size // (2 * MiB)) * 2 * MiB
        self.segments.append([[None, total]])
        self.small.append(small)
        return len(self.segments) - 1, 0

    def free(self, name):
        for blocks in self.segments:
            for i, block in enumerate(blocks):
                if block[0] == name:
                    block[0] = None
                    for left in (i, i - 1):  # merge with the free neighbors
                        pair = blocks[left:left + 2]
                        if left >= 0 and len(pair) == 2 and pair[0][0] is pair[1][0] is None:
                            blocks[left:left + 2] = [[None, pair[0][1] + pair[1][1]]]
                    return
        raise ValueError(f"no block {name!r} is allocated")
