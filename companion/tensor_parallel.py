"""Tensor parallelism by hand: every layer cut across the ranks of a group.

    from companion.tensor_parallel import parallelize, vocabulary_cross_entropy
    model = parallelize(Decoder(config), group)         # the same weights on all ranks before
    loss = vocabulary_cross_entropy(model(tokens), targets, group)
    loss.backward()                                     # then any optimizer, on each rank

Query, key, value, gate, up and head are cut by outputs, ``o`` and ``down`` by inputs, the
embedding by words. ``sequence=True`` cuts what lies between them by tokens. All ranks get the
same tokens; each returns the logits of its own words.

Letters: B batch, T positions, D width, V vocabulary, v words of this rank, n ranks.
Limits: heads, hidden width and vocabulary divide by n (and tokens, with ``sequence``); key/value
heads divide n or are divided by it. No dropout. Weights are cut from whole ones.
Sources: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
Taught in: chapters/tensor_parallel.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .wire import all_gather, reduce_scatter

__all__ = ["ColumnLinear", "RowLinear", "VocabularyEmbedding", "cut", "enter", "grad_norm",
           "leave", "parallelize", "vocabulary_cross_entropy"]


# ---------------------------------------------------------------- in and out of the cut region

def gathered(x, dim, group=None):
    """``x`` of all ranks, joined along ``dim``, in the order of ranks; no gradient."""
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty(first.shape[0] * dist.get_world_size(group), *first.shape[1:])
    all_gather(whole, first, group)
    return whole.movedim(0, dim).contiguous()


def summed_share(x, dim, group=None):
    """This rank's part, along ``dim``, of the sum of ``x`` over all ranks; no gradient."""
    first = x.movedim(dim, 0).contiguous()
    part = first.new_empty(first.shape[0] // dist.get_world_size(group), *first.shape[1:])
    reduce_scatter(part, first, group)
    return part.movedim(0, dim).contiguous()


def summed(x, group=None):
    """The sum of ``x`` over all ranks, in new memory; no gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Copy(torch.autograd.Function):  # "f" of Shoeybi et al.
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):  # "g"
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return summed_share(grad, 1, ctx.group), None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed_share(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, 1, ctx.group), None


def enter(x, group=None, sequence=False, regather=False):
    """Begin a region where each rank computes with its part of the weights on all tokens.

    x: [B, T, D], the same on all ranks; its gradient is summed over them (an all-reduce).
    sequence: x is [B, T / n, D], this rank's tokens; the result has all (an all-gather), and the
    gradient is a reduce-scatter. regather: ``ColumnLinear`` then keeps only x for the backward
    pass, which gathers again: less memory, one more all-gather.
    """
    if not sequence:
        return _Copy.apply(x, group)
    whole = _Gather.apply(x, group)
    if regather:
        whole.again = _Again(x.detach(), whole, group)
    return whole


def leave(x, group=None, sequence=False):
    """End such a region: sum the ranks' partial results.

    x: [B, T, D], partial -> [B, T, D], the same on all ranks (an all-reduce), or with
    ``sequence`` [B, T / n, D] (a reduce-scatter; its gradient is an all-gather).
    Raises ValueError if T does not divide by n.
    """
    if not sequence:
        return _Sum.apply(x, group)
    n = dist.get_world_size(group)
    if x.shape[1] % n:
        raise ValueError(f"leave: {x.shape[1]} tokens do not divide among {n} ranks")
    return _SumScatter.apply(x, group)


class _Again:
    """Keeps a shard in place of the gathered tensor, for all layers that saved the latter."""

    def __init__(self, shard, whole, group):
        self.shard, self.group, self.key = shard, group, whole.untyped_storage()._cdata
        self.uses = self.left = 0
        self.whole = None

    def pack(self, t):
        if t.untyped_storage()._cdata != self.key:
            return t
        self.uses += 1
        return t.shape

    def unpack(self, kept):
        if not isinstance(kept, torch.Size):
            return kept
        if self.whole is None:
            self.whole, self.left = gathered(self.shard, 1, self.group), self.uses
        whole, self.left = self.whole.view(kept), self.left - 1
        if not self.left:
            self.whole = None
        return whole


# ---------------------------------------------------------------- layers

def cut(tensor, dim, piece, pieces):
    """Piece number ``piece`` of ``pieces`` equal ones along ``dim``, in its own memory.

    Raises ValueError if the size does not divide.
    """
    size = tensor.shape[dim]
    if size % pieces:
        raise ValueError(f"cut: {size} does not divide into {pieces} equal pieces")
    return tensor.detach().narrow(dim, piece * size // pieces, size // pieces).clone()


def _parameter(tensor, copies=1):
    """copies: how many ranks hold these same numbers, for ``grad_norm``."""
    p = nn.Parameter(tensor)
    p.copies = copies
    return p


class ColumnLinear(nn.Module):
    """Piece ``piece`` of ``pieces`` of the outputs of ``linear``: [..., in] -> [..., out/pieces].

    It sends nothing: ``enter`` comes before it, once for all layers with the same input.
    copies: how many ranks hold this piece.
    """

    def __init__(self, linear, piece, pieces, copies=1):
        super().__init__()
        self.weight = _parameter(cut(linear.weight, 0, piece, pieces), copies)
        bias = linear.bias
        self.bias = None if bias is None else _parameter(cut(bias, 0, piece, pieces), copies)

    def forward(self, x):
        again = getattr(x, "again", None)
        if again is None:
            return F.linear(x, self.weight, self.bias)
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's part of the inputs of ``linear``, then ``leave``: [B, T, in/n] -> [B, T, out].

    The bias is added once, after the sum.
    """

    def __init__(self, linear, group=None, sequence=False):
        super().__init__()
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.sequence = group, sequence
        self.weight = _parameter(cut(linear.weight, 1, rank, n))
        self.bias = None
        if linear.bias is not None:
            self.bias = _parameter(linear.bias.detach().clone(), n)
            if sequence:
                _sum_gradient(self.bias, group)

    def forward(self, x):
        y = leave(F.linear(x, self.weight), self.group, self.sequence)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Module):
    """This rank's words of ``embedding``, then ``leave``: [B, T] -> [B, T, D].

    A word of another rank gives zeros here; the sum brings its row.
    """

    def __init__(self, embedding, group=None, sequence=False):
        super().__init__()
        self.group, self.sequence = group, sequence
        self.weight = _parameter(
            cut(embedding.weight, 0, dist.get_rank(group), dist.get_world_size(group)))

    def forward(self, ids):
        here, mine = _of_this_rank(ids, self.weight.shape[0], self.group)
        rows = F.embedding(here, self.weight)
        return leave(rows.masked_fill(~mine[..., None], 0), self.group, self.sequence)


