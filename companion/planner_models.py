"""Models as the planner sees them: dimensions, exact parameter counts, and where they come from.

    from companion.planner_models import find_model, from_config
    find_model("llama-2-7b").parameters              # 6738415616
    from_config("path/to/config.json").kv_bytes_per_token(2)

Dimensions of known models come from data/models.csv, others from a Hugging Face
``config.json`` or from a number of parameters alone.

Standard library only: this file also runs in a browser.
"""
import csv
import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: all of them are resident, ``top_k`` work on each token."""
    count: int
    top_k: int
    ffn: int
    shared: int = 0          # experts that every token passes
    dense_layers: int = 0    # first layers with a plain MLP of the model's ffn


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are kept as one compressed vector."""
    kv_rank: int
    nope: int
    rope: int
    v_head: int
    q_rank: int | None = None


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder, whatever its family."""
    name: str
    family: str              # Hugging Face's model_type, or "companion"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    window: int | None = None        # of the sliding layers
    window_every: int = 1            # one layer in so many is NOT sliding; 1: see windowed
    experts: Experts | None = None
    latent: Latent | None = None
    positions: int = 0               # learned position embeddings
    guessed: tuple = ()

    # -- what a family adds --

    @property
    def plain_mlp(self):
        """Two matrices and biases, where the others have gate, up and down."""
        return self.family in ("gpt2", "gpt_neox", "phi")

    @property
    def qk_norm(self):
        """Elements of the norms of queries and keys in a layer."""
        if self.family in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"):
            return 2 * self.head_dim
        if self.family == "olmo2":
            return (self.heads + self.kv_heads) * self.head_dim
        return 0

    @property
    def is_gemma(self):
        return self.family.startswith("gemma")

    @property
    def norms(self):
        """Norms of hidden width in a layer."""
        return {"phi": 1}.get(self.family, 4 if self.is_gemma else 2)

    # -- parameters --

    @functools.cached_property
    def attention_parameters(self):
        """Of one layer, with biases and the norms of queries and keys."""
        h, a, k, d = self.hidden, self.heads, self.kv_heads, self.head_dim
        if self.latent:
            z = self.latent
            width = a * (z.nope + z.rope)
            q = h * width if not z.q_rank else (h + 1) * z.q_rank + z.q_rank * width
            kv = h * (z.kv_rank + z.rope) + z.kv_rank + z.kv_rank * a * (z.nope + z.v_head)
            return q + kv + a * z.v_head * h
        count = 2 * h * a * d + 2 * h * k * d + self.qk_norm
        if self.qkv_bias or self.plain_mlp:
            count += (a + 2 * k) * d
        return count + (h if self.plain_mlp else 0)

    def mlp_parameters(self, layer=None):
        """Of one layer; of a mixture, all experts, the shared ones and the router."""
        h, e = self.hidden, self.experts
        if e and (layer is None or layer >= e.dense_layers):
            balance = {"deepseek_v3": e.count,          # the router's biases
                       "qwen2_moe": h}.get(self.family, 0)  # the gate of the shared expert
            return 3 * h * e.ffn * (e.count + e.shared) + h * e.count + balance
        if self.plain_mlp:
            return 2 * h * self.ffn + self.ffn + h
        return 3 * h * self.ffn

    def layer_parameters(self, layer=None):
        norm = 2 * self.hidden if self.plain_mlp else self.hidden
        return self.attention_parameters + self.mlp_parameters(layer) + self.norms * norm

    @property
    def table(self):
        """Parameters of one embedding, or of the head without its bias."""
        return self.vocab * self.hidden

    @property
    def outer_parameters(self):
        """Everything outside the layers: embeddings, final norm, head."""
        norm = 2 * self.hidden if self.plain_mlp else self.hidden
        head = 0 if self.tied else self.table
        bias = self.vocab if self.family == "phi" else 0
        return self.table + self.positions * self.hidden + norm + head + bias

    @functools.cached_property
    def parameters(self):
        layers = sum(self.layer_parameters(i) for i in range(self.layers))
        return self.outer_parameters + layers

    @property
    def quantizable(self):
        """Weights of the linear layers inside the blocks: what k-bit loading shrinks."""
        small = self.norms * self.hidden
        return self.parameters - self.outer_parameters - self.layers * small

    # -- caches --

    def windowed(self, layer):
        """Whether this layer attends to its window only."""
        if not self.window:
            return False
        return self.window_every == 1 or (layer + 1) % self.window_every != 0

    def kv_elements_per_layer(self, tensor_parallel=1):
        """Cache elements of one token in one layer on one GPU."""
        if self.latent:  # the latent is the same for all heads: every rank holds it
            return self.latent.kv_rank + self.latent.rope
        return 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim

    def kv_bytes(self, tokens, bits=16, tensor_parallel=1, windows=False, layers=None):
        """Bytes of the cache of one sequence; windows: sliding layers keep their window only."""
        total = 0
        for layer in range(self.layers if layers is None else layers):
            kept = min(tokens, self.window) if windows and self.windowed(layer) else tokens
            total += kept
        return total * self.kv_elements_per_layer(tensor_parallel) * bits / 8


# --- the registry ------------------------------------------------------------------------------

def _key(name):
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"\(.*?\)", "", name.lower()).split("/")[-1])


def _pairs(text):
    found = (pair.split("=") for pair in text.split(";") if "=" in pair)
    return {k: None if v == "none" else int(v) for k, v in found}


def _row(row):
    """A line of models.csv as a Model."""
    moe, mla = _pairs(row["moe"]), _pairs(row["mla"])
    latent = Latent(mla["kv_lora_rank"], mla["qk_nope"], mla["qk_rope"], mla["v_head"],
                    mla["q_lora_rank"]) if mla else None
    experts = Experts(moe["experts"], moe["top_k"], moe["expert_ffn"], moe["shared"],
                      moe["dense_layers"]) if moe else None
    window, every = (int(x) for x in row["window"].split("/")) if row["window"] else (None, 1)
    return Model(
        name=row["name"], family=row["family"], layers=int(row["layers"]),
        hidden=int(row["hidden"]), heads=int(row["heads"]), kv_heads=int(row["kv_heads"]),
        head_dim=latent.nope + latent.rope if latent else int(row["head_dim"]),
        ffn=int(row["ffn"]), vocab=int(row["vocab"]), tied=row["tied"] == "True",
        qkv_bias=row["qkv_bias"] == "yes", window=window, window_every=every,
        experts=experts, latent=latent, positions=int(row["positions"] or 0))


@functools.cache
def registry():
    """All known models by name."""
    text = (Path(__file__).parent / "data" / "models.csv").read_text(encoding="utf-8")
    return {row["name"]: _row(row) for row in csv.DictReader(text.splitlines())}


# models of the same dimensions as one in the registry
_SAME = {"llama7b": "llama27b", "llama13b": "llama213b", "llama3.18b": "llama38b",
         "llama3.170b": "llama370b", "llama3.370b": "llama370b", "llama3405b": "llama3.1405b",
         "gpt2": "gpt2small", "gpt2124m": "gpt2small", "gpt2355m": "gpt2medium",
         "gpt2774m": "gpt2large", "gpt21.5b": "gpt2xl", "deepseekr1": "deepseekv3",
         "qwen3coder30ba3b": "qwen330ba3b"}


def find_model(name):
    """The known model called ``name``, or the only one whose name begins so.

    Case, spaces and hyphens do not count, nor do endings such as Instruct. Raises ValueError
    for an unknown name, with the nearest known ones.
    """
    known = {_key(n): m for n, m in registry().items()}
    key = _key(str(name))
    for candidate in (key, re.sub(r"(hf|base|instruct|it|chat)$", "", key)):
        candidate = _SAME.get(candidate, candidate)
        begin = [k for k in known if candidate and k.startswith(candidate)]
        if candidate in known:
            return known[candidate]
        if len(begin) == 1:
            return known[begin[0]]
    import difflib  # only for a mistake
    near = [known[k].name for k in difflib.get_close_matches(key, known, n=3, cutoff=0.5)]
    hint = f"near: {', '.join(near)}" if near else f"there are {', '.join(registry())}"
    raise ValueError(f"no model {str(name)!r}; {hint}")


# --- configuration files -----------------------------------------------------------------------

_FAMILIES = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma3", "phi3",
    "phi", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2",
    "deepseek_v3", "olmo2", "companion"}


def _integer(config, *names, default=...):
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            high = 4096 if "layer" in name else 2**32
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
                raise ValueError(f"the configuration's {name} must be a whole number from 1 to "
                                 f"{high}, got {value!r}")
            return value
    if default is ...:
        raise ValueError(f"the configuration lacks {names[0]}")
    return default


def _layer_windows(config, family):
    """(window, one layer in how many is full)."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None, 1
    window = _integer(config, "sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds and "sliding_attention" in kinds:
        return window, kinds.index("full_attention") + 1
    if family == "gemma2":
        return window, 2
    if family.startswith("gemma3"):
        return window, _integer(config, "sliding_window_pattern", default=6)
    return (window, 1) if family in ("mistral", "mixtral", "phi3") else (None, 1)


def from_config(config, name=None):
    """A Model from a Hugging Face configuration: a dictionary, or the path of its file.

    Raises ValueError if the file is not JSON, or a field is missing or impossible.
    """
    if not isinstance(config, dict):
        path = Path(config)
        name = name or (path.parent.name or path.name)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {str(path)!r}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{str(path)!r} holds no JSON object")
    if isinstance(config.get("text_config"), dict):
        config = {"model_type": "gemma3", **config["text_config"]}
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ValueError("the configuration lacks model_type")
    family = "gemma3" if family == "gemma3_text" else family
    guessed = () if family in _FAMILIES else (f"{family} is planned like llama",)
    hidden = _integer(config, "hidden_size", "n_embd", "width")
    heads = _integer(config, "num_attention_heads", "n_head", "heads")
    kv_heads = _integer(config, "num_key_value_heads", "kv_heads", default=heads)
    if family == "companion":
        ffn = _integer(config, "hidden")
    else:
        ffn = _integer(config, "intermediate_size", "n_inner", default=None)
        if ffn is None and family != "gpt2":
            raise ValueError("the configuration lacks intermediate_size")
        ffn = ffn or 4 * hidden
    default_dim = 256 if family in ("gemma2", "gemma3") else hidden // heads
    head_dim = _integer(config, "head_dim", default=default_dim)
    latent = experts = None
    if config.get("kv_lora_rank"):
        nope, rope = _integer(config, "qk_nope_head_dim"), _integer(config, "qk_rope_head_dim")
        latent = Latent(_integer(config, "kv_lora_rank"), nope, rope,
                        _integer(config, "v_head_dim"),
                        _integer(config, "q_lora_rank", default=None))
        head_dim = nope + rope
    elif "head_dim" not in config and family not in ("gemma2", "gemma3") and hidden % heads:
        raise ValueError(f"{heads} heads do not divide a hidden size of {hidden}")
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} key/value heads do not divide {heads} heads")
    count = _integer(config, "num_local_experts", "num_experts", "n_routed_experts", default=None)
    if count:
        width = _integer(config, "moe_intermediate_size", default=ffn)
        shared, dense = (_integer(config, key) if config.get(key) else 0
                         for key in ("n_shared_experts", "first_k_dense_replace"))
        if config.get("shared_expert_intermediate_size"):
            shared = _integer(config, "shared_expert_intermediate_size") // width
        experts = Experts(count, _integer(config, "num_experts_per_tok"), width, shared, dense)
    window, every = _layer_windows(config, family)
    tied_default = family in ("gpt2", "companion", "gemma", "gemma2", "gemma3")
    return Model(
        name=name or family, family=family,
        layers=_integer(config, "num_hidden_layers", "n_layer", "layers"),
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
        vocab=_integer(config, "vocab_size", "vocab"),
        tied=bool(config.get("tie_word_embeddings", tied_default)),
        qkv_bias=bool(config.get("attention_bias", family in ("qwen2", "qwen2_moe"))),
        window=window, window_every=every, experts=experts, latent=latent,
        positions=_integer(config, "n_positions", default=1024) if family == "gpt2" else 0,
        guessed=guessed)


