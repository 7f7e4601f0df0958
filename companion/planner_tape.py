"""A torch without numbers: tensors that know only their bytes, and a backward pass over them.

    tape = Tape()
    x = tape.tensor(tokens * hidden, 2)
    y = tape.linear(x, tape.parameter(hidden * ffn, 2), tokens * ffn)
    tape.backward(y)
    tape.peak                       # the fullest moment, by component

What autograd saves, what an operation allocates on the way, what backward allocates and
when all of it dies are written down once per operation, as PyTorch 2 does it on a GPU.
A storage dies with its last reference, like there, so a model written with these operations
has the lifetimes of the real one. Elements are counted, shapes are not.

Standard library only: this file also runs in a browser.
"""
import heapq

from .planner_allocator import SIDE

KINDS = ("weights", "moments", "gradients", "weight casts", "activations", "logits",
         "KV cache", "temporaries", "gathered", "workspaces", "communication")


def sum_workspace(outputs, rows, processors=132):
    """Bytes in which a sum over many rows keeps the parts of its blocks, on Hopper.

    A block has 32 x 4 threads of four outputs each. If a thread had 256 values or more to add,
    several blocks share the rows: as many as fill the GPU, but at least 16 values a thread.

    Source: setReduceConfig and global_memory_size in ATen's native/cuda/Reduce.cuh.
    """
    vector = 4 if outputs % 4 == 0 else 2 if outputs % 2 == 0 else 1
    width, height = 32, 512 // vector // 32
    values = -(-rows // height)
    grid = -(-outputs // vector // width)
    target = processors * (2048 // (width * height))
    if outputs // vector < width or values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * outputs * blocks * width * vector if blocks > 1 else 0


class Storage:
    """Bytes that are allocated until the last tensor that looks at them is gone."""
    __slots__ = ("tape", "bytes", "kind")

    def __init__(self, tape, nbytes, kind):
        self.tape, self.bytes, self.kind = tape, -(-nbytes // 512) * 512, kind
        tape.change(kind, self.bytes)

    def name(self, kind):
        """Book the bytes under another component from now on."""
        if kind != self.kind:
            self.tape.live[self.kind] -= self.bytes
            self.tape.live[kind] += self.bytes
            self.kind = kind

    def __del__(self):
        self.tape.change(self.kind, -self.bytes)


class Block:
    """A Storage on a RecordingTape: numbered, not counted, and of no component."""
    __slots__ = ("tape", "number")
    kind = "none"

    def __init__(self, tape, nbytes, stream=0):
        self.tape, self.number = tape, 0
        if nbytes:
            tape.count = self.number = tape.count + 1
            tape.events.append(nbytes + stream * SIDE)

    def name(self, kind):
        pass

    def __del__(self):
        if self.number:
            self.tape.events.append(-self.number)


class Parameter:
    """A leaf: its bytes are counted by the caller, its gradient by the tape."""
    __slots__ = ("tape", "n", "item", "trainable", "grad", "held", "kept", "shards", "applied")

    def __init__(self, tape, n, item, trainable=True, held=False, kept=None, shards=1,
                 applied=None):
        self.tape, self.n, self.item, self.trainable = tape, n, item, trainable
        self.shards = shards
        self.applied = applied  # bytes an element on the way of an update that frees the gradient
        self.grad, self.held = None, held  # held: a gradient of an earlier micro-batch exists
        self.kept = item if kept is None else kept  # bytes of an element of the kept gradient

    def accept(self, g):
        """AccumulateGrad: keep the first gradient as it is, add later ones in place."""
        if self.applied is not None:
            g.storage.name("gradients")
            self.tape.tensor(self.n, self.applied)
        elif self.grad is None and not self.held:
            if self.kept != g.item or self.shards > 1:  # reduced to this rank's part
                g = self.tape.tensor(-(-g.n // self.shards), self.kept)
            g.storage.name("gradients")
            self.grad = g
            self.tape.kept.append(g)
        if self.tape.arrived:
            self.tape.arrived(self)


class Tensor:
    """n elements of ``item`` bytes; ``node`` produced it, if a gradient is to flow back.

    viewed: a gradient that is a view of a product's output, which no other is added to in place.
    """
    __slots__ = ("n", "item", "storage", "node", "viewed")

    def __init__(self, n, item, storage, node=None, viewed=False):
        self.n, self.item, self.storage, self.node = n, item, storage, node
        self.viewed = viewed

    @property
    def needs(self):
        return self.node is not None


class Node:
    """One operation of the backward graph."""
    __slots__ = ("seq", "edges", "back", "saved")

    def __init__(self, seq, edges, back, saved):
        self.seq, self.edges, self.back, self.saved = seq, edges, back, saved


def needs(t):
    return t.trainable if isinstance(t, Parameter) else t.node is not None


def _edge(t):
    return (t if t.trainable else None) if isinstance(t, Parameter) else t.node


class Tape:
    """Live bytes by component, the peak since ``mark``, and the operations of a model."""

    storage = Storage

    def __init__(self, autocast=False, dropout=0.0):
        self.live = dict.fromkeys(KINDS, 0)
        self.total, self.highest, self.peak = 0, 0, dict(self.live)
        self.grad, self.autocast, self.dropout = True, autocast, dropout
        self.seq, self.casts, self.kept = 0, {}, []  # kept: gradients of parameters
        self.new_kind, self.where, self.peak_where = None, "", ""
        self.again = False  # whether backward runs through a layer that is computed again
        self.arrived = None  # called with each parameter whose gradient is there

    # -- bookkeeping --

    def change(self, kind, nbytes):
        self.live[kind] += nbytes
        self.total += nbytes
        if nbytes > 0:
            if self.total > self.highest:
                self.highest, self.peak, self.peak_where = self.total, None, self.where
        elif self.peak is None and nbytes:
            self._photograph(kind, nbytes)

    def _photograph(self, kind, nbytes):
        """The components at the peak that just ended with this change."""
        self.peak = dict(self.live)
        self.peak[kind] -= nbytes

    def mark(self):
        """Begin a phase: the peak is sought from here on."""
        self.highest, self.peak, self.peak_where = self.total, None, self.where

    def phase_peak(self):
        """{component: bytes} at the fullest moment since ``mark``, and where it was."""
        return dict(self.live) if self.peak is None else self.peak, self.peak_where

    def tensor(self, n, item, kind=None, stream=0):
        kind = kind or self.new_kind or "temporaries"
        return Tensor(n, item, self.storage(self, n * item, kind))

    def parameter(self, n, item, trainable=True, held=False, kept=None, shards=1, applied=None):
        return Parameter(self, n, item, trainable, held, kept, shards, applied)

    def op(self, out, inputs, back, saved=()):
        """Give ``out`` its node, if any input needs a gradient; name what it saves."""
        if not self.grad:
            return out
        edges = [_edge(t) for t in inputs]
        if edges.count(None) < len(edges):
            self.seq += 1
            kept = []
            for t in saved:
                if isinstance(t, Tensor):
                    if t.storage.kind == "temporaries":
                        t.storage.name("activations")
                    t = Tensor(t.n, t.item, t.storage)
                kept.append(t)
            out.node = Node(self.seq, edges, back, kept)
        return out

    def backward(self, loss):
        """Run the graph from ``loss``; newer nodes first, as autograd's engine does."""
        heap, buffers = [], {}

        def send(node, g):
            if node is None or g is None:
                return
            if isinstance(node, Parameter):
                node.accept(g)
            elif node in buffers:  # added in place, if autograd may (can_accumulate_inplace)
                if buffers[node].viewed:
                    buffers[node] = self.tensor(g.n, g.item)
            else:
                buffers[node] = g
                heapq.heappush(heap, (-node.seq, id(node), node))

        send(loss.node, self.tensor(1, 4))
        loss.node = None
        while heap:
            node = heapq.heappop(heap)[2]
            g = buffers.pop(node)
            if self.again:  # what a checkpoint computed again dies with the formula's locals
                grads, saved = node.back(g, *node.saved), node.saved
                while saved:
                    saved.pop(0)
                del g
            else:  # saved tensors are released after the gradient
                grads = node.back(g, *node.saved)
                del g
            node.back = node.saved = None
            edges, node.edges = node.edges, None
            while edges:  # hand over one by one, so that nothing is held twice
                send(edges.pop(), grads.pop())

    # -- operations --

    def cast(self, t, item):
        if t.item == item:
            return t
        out = self.tensor(t.n, item)
        n, old = t.n, t.item
        return self.op(out, [t], lambda g: [self.tensor(n, old)])

    def weight(self, w, item):
        """A parameter as a product wants it: autocast keeps one cast copy for the pass."""
        if w.item == item:
            return w
        if w not in self.casts:
            copy = self.tensor(w.n, item, "weight casts")
            n, old = w.n, w.item
            self.casts[w] = self.op(copy, [w], lambda g: [self.tensor(n, old)])
        return self.casts[w]

    def end_autocast(self):
        self.casts.clear()

    def linear(self, x, w, n_out, bias=None, unpacked=0, keep=False):
        """x times a weight; under autocast both in 16 bits, x cast for each product anew.

        unpacked: bytes that a packed weight takes while it is multiplied, here and in backward;
        keep: save x though no gradient needs it.
        """
        wide = self.tensor(unpacked, 1) if unpacked else None
        if self.autocast:
            x, w = self.cast(x, 2), self.weight(w, 2)
        out, n, item, wn = self.tensor(n_out, x.item), x.n, x.item, w.n
        x_needs, w_needs = needs(x), needs(w)

        del wide

        def back(g, *_):
            # formulas run in alphabetical order: mm has mat2 before self, addmm mat1 before mat2
            gw = self.tensor(wn, item) if w_needs and bias is None else None
            wide = self.tensor(unpacked, 1) if unpacked and x_needs else None
            gx = self.tensor(n, item) if x_needs else None
            if gx is not None:
                gx.viewed = True
            del wide
            if bias is None:
                return [gx, gw]
            gw = self.tensor(wn, item) if w_needs else None
            if not bias.trainable:
                return [gx, gw, None]
            return [gx, gw, self._over_rows(bias.n, bias.item, n_out // bias.n)]

        saved = [t for t, other in ((x, w_needs or keep), (w, x_needs)) if other]
        return self.op(out, [x, w] + [bias] * (bias is not None), back, saved)

    def _to_input(self, g, item, n, rows=0):
        """A gradient of the product's type brought to the input's size and type."""
        if n < g.n:
            g = self._over_rows(n, g.item, g.n // n) if rows else self.tensor(n, g.item)
        return self.tensor(n, item) if item != g.item else g

    def _over_rows(self, n, item, rows):
        """A sum over rows; the workspace in which blocks of threads leave their parts dies."""
        out = self.tensor(n, item)
        self.tensor(sum_workspace(n, rows), 1)
        return out

    def mul(self, a, b, rows=0):
        """Elementwise, with broadcasting; a mixed product has the wider type.

        rows: of which one operand gains each alike. The engine brings gradients to the inputs'
        sizes when both products are there (``validate_outputs``).
        """
        n, item = max(a.n, b.n), max(a.item, b.item)
        out = self.tensor(n, item)
        sides = [(needs(a), a.n, a.item, b.item), (needs(b), b.n, b.item, a.item)]

        def back(g, *_):
            grads = [None, None]
            for i in (1, 0):  # "other" before "self"
                if sides[i][0]:
                    grads[i] = self.tensor(n, max(g.item, sides[i][3]))
            for i, (wanted, size, own, _) in enumerate(sides):
                if wanted:
                    grads[i] = self._to_input(grads[i], own, size, rows)
            return grads

        saved = [t for t, other in ((a, b), (b, a)) if needs(other)]
        return self.op(out, [a, b], back, saved)

    def add(self, a, b):
        n, item = max(a.n, b.n), max(a.item, b.item)
        out = self.tensor(n, item)
        sides = [(needs(a), a.n, a.item), (needs(b), b.n, b.item)]

        def back(g):
            return [self._to_input(g, own, size) if wanted else None
                    for wanted, size, own in sides]

        return self.op(out, [a, b], back)

    def map(self, x, save=None, temporaries=0):
        """An elementwise function. save: "input", "output" or None; temporaries: how many
        tensors of its size the backward formula makes on the way."""
        out, n, item = self.tensor(x.n, x.item), x.n, x.item
        saved = {"input": [x], "output": [out], None: []}[save]

        def back(g, *_):
            extra = [self.tensor(n, item) for _ in range(temporaries)]
            result = self.tensor(n, item)
            del extra
            return [result]

        return self.op(out, [x], back, saved)

    def mean(self, x, n_out):
        """Over the last dimension; backward writes the expanded gradient out."""
        out, n, item = self.tensor(n_out, x.item), x.n, x.item
        return self.op(out, [x], lambda g: [self.tensor(n, item)])

    def part(self, x, n):
        """A slice of x, without a copy; backward fills a tensor of x's size."""
        whole, item = x.n, x.item
        out = Tensor(n, x.item, x.storage)
        return self.op(out, [x], lambda g: [self.tensor(whole, item)])

    def split(self, x, sizes):
        """Views that cover x; their gradients wait for each other, to be joined in a tensor."""
        whole, item = x.n, x.item
        joined, waiting = Tensor(x.n, x.item, x.storage), []

        def join(g):
            result = self.tensor(whole, item)
            waiting.clear()
            return [result]

        def wait(g):
            waiting.append(g)
            return [Tensor(g.n, g.item, g.storage)]

        self.op(joined, [x], join)
        return [self.op(Tensor(n, item, x.storage), [joined], wait) for n in sizes]

    def cat(self, *parts):
        out = self.tensor(sum(p.n for p in parts), max(p.item for p in parts))
        count = len(parts)
        return self.op(out, parts, lambda g: [g] * count)

    def copy(self, x, n=None):
        """``contiguous`` or ``repeat``: n elements in a new storage."""
        size, item = x.n, x.item
        out = self.tensor(n or x.n, x.item)
        same = out.n == size
        return self.op(out, [x], lambda g: [g if same else self.tensor(size, item)])

    def softmax(self, x):
        """Backward writes the product of gradient and output beside the result."""
        out, n, item = self.tensor(x.n, x.item), x.n, x.item

        def back(g, *_):
            result = self.tensor(n, item)
            self.tensor(n, item)
            return [result]

        return self.op(out, [x], back, [out])

    def drop(self, x, share=None):
        """Dropout of ``share``, the tape's by default: a one-byte mask is saved.

        The mask exists in a checkpointed pass too, which nothing remembers.
        """
        if not (self.dropout if share is None else share):
            return x
        mask, out, n, item = self.tensor(x.n, 1), self.tensor(x.n, x.item), x.n, x.item
        return self.op(out, [x], lambda g, *_: [self.tensor(n, item)], [mask])

    def matmul(self, a, b, n_out):
        if self.autocast:
            a, b = self.cast(a, 2), self.cast(b, 2)
        out = self.tensor(n_out, a.item)
        sides = [(needs(t), t.n, t.item) for t in (a, b)]

        def back(g, *_):
            second, first = [self.tensor(n, item) if wanted else None
                             for wanted, n, item in reversed(sides)]  # mat2 before self
            return [first, second]

        return self.op(out, [a, b], back, [a, b])

    def norm(self, x, weight, rows, bias=None, statistics=1):
        """A fused LayerNorm or RMSNorm: saves its input and a number or two per row."""
        if self.autocast:
            x = self.cast(x, 4)
        out = self.tensor(x.n, max(x.item, 2))
        stats = self.tensor(rows * statistics, 4)
        n, item = x.n, x.item
        leaves = [w for w in (weight, bias) if w is not None]

        def back(g, *_):
            return [self.tensor(n, item)] + [self.tensor(w.n, w.item) if w.trainable else None
                                             for w in leaves]

        return self.op(out, [x, *leaves], back, [x, stats])

    def attention(self, q, k, v, rows, expand=1, bias=None):
        """Fused attention: saves q, k, v, its output and a log-sum-exp per query and head.

        bias: what is added to the scores, for a mask; saved too.

        Backward accumulates dq in fp32; with grouped queries (``expand`` query heads to a
        key head) it first writes dk and dv for every query head.
        """
        if self.autocast:
            q, k, v = (self.cast(t, 2) for t in (q, k, v))
        out, lse = self.tensor(q.n, q.item), self.tensor(rows, 4)
        sizes = [(t.n, t.item) for t in (q, k, v)]
        wide = q.item == 4

        def back(g, *_):
            grads = [self.tensor(n, item) for n, item in sizes]
            extra = rows * 4
            if not wide:  # cuDNN takes it all as one workspace
                extra += sizes[0][0] * 4 + (2 * sizes[1][0] * expand * 2 if expand > 1 else 0)
            self.tensor(extra, 1)
            return grads

        saved = [q, k, v, out, lse] + [bias] * (bias is not None)
        return self.op(out, [q, k, v], back, saved)

    def embedding(self, w, tokens, hidden):
        """Rows of a table.

        Backward over many tokens sorts them and sums parts of ten in fp32, for which it takes
        what might be needed at most. Source: ATen's native/cuda/EmbeddingBackwardKernel.cu.
        """
        out, ids = self.tensor(tokens * hidden, w.item), self.tensor(tokens, 8)

        def back(g, *_):
            result = self.tensor(w.n, w.item)
            if tokens > 3072:
                self.tensor((tokens + tokens // 10) * hidden, 4)
            return [result]

        return self.op(out, [w], back, [ids])

    def receive(self, n, item):
        """What the pipeline stage before sends: its gradient is sent back."""
        return self.op(self.tensor(n, item), [_Input()], lambda g: [g])

    def rewritten(self, x):
        """x itself; its gradient is written anew: negated, or in a layout that a product takes."""
        out, n, item = Tensor(x.n, x.item, x.storage), x.n, x.item
        return self.op(out, [x], lambda g: [self.tensor(n, item)])

    def through(self, x, action):
        """x itself; ``action()`` runs when the backward pass comes by."""
        out = Tensor(x.n, x.item, x.storage)

        def back(g):
            action()
            return [g]

        return self.op(out, [x], back)

    def checkpoint(self, function, x):
        """Run without saving; in backward, run again and go back through it at once."""
        if not self.grad:
            return function(x)
        self.grad = False
        inside = Tensor(x.n, x.item, x.storage)
        y = function(inside)
        del inside
        self.grad = True
        out = Tensor(y.n, y.item, y.storage)
        del y
        n, item, had_gradient = x.n, x.item, x.needs

        def back(g, kept):
            leaf = _Input()
            again = Tensor(n, item, kept.storage, leaf)
            y = function(again)
            node, y, again = y.node, None, None
            incoming = [Tensor(g.n, g.item, g.storage)]
            g.storage = None  # the layer's inside gives it back, as if there were no checkpoint
            self.again = True
            self._inner(node, incoming)
            self.again = False
            if self.autocast:
                self.end_autocast()
            return [leaf.grad if had_gradient else None]

        # the layer's own parameters need gradients even where its input does not
        self.seq += 1
        x.storage.name("activations") if x.storage.kind == "temporaries" else None
        out.node = Node(self.seq, [x.node], back, [Tensor(n, item, x.storage)])
        return out

    def _inner(self, node, incoming):
        root = Node(self.seq + 1, [node], lambda _: [incoming.pop()], [])
        self.seq += 1
        start = Tensor(1, 4, self.storage(self, 0, "temporaries"), root)
        self.backward(start)


class _Input(Parameter):
    """The input of a checkpointed layer: its gradient is handed on, not kept."""

    def __init__(self):
        super().__init__(None, 0, 0)

    def accept(self, g):
        if self.grad is None:
            self.grad = g


class RecordingTape(Tape):
    """A tape that counts nothing, but writes down what it asks of an allocator.

    events: bytes of a block that is wanted (plus SIDE for each number of its stream), or minus
    the number of one that is given back; blocks are numbered from 1 as they come.
    """
    storage = Block

    def __init__(self, autocast=False, dropout=0.0):
        super().__init__(autocast, dropout)
        self.events, self.count = [], 0

    def change(self, kind, nbytes):
        pass

    def tensor(self, n, item, kind=None, stream=0):
        return Tensor(n, item, Block(self, n * item, stream))

    def take(self):
        """The events since the last call."""
        events, self.events = self.events, []
        return events