def _of_this_rank(ids, words, group):
    """(ids counted from this rank's first word, and 0 elsewhere; which are this rank's)."""
    here = ids - dist.get_rank(group) * words
    mine = (here >= 0) & (here < words)
    return here.where(mine, 0), mine


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, ignore_index):
        most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        exp = (logits - most[..., None]).exp_()
        here, mine = _of_this_rank(targets, logits.shape[-1], group)
        own = logits.gather(-1, here[..., None])[..., 0].masked_fill(~mine, 0)
        both = summed(torch.stack([exp.sum(-1), own]), group)
        counts = targets != ignore_index
        ctx.save_for_backward(exp.div_(both[0][..., None]), here, mine, counts)
        losses = (both[0].log() + most - both[1]).where(counts, 0)
        return losses.sum() / counts.sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, here, mine, counts = ctx.saved_tensors
        one = mine[..., None].to(softmax.dtype)
        each = (grad / counts.sum() * counts)[..., None]
        return softmax.scatter_add(-1, here[..., None], -one) * each, None, None, None


def vocabulary_cross_entropy(logits_BTv, targets_BT, group=None, ignore_index=-100):
    """Mean cross-entropy from logits cut by words, without gathering them; same on all ranks.

    logits_BTv: this rank's [B, T, V / n]; 16-bit ones are computed in fp32. targets_BT: words of
    the whole vocabulary, or ``ignore_index``; the mean is over the others (NaN if there are
    none, as in ``F.cross_entropy``). Sends 3 numbers a token: a maximum, a sum, a logit.
    Raises ValueError for a target outside the vocabulary.
    """
    words = logits_BTv.shape[-1] * dist.get_world_size(group)
    wrong = ((targets_BT < 0) | (targets_BT >= words)) & (targets_BT != ignore_index)
    if wrong.any():
        raise ValueError(f"vocabulary_cross_entropy: target {targets_BT[wrong][0].item()} is not "
                         f"among {words} words")
    small = logits_BTv.dtype in (torch.bfloat16, torch.float16)
    logits = logits_BTv.float() if small else logits_BTv
    return _VocabularyLoss.apply(logits, targets_BT, group, ignore_index)


