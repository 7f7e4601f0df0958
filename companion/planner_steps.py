"""One step of a model on a tape: the same operations, in the same order, as the code that runs.

    training_moments(model, job, static, step)    # [Moment(name, {component: bytes}, where)]

The layers of Hugging Face's implementations, with attention written out or fused, and of
the book's decoder. Layers of a kind are alike, so one of each kind is walked through and
the others are booked as copies of it: live bytes grow and shrink linearly from layer to
layer, so the fullest moment is at the first or the last one.

Standard library only: this file also runs in a browser.
"""
from dataclasses import dataclass, replace

from .memory import MiB, nf4_bytes
from .planner_allocator import Allocator, Pools, play
from .planner_tape import RecordingTape, Tape, Tensor

WORKSPACE = 32 * MiB  # cuBLAS on Hopper, once for each thread that multiplies
GATHERING, REDUCING = 1, 2  # FSDP's streams beside the main one, 0; each has its own pool


def packed_bytes(job, n):
    """Bytes of n weights in NF4: with scales in 8 bits, or in fp32 (half a bit a weight)."""
    return int(n / 2 + n / 16 if job.single_quant else nf4_bytes(n))


@dataclass
class Moment:
    """The fullest point of a phase: bytes by component, and the operation's place."""
    name: str
    parts: dict
    where: str = ""

    @property
    def total(self):
        return sum(self.parts.values())