def from_parameters(parameters, name=None):
    """A Llama-style model of about that many parameters; ``guessed`` says what was assumed.

    The known model nearest in size lends its proportions; its layers are scaled until the
    count agrees best. Raises ValueError for an impossible count.
    """
    if not 1e5 <= parameters <= 1e14:
        raise ValueError(f"parameters must be between 1e5 and 1e14, got {parameters:g}")
    dense = [m for m in registry().values() if m.family == "llama"]
    base = min(dense, key=lambda m: abs(m.parameters - parameters) / min(m.parameters, parameters))
    scale = (parameters / base.parameters) ** (1 / 3)
    heads = max(base.heads // base.kv_heads, round(base.heads * scale))
    heads -= heads % (base.heads // base.kv_heads)
    hidden = heads * base.head_dim
    trial = replace(base, heads=heads, kv_heads=heads * base.kv_heads // base.heads, hidden=hidden,
                    ffn=max(64, round(base.ffn * hidden / base.hidden / 64) * 64))
    layers = max(1, round((parameters - trial.outer_parameters) / trial.layer_parameters()))
    model = replace(trial, layers=layers)
    label = name or f"{parameters / 1e9:g}B parameters"
    return replace(model, name=label, guessed=(
        f"proportions of {base.name}: {layers} layers of {hidden}, vocabulary {model.vocab}, "
        f"{model.parameters / 1e9:.3f}e9 parameters in all",))