# ---------------------------------------------------------------- the whole decoder

def parallelize(decoder, group=None, sequence=False, regather=False):
    """Cut a ``companion.gpt.Decoder`` in place, and return it: [B, T] -> logits [B, T, V / n].

    group: the ranks that share it, all of which call this with the same weights; sequence: cut
    activations between the layers by tokens too; regather: see ``enter``. Make the optimizer
    afterwards. Raises ValueError for sizes that do not divide, before anything is cut.
    """
    c, rank, n = decoder.config, dist.get_rank(group), dist.get_world_size(group)
    _require_divisible(c, n)
    for block in decoder.blocks:
        _cut_block(block, c, rank, n, group, sequence)
        for part in block.attention, block.mlp:
            _entering(part, group, sequence, regather)
    decoder.embedding = VocabularyEmbedding(decoder.embedding, group, sequence)
    decoder.head = ColumnLinear(decoder.head, rank, n)
    decoder.head.weight = decoder.embedding.weight  # still tied
    _entering(decoder.head, group, sequence, regather)
    for name, p in decoder.named_parameters():
        if "norm" in name:
            p.copies = n
            if sequence:  # each rank's gradient is that of its tokens
                _sum_gradient(p, group)
    return decoder


def _require_divisible(c, n):
    for name, size in (("heads", c.heads), ("hidden", c.hidden), ("vocab", c.vocab)):
        if size % n:
            raise ValueError(f"parallelize: {name} {size} does not divide among {n} ranks")
    if c.kv_heads % n and n % c.kv_heads:
        raise ValueError(f"parallelize: kv_heads {c.kv_heads} and {n} ranks: one must divide "
                         "the other")


def _cut_block(block, c, rank, n, group, sequence):
    attention, mlp = block.attention, block.mlp
    pieces = min(c.kv_heads, n)  # fewer key/value heads than ranks: some share one
    attention.q = ColumnLinear(attention.q, rank, n)
    for name in "k", "v":
        whole = getattr(attention, name)
        setattr(attention, name, ColumnLinear(whole, rank * pieces // n, pieces, n // pieces))
    if pieces < n:
        peers = _sharers(group, n, pieces)
        for part in attention.k, attention.v:
            part.weight.register_hook(lambda grad: _sum_among(grad, peers, group))
    attention.o = RowLinear(attention.o, group, sequence)
    mlp.gate, mlp.up = ColumnLinear(mlp.gate, rank, n), ColumnLinear(mlp.up, rank, n)
    mlp.down = RowLinear(mlp.down, group, sequence)


def _sharers(group, n, pieces):
    """The other ranks, by global number, that hold the same key/value head as this one."""
    each, rank = n // pieces, dist.get_rank(group)
    first = rank // each * each
    whole = group if group is not None else dist.group.WORLD
    return [dist.get_global_rank(whole, r) for r in range(first, first + each) if r != rank]


def _sum_among(gradient, peers, group):
    """The sum over this rank and ``peers``, added in one order, so with equal bits on all.

    Point to point: a group of their own would have to be made by every rank of the world.
    """
    parts = {p: torch.empty_like(gradient).contiguous() for p in peers}
    parts[dist.get_rank()] = own = gradient.contiguous()
    work = dist.batch_isend_irecv([
        dist.P2POp(*what, p, group) for p in peers
        for what in ((dist.isend, own), (dist.irecv, parts[p]))])
    for w in work:
        w.wait()
    return sum(parts[p] for p in sorted(parts))


def _entering(module, group, sequence, regather):
    def hook(_, arguments):
        return enter(arguments[0], group, sequence, regather), *arguments[1:]
    module.register_forward_pre_hook(hook)


def _sum_gradient(parameter, group):
    """Sum each new gradient of ``parameter`` over ``group``, before it is accumulated."""
    parameter.register_hook(lambda grad: summed(grad, group))


def grad_norm(model, group=None):
    """The 2-norm of all gradients of a ``parallelize``d model, as one process would have it.

    What several ranks hold counts once. A 0-d tensor, the same on all ranks.
    """
    squares = [p.grad.square().sum() / p.copies for p in model.parameters() if p.grad is not None]
    return summed(torch.stack(squares).sum(), group).sqrt()