class Walk:
    """A model's forward pass on a tape. Sizes are those of one GPU."""

    def __init__(self, model, job, tape, every_layer=False, stage=None):
        self.stage = stage                                # of a pipeline: first, last or None
        self.m, self.job, self.tape, self.every_layer = model, job, tape, every_layer
        self.ghost_casts, self.held, self.made, self.roots = 0, None, [], []
        self.b, self.s = job.batch, job.local_sequence
        # Training over tensor parallel ranks is sequence parallel too: between the products
        # each rank holds its part of the tokens, in them its part of the width. Both are the
        # same bytes, so the walk takes part of the tokens and all of the width.
        # Without sequence parallel it is as in inference: all tokens, part of the width.
        together = job.training and not job.tensor_only
        tp, self.split = (1, job.tensor) if together else (job.tensor, 1)
        self.rows = -(-self.b * self.s // self.split)     # tokens
        self.a, self.k = model.heads // tp, max(self.split, model.kv_heads // tp)
        self.ffn, self.vocab, self.d = model.ffn // tp, model.vocab // tp, model.head_dim
        self.item = job.weight_bytes                      # bytes of a stored weight
        self.full = job.method == "full"
        self.upcast = job.upcast and job.method == "qlora"
        self.outer = 4 if self.upcast else self.item      # of embedding, norms and head
        self.past, self.cache = 0, None                   # inference: tokens kept; [k, v] a layer
        self.sharded = job.sharded                        # see "sharded weights" below
        self.shares = None                                # eager attention's, of the layer
        self.flat = self.parts = self.root = self.reducing = None
        self.shards = []                                  # reduced gradients

    # -- parts --

    @property
    def positions(self):
        """Positions in a batch, which sequences share unless each is packed in its own way."""
        return self.s * (self.b if self.job.packing else 1)

    def weight(self, n, trainable=None, item=None):
        trainable = self.full if trainable is None else trainable
        item = item or self.item
        kept = self.job.gradient_bytes if self.full else item
        n = -(-n // self.split)
        self.made.append((n, item, trainable))
        if self.sharded:  # whole, and as autograd makes it, until it is reduced
            return self.tape.parameter(n, item, trainable)
        return self.tape.parameter(n, item, trainable, self.job.gradients_stay, kept,
                                   self.job.gradient_shards, self._applied())

    def _applied(self):
        """Bytes an element that an update in backward makes on the way; None without one."""
        if not self.job.in_backward or not self.full:
            return None
        return self.job.stored[3] if self.job.optimizer == "adamw" else 0

    def outer_weight(self, n):
        """Of embedding or head: FSDP reduces their gradients when all of backward is done."""
        w = self.weight(n, item=self.outer)
        if self.m.tied:  # two gradients meet: the first one waits for the other
            w.applied = None
        if self.sharded:
            self.roots.append(w)
        return w

    def linear(self, x, n_in, n_out, name="", bias=False):
        """A linear layer, with its LoRA pair if it is a target."""
        t, rows = self.tape, x.n // n_in
        if self.targeted(name):
            return self._adapted(x, n_in, n_out, bias)
        kept = x.item
        if self.upcast:  # a k-bit layer takes and gives fp32, and multiplies in 16 bits
            x = t.cast(x, 2)
        y = t.linear(x, self.weight(n_in * n_out), rows * n_out,
                     self.weight(n_out) if bias else None, *self._packed(n_in * n_out))
        return t.cast(y, kept) if self.upcast else y

    def targeted(self, name):
        """Whether LoRA adapts the layer of this name; joint layers go by their first part."""
        return {"qkv": "q", "gate_up": "gate"}.get(name, name) in self.job.adapted

    def _packed(self, n):
        """(bytes that a k-bit weight takes while it is multiplied, whether its input is kept).

        It is written out in 16 bits, in the forward pass and again in backward. Its scales of
        64 weights, if they are quantized too, are unpacked to fp32, twice (before and after the
        offset is added). bitsandbytes up to 0.41 also saved the input, though a frozen weight
        has no use for it. Source: MatMul4Bit and dequantize_4bit of bitsandbytes.
        """
        job = self.job
        if job.training:
            scales = 0 if job.single_quant else n // 8
            return (2 * n + scales, job.hold_inputs) if job.method == "qlora" else (0, False)
        return (2 * n if job.weight_bits < 16 else 0, False)

    def _adapted(self, x, n_in, n_out, bias):
        """peft's linear layer: the frozen product, plus the pair in the adapters' type."""
        t, job, rows = self.tape, self.job, x.n // n_in
        r, item = job.rank, job.adapter_bytes
        base = t.cast(x, 2) if self.upcast else x
        result = t.linear(base, self.weight(n_in * n_out, False), rows * n_out,
                          self.weight(n_out, False) if bias else None,
                          *self._packed(n_in * n_out))
        kept = x.item if self.upcast else result.item
        x = t.drop(t.cast(x, item), job.dropout)
        held = job.gradients_stay and not self.sharded
        a, b = -(-n_in * r // self.split), -(-r * n_out // self.split)
        self.made += [(a, item, True), (b, item, True)]
        down = t.linear(x, t.parameter(a, item, True, held), rows * r)
        up = t.linear(down, t.parameter(b, item, True, held), rows * n_out)
        del down
        scaled = t.map(up)
        del up
        result = t.add(result, scaled)
        del scaled
        return t.cast(result, kept)

    def norm(self, x, width):
        """Of rows of ``width`` elements, as the family writes it."""
        t, rows, family = self.tape, x.n // width, self.m.family

        def weight():
            return self.weight(width, item=self.outer)

        if self.m.plain_mlp:
            return t.norm(x, weight(), rows, weight(), statistics=2)
        if family == "companion" or self.job.kernels == "fused":
            return t.norm(x, weight(), rows)
        wide = t.cast(x, 4)
        square = t.map(wide, "input", temporaries=2)
        mean = t.mean(square, rows)
        del square
        scale = t.map(mean, "output")
        y = t.mul(wide, scale)
        del wide, scale
        if self.m.is_gemma:
            gain = t.map(t.cast(self._as_tensor(weight()), 4))
            y = t.mul(y, gain, rows)
            return t.cast(y, x.item)
        narrow = t.cast(y, x.item)  # the wide product lives on until the norm returns
        out = t.mul(weight(), narrow, rows)
        del narrow
        return out

    def _as_tensor(self, w):
        """A parameter as an operand whose bytes are counted elsewhere."""
        t = self.tape
        out = t.tensor(0, w.item)
        out.n = w.n
        return t.op(out, [w], lambda g: [t.tensor(w.n, w.item)])

    def rotate(self, q, k, table):
        """Rotary positions as Hugging Face applies them: halves swapped by slices and cat."""
        t = self.tape
        if self.job.kernels == "fused":
            return t.map(q), t.map(k)
        if self.m.family == "companion":
            return self._rotate_book(q, table), self._rotate_book(k, table)

        share = {"gpt_neox": 0.25, "phi": 0.4}.get(self.m.family)
        pairs = [(t.part(x, int(x.n * share)), t.part(x, x.n - int(x.n * share))) if share
                 else (x, None) for x in (q, k)]
        del q, k
        rests = [rest for _, rest in pairs]
        turned = []
        while pairs:
            turned.append(self._turn(pairs.pop(0)[0], table))
        for i in range(2):  # joined when both are turned
            if share:
                turned[i] = t.cat(turned[i], rests[i])
            elif self.m.family == "phi3":
                turned[i] = t.cat(turned[i])
        return turned

    def _turn(self, x, table):
        t, half, (cos, sin) = self.tape, x.n // 2, table
        left = t.mul(x, cos)
        first, second = t.part(x, half), t.part(x, half)
        turned = t.cat(t.map(second), first)
        del first, second
        right = t.mul(turned, sin)
        del turned
        return t.add(left, right)

    def _rotate_book(self, x, table):
        t, (cos, sin) = self.tape, table
        wide = t.cast(x, 4)
        a, b = t.split(wide, [wide.n // 2] * 2)
        left = t.add(t.mul(a, cos), t.rewritten(t.mul(b, sin)))  # a difference
        right = t.add(t.mul(b, cos), t.mul(a, sin))
        out = t.cat(left, right)
        del left, right, wide, a, b
        return t.cast(out, x.item)

    def attend(self, q, k, v, windowed):
        """Attention from q [b, a, s, d] and k, v [b, kv, s', d]: (y, whether y is to be copied).

        A copy brings positions before heads. A window or a packed batch has a mask, with which
        PyTorch has neither its flash kernel nor ``is_causal``. Its memory-efficient kernel and
        cuDNN's take one (see ``_bias``), if a head's row is a multiple of 16 bytes. A flash
        kernel itself knows windows and documents.
        """
        t, job = self.tape, self.job
        rep, keys = self.a // self.k, self.s + self.past
        if job.attention == "eager":
            return self._attend_eager(q, k, v, keys), True
        narrow = job.autocast or q.item == 2
        item = 2 if narrow else 4
        masked = job.attention == "sdpa" and (
            job.packing or windowed and self.m.window < keys and not self.past)
        bias = self._bias(item, keys) if masked else None
        row = q.n // (self.rows * self.a) * item
        no_kernel = row % 16 > 0 if masked else not narrow and rep > 1
        if job.attention == "sdpa" and no_kernel:
            return self._attend_math(q, k, v, keys, masked), True
        if rep > 1 and masked:  # Hugging Face repeats key heads beside a mask
            k, v = (t.copy(x, x.n * rep) for x in (k, v))
            rep = 1
        y = t.attention(q, k, v, self.rows * self.a, rep, bias)
        # the output has the layout of q: heads before positions after a cat, and then the
        # step back to positions before heads is a copy
        return y, narrow and self.m.family in ("phi3", "gpt_neox", "phi", "companion")

    def _bias(self, item, keys):
        """[b, 1, s, keys]: a bool mask as numbers of the query's type, made by each layer anew.

        Its backward pass needs it, so each layer keeps one; heads share it. Rows are padded to
        a multiple of 16 numbers, in another copy.

        Source: convert_boolean_attn_mask and preprocess_mask in ATen's attention.cpp.
        """
        rows = self.b * self.s
        bias = self.tape.tensor(rows * keys, item)
        return self.tape.tensor(rows * -(-keys // 16) * 16, item) if keys % 16 else bias

    def _attend_eager(self, q, k, v, keys):
        t, b, s, rep = self.tape, self.b, self.s, self.a // self.k
        scores_n = self.rows * self.a * keys
        if rep > 1:
            k, v = t.copy(k, k.n * rep), t.copy(v, v.n * rep)

        def lined(x, apart):  # products want heads before positions: a copy within the product
            return t.copy(x) if b > 1 and apart else x

        apart = self.m.family not in ("gpt_neox", "phi", "phi3")  # cat has brought heads first
        w = t.map(t.matmul(lined(q, apart), lined(k, apart and rep == 1), scores_n))
        if self.m.family == "gemma2":
            w = t.map(w)
            w = t.map(w, "output")
            w = t.map(w)
        if s > 1 or self.past:
            mask = t.tensor(0, self.job.mask_bytes)
            mask.n = self.positions * keys
            w = t.add(w, mask)
        if self.m.family == "gpt2":
            w = t.softmax(t.cast(w, 4) if self.job.autocast else w)
            w = t.drop(t.cast(w, v.item))
        else:
            shares = t.softmax(t.cast(w, 4))
            narrow = t.cast(shares, q.item)  # until here the masked scores live
            del shares
            w = narrow
            del narrow
        self.shares = Tensor(w.n, w.item, w.storage)  # returned: the layer holds them to its end
        return self._merged(t.matmul(w, lined(v, rep == 1), q.n))

    def _merged(self, y):
        """y; its gradient has positions before heads, and with a batch products copy it."""
        return self.tape.rewritten(y) if self.b > 1 else y

    def _attend_math(self, q, k, v, keys, masked):
        """What fused attention falls back to, all in fp32, where no kernel takes the inputs.

        In fp32 with grouped queries, or beside a mask with heads of unusual sizes. Of a causal
        call it makes the mask itself. C++ frees what it has named at the return only, last
        name first: repeated v and k, mask, queries.

        Source: _scaled_dot_product_attention_math and _safe_softmax of ATen.
        """
        t, rep, scores_n = self.tape, self.a // self.k, self.rows * self.a * keys
        item = 2 if t.autocast else q.item
        t.autocast, autocast = False, t.autocast
        q, k, v = (t.cast(t.cast(x, item), 4) for x in (q, k, v))
        q = t.map(q)
        mask = None if masked or self.s == 1 else self._triangle(self.s, keys)
        repeated = t.copy(k, k.n * rep) if rep > 1 else k
        v = t.copy(v, v.n * rep) if rep > 1 else v
        w = t.matmul(q, t.map(repeated), scores_n)
        shares = t.softmax(w)
        t.tensor(scores_n, 1)  # whether a score is minus infinity: a row of them gives zeros
        del w
        out = t.cast(self._merged(t.matmul(shares, v, q.n)), item)
        del shares, v
        del repeated
        del mask
        t.autocast = autocast
        return out

    def _triangle(self, s, keys):
        """Who sees whom, as numbers to add: from a bool triangle, which is cut from ones."""
        t = self.tape
        ones = t.tensor(s * keys, 1)
        triangle = t.tensor(s * keys, 1)
        del ones
        mask = t.tensor(s * keys, 4)
        del triangle
        return mask

    def remember(self, k, v, layer):
        """The cache: grown by concatenation, so the old and the new one meet for a moment."""
        if self.cache is None:
            return k, v
        t = self.tape
        held = self.cache.get(layer)
        kept = self.past
        if self.m.windowed(layer) and self.m.window:
            kept = min(kept, self.m.window - 1)
        grown = []
        for i, new in enumerate((k, v)):
            old = kept * self.b * self.k * self.d if held else 0
            fresh = t.tensor(old + new.n, new.item, "KV cache")
            if held:
                held[i] = fresh
            grown.append(fresh)
        if not held:
            self.cache[layer] = held = list(grown)
        if self.m.windowed(layer) and self.m.window and not self.past \
                and self.s >= self.m.window:
            size = (self.m.window - 1) * self.b * self.k * self.d
            for i in range(2):  # a view of the last tokens keeps the whole storage
                held[i].n = size
        return grown

    def attention(self, x, table, layer):
        t, m, d, job = self.tape, self.m, self.d, self.job
        h = m.hidden
        q_n, k_n = self.a * d, self.k * d
        if m.latent:
            return self._latent_attention(x, table, layer)
        if m.family in ("phi3", "gpt2", "gpt_neox"):
            qkv = self.linear(x, h, q_n + 2 * k_n, "qkv", bias=m.family != "phi3")
            rows = self.rows
            if m.family == "phi3":
                q, k, v = (t.part(qkv, rows * n) for n in (q_n, k_n, k_n))
            else:
                q, k, v = t.split(qkv, [rows * n for n in (q_n, k_n, k_n)])
            if m.family != "phi3":
                del qkv
        else:
            bias = m.qkv_bias or m.family == "phi"
            q = t.rewritten(self.linear(x, h, q_n, "q", bias))
            if m.qk_norm:
                q = self.norm(q, q_n if m.family == "olmo2" else d)
            k = t.rewritten(self.linear(x, h, k_n, "k", bias))
            if m.qk_norm:
                k = self.norm(k, k_n if m.family == "olmo2" else d)
            v = self.linear(x, h, k_n, "v", bias)
            if job.attention == "eager" or m.family == "companion":
                v = t.rewritten(v)
        if m.family != "gpt2":
            q, k = self.rotate(q, k, table)
        k, v = self.remember(k, v, layer)
        y, apart = self.attend(q, k, v, m.windowed(layer))
        out = t.copy(y) if apart else y
        if m.family != "companion":
            del y  # the book's code keeps its name, as those of queries, keys and values
        out = self.linear(out, q_n, h, "o", bias=m.plain_mlp)
        del q, k, v  # in the order of their names, as a frame lets go
        y = out
        return t.drop(y) if m.family == "gpt2" else y

    def _latent_attention(self, x, table, layer):
        """DeepSeek's attention, expanded to full heads as in training."""
        t, z, h, a, rows = self.tape, self.m.latent, self.m.hidden, self.a, self.rows
        width = z.nope + z.rope
        if z.q_rank:
            low = self.norm(self.linear(x, h, z.q_rank, "qa"), z.q_rank)
            q = self.linear(low, z.q_rank, a * width, "q")
            del low
        else:
            q = self.linear(x, h, a * width, "q")
        joint = self.linear(x, h, z.kv_rank + z.rope, "kva")
        latent, rope = t.split(joint, [rows * z.kv_rank, rows * z.rope])
        del joint
        kv = self.linear(self.norm(latent, z.kv_rank), z.kv_rank, a * (z.nope + z.v_head), "kv")
        del latent
        k_nope, v = t.split(kv, [rows * a * z.nope, rows * a * z.v_head])
        del kv
        q_nope, q_rope = t.split(q, [rows * a * z.nope, rows * a * z.rope])
        q_rope, rope = self.rotate(q_rope, rope, table)
        q = t.cat(q_nope, q_rope)
        k = t.cat(k_nope, t.copy(rope, rope.n * a))
        del q_nope, q_rope, k_nope, rope
        y, apart = self.attend(q, k, v, False)
        y = t.copy(y) if apart else y
        if y.n != rows * a * z.v_head:
            y = t.part(y, rows * a * z.v_head)
        return self.linear(y, a * z.v_head, h, "o")

    def mlp(self, x, layer):
        e = self.m.experts
        if e and layer >= e.dense_layers:
            return self._experts(x)
        return self._dense(x, self.ffn)

    def _dense(self, x, f):
        t, m, h, rows = self.tape, self.m, self.m.hidden, x.n // self.m.hidden
        if m.plain_mlp:
            y = self.linear(x, h, f, "up", bias=True)
            y = self._gelu_new(y) if m.family in ("gpt2", "phi") else t.map(y, "input")
            y = self.linear(y, f, h, "down", bias=True)
            return t.drop(y) if m.family == "gpt2" else y
        if m.family == "phi3":
            both = self.linear(x, h, 2 * f, "gate_up")
            gate, up = t.split(both, [rows * f] * 2)
            del both
            up = t.mul(up, t.map(gate, "input"))
            del gate
            return self.linear(up, f, h, "down")
        if self.job.kernels == "fused":  # silu(gate) is computed again in backward
            y = self._fused_gate(self.linear(x, h, f, "gate"), self.linear(x, h, f, "up"))
            return self.linear(y, f, h, "down")
        gate = t.map(self.linear(x, h, f, "gate"), "input")
        up = self.linear(x, h, f, "up")
        y = t.mul(gate, up)
        del gate, up
        return self.linear(y, f, h, "down")

    def _fused_gate(self, gate, up):
        t, n, item = self.tape, gate.n, gate.item
        out = t.tensor(n, item)
        return t.op(out, [gate, up], lambda g, *_: [t.tensor(n, item), t.tensor(n, item)],
                    [gate, up])

    def _gelu_new(self, x):
        """0.5 x (1 + tanh(c (x + 0.044715 x^3))), written out; autocast takes pow to fp32."""
        t = self.tape
        half = t.map(x)
        wide = t.cast(x, 4) if self.job.autocast else x
        cube = t.map(t.map(wide, "input", temporaries=2))
        inner = t.map(t.add(x, cube))
        del cube, wide
        inner = t.map(t.map(inner, "output"))
        return t.mul(half, inner)

    def _experts(self, x):
        """Tokens sorted by expert, grouped products, weighted sum; balanced routing."""
        t, e, h, rows = self.tape, self.m.experts, self.m.hidden, self.rows
        f, count = e.ffn // (self.job.tensor // self.split), e.count // self.job.expert
        logits = t.linear(x, self.weight(h * e.count), rows * e.count)
        scores = t.softmax(t.cast(logits, 4))
        del logits
        top = t.mul(t.part(scores, rows * e.top_k), t.tensor(rows, 4))
        del scores
        n = rows * e.top_k
        chosen = t.rewritten(t.copy(x, n * h))  # by indices: gradients are scattered anew
        both = t.linear(chosen, self.weight(count * 2 * f * h), n * 2 * f)
        both = t.rewritten(t.copy(both))
        gate, up = t.split(both, [n * f] * 2)
        del both
        y = t.mul(t.map(gate, "input"), up)
        del gate, up
        y = t.linear(y, self.weight(count * f * h), n * h)
        y = t.rewritten(t.copy(y))
        weighted = t.mul(y, top)
        weighted = t.copy(weighted)
        summed = t.mean(weighted, rows * h)
        out = t.cast(summed, x.item)
        del chosen, y, weighted, summed  # names live on until the function returns
        y = out
        if e.shared:
            y = t.add(y, self._dense(x, f * e.shared))
        return y

    def layer(self, x, table, layer):
        t, m, h = self.tape, self.m, self.m.hidden
        if m.family == "gpt_neox" or m.family == "phi":
            first = self.norm(x, h)
            y = self.attention(first, table, layer)
            second = first if m.family == "phi" else self.norm(x, h)
            del first
            z = self.mlp(second, layer)
            del second
            return t.add(t.add(z, y), x)
        if m.family == "olmo2":
            x = t.add(x, self.norm(self.attention(x, table, layer), h))
            return t.add(x, self.norm(self.mlp(x, layer), h))
        y = self.attention(self.norm(x, h), table, layer)
        if m.is_gemma and m.family != "gemma":
            y = self.norm(y, h)
        x = t.add(x, y)
        del y
        y = self.mlp(self.norm(x, h), layer)
        if m.is_gemma and m.family != "gemma":
            y = self.norm(y, h)
        out = t.add(x, y)
        del y  # its name now means the sum; the other operand's ends with the layer
        return out

    # -- the model --

    def kinds(self):
        """Layers in order as (kind, first layer of the run, how many): like ones together."""
        m, job = self.m, self.job
        count = job.local_layers(m)
        if self.every_layer:
            return [(i, 1) for i in range(count)]
        kinds = [(m.windowed(i) and (m.window < self.s), bool(m.experts)
                  and i >= m.experts.dense_layers) for i in range(count)]
        middle = {}
        for i in range(1, count - 1):
            middle.setdefault(kinds[i], []).append(i)
        runs = [(0, 1)]
        apart = []
        if self.sharded and count > 3:  # the first to meet the buffer of another's gradients
            members = middle[kinds[count - 2]]
            members.remove(count - 2)
            apart = [(count - 2, 1)]
        # the second layer apart: without gradients into the first, LoRA's first layer differs
        for members in filter(None, middle.values()):
            runs.append((members[0], len(members)))
        runs += apart
        if count > 1:
            runs.append((count - 1, 1))
        return runs

    def hidden_states(self):
        """Embedding and layers; autograd's graph is left on the tape."""
        t, m, job = self.tape, self.m, self.job
        if self.sharded:
            outer = m.outer_parameters // job.tensor * self.item
            self.flat = t.tensor(outer, 1, "gathered", GATHERING)
            self.root = t.tensor(outer, 1, "gathered")
        self.embedding_weight = self.outer_weight(self.vocab * m.hidden)
        if self.stage == "last":
            x = t.receive(self.rows * m.hidden, self.outer)
        else:
            x = t.embedding(self.embedding_weight, self.rows, m.hidden)
        if m.is_gemma:
            x = t.map(x)
        if m.positions:
            places = t.embedding(self.weight(m.positions * m.hidden), self.positions, m.hidden)
            x = t.drop(t.add(x, places))
            del places
        item = 4 if m.family == "companion" else x.item
        width = m.latent.rope if m.latent else m.head_dim
        if m.family == "companion":
            width //= 2  # an angle for each pair; Hugging Face writes it twice
        tables = [t.tensor(self.positions * width, item)
                  for _ in range(2)] if m.family != "gpt2" else [None]
        self.held = (tables, self._masks())
        embedded = x  # a variable of the model's forward, until that returns
        gathered, reduced = self.layer_traffic()
        t.change("gathered", gathered)
        for first, copies in self.kinds():
            t.where = f"layer {first + 1}"
            x = self._run(x, tables, first, copies)
        t.change("gathered", -gathered)
        if t.grad and gathered + reduced:
            def again():
                t.change("gathered", gathered)
                t.change("communication", reduced)
            x = t.through(x, again)
        t.where = "after the layers"
        if self.stage != "first":
            x = self.norm(x, m.hidden)
        del embedded
        return x

    def _masks(self):
        """What tells layers who sees whom; made once, held until the forward pass is over.

        Packed sequences have position ids that begin again with each document. FlashAttention
        gets the documents' ends (cu_seqlens, int32) and no mask. PyTorch's attention gets a bool
        mask [b, 1, s, s], and eager attention numbers of that shape, which it adds to scores.

        Source: masking_utils.py of Hugging Face; packing in TRL and torchtune is alike.
        """
        t, m, job = self.tape, self.m, self.job
        masks = []
        if job.packing:
            masks.append(t.tensor(self.b * self.s, 8))
        if job.attention == "flash":
            return masks + [t.tensor(1, 4)] * job.packing
        eager = job.attention == "eager"
        windowed = m.window and m.window < self.s and not self.past
        if eager or windowed or job.packing:
            rows = self.b * self.s if eager else self.positions
            keys, item = self.s + self.past, job.mask_bytes if eager else 1
            for _ in range(2 if m.family in ("gemma2", "gemma3") else 1):  # with a window, without
                masks.append(t.tensor(rows * keys, item))
        return masks

    # -- data parallel copies: DDP --

    def outlive(self, nbytes):
        """The second step of DDP: the bucket of the first one lives until a reduction begins.

        DDP first puts all gradients in one bucket and makes smaller ones before the second
        forward pass. NCCL's process group holds the tensors of a finished collective on a
        shelf, which its watchdog thread fills some time later and the start of another
        collective clears. If the watchdog is late for the second forward pass, that is the
        first bucket of the second backward pass, full with 1 MiB of gradients. Planned is
        that it is late: of two runs that were looked at, it was in one.

        Source: Reducer::rebuild_buckets, ProcessGroupNCCL's ``shelvesToUnstash_``.
        """
        t, seen = self.tape, []
        t.change("communication", nbytes)

        def arrived(w):
            if self.m.tied and w is self.embedding_weight:
                return  # autograd adds both of its gradients up before DDP hears of it
            seen.append(w.n * w.kept)
            if sum(seen) >= MiB:
                t.arrived = None
                t.change("communication", -nbytes)

        t.arrived = arrived

    # -- sharded weights: FSDP2, a group for each layer and one for all else --
    #
    # Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py

    def _layer_bytes(self, layer):
        """Bytes of a layer's weights as they are gathered."""
        n = self.m.layer_parameters(layer) // self.job.tensor
        job = self.job
        return packed_bytes(job, n) if job.method == "qlora" else n * job.weight_bytes

    def _gather(self, layer):
        """Forward: weights arrive in one buffer and are copied out of it.

        The buffer lives until the next one is filled (``all_gather_state``), so that both
        copies of a layer exist while it runs.
        """
        self.flat = self.tape.tensor(self._layer_bytes(layer), 1, "gathered", GATHERING)
        self.parts = self.tape.tensor(self._layer_bytes(layer), 1, "gathered")

    def _gather_again(self, layer):
        """Backward: copy the weights out; the layer before arrives meanwhile, in a buffer."""
        self.parts = self.tape.tensor(self._layer_bytes(layer), 1, "gathered")
        self.flat = None
        if layer:
            size = self._layer_bytes(layer - 1)
            self.flat = self.tape.tensor(size, 1, "gathered", GATHERING)
        self.first_kept = len(self.tape.kept)
        self.tape.where = f"layer {layer + 1}"

    def _reduce_layer(self):
        """A layer's backward is done: its weights go, its gradients are reduced."""
        self.parts = None
        grads = self.tape.kept[self.first_kept:]
        del self.tape.kept[self.first_kept:]
        if self.job.flat_lora:  # one gradient for all weights of the layer
            n = self.m.layer_parameters(0) // self.job.tensor + sum(g.n for g in grads)
            grads = [self.tape.tensor(n, self.item, "gradients")]
        self._reduce(grads)

    def _reduce(self, grads):
        """Whole gradients, copied into one buffer, become this rank's part.

        The buffer lives until the next reduction (``reduce_scatter_states``).
        """
        t, n, job = self.tape, sum(g.n for g in grads), self.job
        kept = job.gradient_bytes if self.full else job.adapter_bytes
        if job.flat_lora:
            kept = self.item
        self.reducing = None
        self.reducing = t.tensor(n, kept or job.weight_bytes, "communication")
        grads.clear()
        part = t.tensor(-(-n // job.gradient_shards), kept, "gradients", REDUCING)
        if not job.gradients_stay and not job.in_backward:
            self.shards.append(part)

    def reduce_root(self):
        """The end of backward: what no layer has is reduced, then all buffers are gone."""
        t = self.tape
        t.where = "embedding and head"
        self.flat = self.parts = self.root = None
        for w in self.roots:
            w.grad = None
        self._reduce(t.kept)
        self.reducing = None
        t.kept, self.shards = self.shards, []

    def _run(self, x, table, first, copies):
        """``_layers``, with what FSDP does before and after each."""
        if not self.sharded:
            return self._layers(x, table, first, copies)
        self._gather(first)
        x = self.tape.through(x, self._reduce_layer)
        y = self._layers(x, table, first, copies)
        self.parts = None
        return self.tape.through(y, lambda: self._gather_again(first))

    def _whole(self, x, table, layer):
        y = self.layer(x, table, layer)
        self.shares = None
        return y

    def _layers(self, x, table, first, copies):
        """One layer, and ``copies - 1`` that are booked like it."""
        t, job, made = self.tape, self.job, len(self.made)
        before = dict(t.live)
        if job.checkpointing and t.grad:
            y = t.checkpoint(lambda inner: self._whole(inner, table, first), x)
        else:
            y = self._whole(x, table, first)
        del x
        more = copies - 1
        if not more:
            return y
        self.made += self.made[made:] * more
        kept = {k: (t.live[k] - before[k]) * more for k in t.live if t.live[k] > before[k]}
        kept.pop("temporaries", None)  # the layer's output, which the next one consumes
        if not t.grad or not y.needs:
            return self._book(y, kept)
        grads = self.layer_gradients(first) * more
        for kind, nbytes in kept.items():
            t.change(kind, nbytes)

        def passed():
            casts = 0 if job.checkpointing else kept.get("weight casts", 0)
            for kind, nbytes in kept.items():
                t.change(kind, -(casts if kind == "weight casts" else nbytes))
            t.change("gradients", grads)

        if job.checkpointing:
            self.ghost_casts += kept.get("weight casts", 0)
        return t.through(y, passed)

    def _book(self, y, kept):
        for kind, nbytes in kept.items():
            self.tape.change(kind, nbytes)
        return y

    def layer_traffic(self):
        """Bytes that are fetched from the CPU while among the layers, and that go back there.

        Fetched: this layer and the next. Going back: a layer's whole gradients.
        """
        m, job = self.m, self.job
        if self.sharded or job.offload != "parameters":
            return 0, 0
        n = max(m.layer_parameters(0), m.layer_parameters(m.layers - 1)) // job.tensor
        packed = packed_bytes(job, n) if job.method == "qlora" else n * job.weight_bytes
        return int(2 * packed), n * (job.weight_bytes + job.gradient_bytes) if self.full else 0

    def layer_gradients(self, layer):
        """Bytes of the gradients of one layer's trainable parameters."""
        if self.job.gradients_stay or self.job.in_backward:
            return 0
        if self.job.flat_lora:
            n = (self.m.layer_parameters(layer) // self.job.tensor
                 + self.job.adapter_parameters(self.m, 1)) * self.item
        elif self.full:
            n = self.m.layer_parameters(layer) // self.job.tensor * self.job.gradient_bytes
        else:
            n = self.job.adapter_parameters(self.m, 1) * self.job.adapter_bytes
        return n // self.job.gradient_shards

    def head(self, x, tokens=None):
        """Logits of the last ``tokens`` positions (all by default)."""
        t, m = self.tape, self.m
        if tokens is not None and tokens * self.b < self.rows:
            x = t.part(x, tokens * self.b * m.hidden)
        rows = x.n // m.hidden
        vocab = self.vocab
        t.new_kind = "logits"
        table = self.embedding_weight if m.tied else self.outer_weight(vocab * m.hidden)
        y = t.linear(x, table, rows * vocab, self.weight(vocab) if m.family == "phi" else None)
        if m.family == "gemma2":
            y = t.map(y)
            y = t.map(y, "output")
            y = t.map(y)
        return y

    def loss(self, logits):
        """Cross entropy as plain, narrow, fused or chunked code computes it.

        plain: in fp32; narrow: in the type of the logits, as models do that do not cast them
        (OPT's and LitGPT's), except under autocast, which takes cross entropy to fp32.
        """
        t, n = self.tape, logits.n
        kind = self.job.loss
        if kind in ("fused", "chunked"):
            item, chunks = logits.item, 1 if kind == "fused" else 16
            out = t.tensor(1, 4)
            if kind == "chunked":  # only one chunk of logits and gradients lives at a time
                return t.op(out, [logits], lambda g, *_: [t.tensor(n // chunks, item)], [])
            stored = t.tensor(n, item)
            return t.op(out, [logits], lambda g, *_: [t.tensor(n, item)], [stored])
        each = 4 if kind == "plain" or t.autocast else logits.item
        wide = t.cast(logits, each)
        logs = t.tensor(n, each)
        t.op(logs, [wide], lambda g, out: [t.tensor(n, each)], [logs])
        picked = t.tensor(1, each)
        return t.op(picked, [logs], lambda g, *_: [t.tensor(n, each)],
                    [logs, t.tensor(self.rows, 8)])


def training_moments(model, job, static, step, stage=None):
    """Forward, loss, backward and optimizer step of one micro-batch in the steady state.

    static: bytes by component that exist all along (weights, moments ...); step: gives the
    bytes that the optimizer allocates on the way, from those of the gradients. stage: "first"
    holds the activations of as many micro-batches as there are stages, "last" has the loss.
    Returns a list of Moment.
    """
    if stage == "first":
        tape = Tape(job.autocast, _dropout(model))
        graph = [Walk(model, job, tape, stage=stage).hidden_states()]  # holds what is saved
        static = {**static, "activations": tape.live["activations"] * (job.pipeline - 1)}
        graph.clear()
    tape = Tape(job.autocast, _dropout(model))
    for kind, nbytes in static.items():
        tape.change(kind, nbytes)
    tape.mark()
    moments = []

    def close(name):
        parts, where = tape.phase_peak()
        moments.append(Moment(name, dict(parts), where))
        tape.mark()

    walk = Walk(model, job, tape, stage=stage)
    if job.is_ddp:
        walk.outlive(static["communication"])
    forward_backward(walk, close)
    gone = {"activations", "gathered"} | ({"communication"} if job.shard == 3 else set())
    static = {k: v for k, v in static.items() if k not in gone}
    grads = tape.live["gradients"] // (job.data if job.whole_gradients else 1)
    parts = {**static, "gradients": grads, "temporaries": step(grads)}
    moments.append(Moment("step", {**dict.fromkeys(tape.live, 0), **parts}, "optimizer"))
    return moments


def _dropout(model):
    """The share that the family drops in training by default."""
    return 0.1 if model.family == "gpt2" else 0.0


def forward_backward(walk, close=lambda name: None):
    """One micro-batch on the walk's tape; ``close(phase)`` is called as each one ends."""
    tape, job = walk.tape, walk.job
    x = walk.hidden_states()
    if not job.checkpointing:
        walk.held = None  # layers that run again get tables and masks again
    close("forward")
    tape.where = "head and loss"
    if walk.stage == "first":
        loss = tape.op(tape.tensor(1, 4), [x], lambda g: [tape.tensor(n, item)])
        n, item = x.n, x.item
    elif job.loss == "chunked":
        loss = _chunked(walk, x)
    else:
        logits = walk.head(x)
        if walk.m.family == "companion":
            del x  # elsewhere a variable holds it until the loss is there
        loss = walk.loss(logits)
        del logits
    x = tape.new_kind = None
    if job.autocast:
        tape.end_autocast()
        tape.change("weight casts", -walk.ghost_casts)
    close("loss")
    tape.where = "head and loss"
    tape.backward(loss)
    walk.held = None
    del loss
    if walk.sharded:
        walk.reduce_root()
    close("backward")


def _chunked(walk, x):
    """Head and loss over 1/16 of the positions at a time; logits are computed again."""
    t, m = walk.tape, walk.m
    n = x.n // m.hidden * walk.vocab // 16
    size, item = x.n, x.item
    held = [t.tensor(n, 4) for _ in range(3)]
    del held
    out = t.tensor(1, 4)
    w = walk.embedding_weight if m.tied else walk.outer_weight(walk.vocab * m.hidden)

    def back(g, *_):
        held = [t.tensor(n, 4) for _ in range(3)]
        gw = t.tensor(w.n, w.item) if w.trainable else None
        del held
        return [t.tensor(size, item), gw]

    return t.op(out, [x, w], back, [x])


def parameters_met(model, job):
    """[(elements, bytes of one, trainable)] of every parameter, in the order of the forward."""
    tape = Tape(job.autocast)
    tape.grad = False
    walk = Walk(model, job, tape)
    walk.head(walk.hidden_states())
    return walk.made


def count_parameters(model, job):
    """(all, trainable) parameters on one GPU, as the walk meets them."""
    met = parameters_met(model, job)
    return sum(n for n, _, _ in met), sum(n for n, _, trainable in met if trainable)


def training_cache(model, job, steps=2, lengths=()):
    """Bytes that PyTorch's allocator keeps beyond the peak of ``steps`` steps, by bookkeeping.

    Every tensor of every layer is given its block. The first step runs without moments, so
    that the second finds the cache that it left. Of several GPUs: one of DDP or of FSDP2.
    lengths: of sequences that were computed before, in this order.
    """
    allocator = Allocator() if job.gpus == 1 else Pools()
    tensors = resident(model, job)
    held = [allocator.malloc(weight) for weight, _, _ in tensors]
    trained = [moment for _, _, moment in tensors if moment]
    bucket = allocator.malloc(sum(g for _, g, _ in tensors)) if job.is_ddp else None
    held.append(allocator.malloc(WORKSPACE))
    first = replace(job, accumulate=1)
    parts = [_recorded(model, first if part == 0 else job)
             for part in range(min(job.accumulate, 2))]  # later ones are like the second
    for length in lengths:
        known = [None]
        for events in _recorded(model, replace(first, sequence=length)):
            play(events, allocator, known)
    for number in range(steps):
        blocks = []
        if bucket and number == 1:
            held += [allocator.malloc(n) for n in buckets([g for _, g, _ in tensors])]
        for part, (events, _) in enumerate(parts):
            blocks.append([None])
            play(events, allocator, blocks[-1])
            if number == part == 0:
                held.append(allocator.malloc(WORKSPACE))
        if bucket and number == 1:  # see Walk.outlive
            allocator.free(bucket)
        if number == 0:
            held += [allocator.malloc(n) for n in trained for _ in range(job.moments_kept)]
        if job.optimizer == "adamw" and not job.in_backward:
            roots = [allocator.malloc(n) for n in trained]
            for block in roots:
                allocator.free(block)
        for (_, cleared), known in zip(parts, blocks):
            play(cleared, allocator, known)
    return allocator.reserved - allocator.highest


def resident(model, job):
    """[(bytes of the weight, of its gradient, of a moment of it)] of each parameter's part here.

    Frozen ones have neither gradient nor moment.
    """
    found = []
    for n, item, trainable in parameters_met(model, job):
        if job.gpus > 1 and not job.is_lora:
            weight, _, _, moment = job.stored
        else:
            weight = moment = item
        here = -(-n // job.data) if job.sharded else n
        found.append((here * weight, n * weight * trainable, here * moment * trainable))
    return found


def buckets(gradients, first=MiB, then=25 * MiB):
    """Bytes of DDP's buckets: of each parameter's gradient in order, filled from the last one.

    A bucket is closed when it has reached its limit. Source: compute_bucket_assignment_by_size.
    """
    found, now = [], 0
    for nbytes in reversed(gradients):
        now += nbytes
        if now >= (then if found else first):
            found.append(now)
            now = 0
    return found + [now] * (now > 0)


def _recorded(model, job):
    """(events of a micro-batch, events of dropping its gradients): the same in every step."""
    tape = RecordingTape(job.autocast, _dropout(model))
    forward_backward(Walk(model, job, tape, True))
    events = tape.take()
    tape.kept.clear()
    return events, tape.take()


def inference_moments(model, job, static):
    """Prefill and the last step of decoding, without gradients. Returns a list of Moment."""
    tape = Tape(job.recipe == "autocast")
    tape.grad = False
    for kind, nbytes in static.items():
        tape.change(kind, nbytes)
    tape.mark()
    if job.paged:
        return [_engine_moment(model, job, tape)]
    walk = Walk(model, job, tape)
    walk.cache = {}
    moments = []

    def close(name):
        parts, where = tape.phase_peak()
        moments.append(Moment(name, dict(parts), where))
        tape.mark()

    x = walk.hidden_states()
    tape.where = "head"
    walk.head(x, None if job.all_logits else 1)
    del x
    tape.new_kind = walk.held = None
    close("prefill")
    if job.new_tokens:
        walk.past, walk.s = job.sequence + job.new_tokens - 1, 1
        walk.rows = walk.b
        grown = _cache_bytes(model, job, walk.past) - tape.live["KV cache"]
        tape.change("KV cache", grown)
        walk.head(walk.hidden_states())
        tape.new_kind = walk.held = None
        close("decode")
    return moments


CHUNK, PAGE = 8192, 16  # tokens that an engine computes at a time, and in a page of its cache


def _engine_moment(model, job, tape):
    """An engine's fullest moment: all pages taken, and a chunk of prompts in the layers."""
    pages = -(-(job.sequence + job.new_tokens) // PAGE) * job.batch
    per_token = model.kv_elements_per_layer(job.tensor) * job.local_layers(model)
    tape.change("KV cache", int(pages * PAGE * per_token * job.kv_bits / 8))
    chunk = replace(job, batch=1, sequence=min(job.batch * job.sequence, CHUNK))
    walk = Walk(model, chunk, tape)
    walk.head(walk.hidden_states(), min(job.batch, chunk.sequence))
    parts, where = tape.phase_peak()
    return Moment("serving", dict(parts), where)


def _cache_bytes(model, job, tokens):
    """Bytes of all layers' keys and values of ``tokens`` tokens a sequence on one GPU."""
    layers = job.local_layers(model)
    return int(job.batch * model.kv_bytes(tokens, job.kv_bits, job.tensor, True, layers))


def inference_cache(model, job, most=16):
    """Bytes that PyTorch's allocator keeps beyond the peak of a prompt and ``most`` new tokens."""
    allocator, blocks = Allocator(), [None]
    held = [allocator.malloc(n * item) for n, item, _ in parameters_met(model, job)]
    held.append(allocator.malloc(WORKSPACE))
    tape = RecordingTape()
    tape.grad = False
    walk = Walk(model, job, tape, True)
    walk.cache = {}
    walk.head(walk.hidden_states(), None if job.all_logits else 1)
    tape.new_kind = walk.held = None
    play(tape.take(), allocator, blocks)
    walk.past, walk.s, walk.rows = job.sequence, 1, walk.b
    for events in _decoded(walk, min(most, job.new_tokens)):
        play(events, allocator, blocks)
    return allocator.reserved - allocator.highest


def _decoded(walk, tokens):
    """What the allocator is asked for in each of ``tokens`` steps of decoding.

    From the second step on, each asks for the same blocks, larger by the same bytes, unless a
    window fills on the way: so two of them tell the others.
    """
    window, start = walk.m.window, walk.past
    filling = window is not None and start <= window <= start + tokens
    steps = []
    for _ in range(tokens if filling else min(tokens, 3)):
        walk.head(walk.hidden_states())
        walk.tape.new_kind = walk.held = None
        walk.past += 1
        steps.append(walk.tape.take())
    for _ in range(tokens - len(steps)):
        steps.append([b + (b - a) for a, b in zip(steps[-2], steps[-1])])
    return steps
