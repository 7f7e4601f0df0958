"""A mixture-of-experts layer, on one process and with its experts spread over ranks.

    from companion.experts import ExpertParallel, MoE
    whole = MoE(width=64, hidden=128, experts=8, k=2)
    mine = ExpertParallel(whole)      # on every rank: the router, and 8 / n of the experts
    y = mine(x)                       # x: this rank's tokens

Each token goes to its k best experts. Tokens travel there and back by all-to-all. With a
``capacity``, an expert takes that many tokens of each rank and drops the rest, which then pass
the layer unchanged through the residual around it.

Letters: T tokens of a rank, D width, F hidden width, E experts, k experts a token, S slots (a
slot is one token at one expert: T * k of them if none is dropped), n ranks.

Limits: experts are computed one after the other; n divides E.
Sources: Lepikhin et al. 2020, arXiv:2006.16668 (dispatch, capacity); Fedus et al. 2021,
arXiv:2101.03961 (balance loss); Wang et al. 2024, arXiv:2408.15664 (bias instead of a loss).
Taught in: chapters/context_expert_parallel.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .ring_attention import all_to_all

__all__ = ["Experts", "ExpertParallel", "MoE", "balance_loss", "fits", "load", "moved_bias",
           "route"]


# ---------------------------------------------------------------- who goes where

def route(logits, k, bias=None):
    """Choose k experts for each token: (chosen [T, k] int64, weights [T, k], shares [T, E]).

    logits: [T, E]; bias: [E] or None, added for the choice alone. ``shares`` is the softmax;
    ``weights`` are the shares of the chosen, made to add up to 1.
    """
    shares = logits.softmax(-1)
    chosen = (shares if bias is None else shares + bias).topk(k, -1).indices
    weights = shares.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True), shares


def load(chosen, experts):
    """How many slots each expert gets: [E] int64."""
    return torch.bincount(chosen.flatten(), minlength=experts)


def fits(chosen, experts, capacity):
    """Which slots find room: [T, k] bool. At most ``capacity`` an expert.

    First choices are seated before second ones, and among these earlier tokens before later.
    """
    seats = F.one_hot(chosen.T.flatten(), experts).cumsum(0)  # [k T, E], first choices first
    seat = seats.gather(1, chosen.T.flatten()[:, None]).view(chosen.T.shape)
    return (seat <= capacity).T


def balance_loss(shares, part):
    """Switch's loss: E * sum of (part of slots) * (mean share); 1 if either is even.

    shares: [T, E], the softmax, through which the gradient goes; part: [E], each expert's part
    of the slots of the *whole* batch (over all ranks), adding up to 1.
    """
    return shares.shape[-1] * (part.detach() * shares.mean(0)).sum()


def moved_bias(bias, load, rate):
    """The next bias [E]: up by ``rate`` where the load [E] is below its mean, down above."""
    load = load.to(bias.dtype)
    return bias + rate * (load.mean() - load).sign()


# ---------------------------------------------------------------- the layer

class Experts(nn.Module):
    """E SwiGLU networks D -> F -> D."""

    def __init__(self, experts, width, hidden):
        super().__init__()
        def weights(a, b):
            return nn.Parameter(torch.randn(experts, a, b) * a ** -0.5)
        self.gate, self.up = weights(width, hidden), weights(width, hidden)
        self.down = weights(hidden, width)

    def forward(self, x_SD, counts):
        """x_SD: slots, sorted by expert; counts: how many each expert gets, a list."""
        outs = [(F.silu(x @ self.gate[e]) * (x @ self.up[e])) @ self.down[e]
                for e, x in enumerate(x_SD.split(counts))]
        return torch.cat(outs)


class MoE(nn.Module):
    """Router and experts on one process: [T, D] -> [T, D].

    capacity: most tokens of one rank that an expert takes, or None to drop none. To compute
    what n ranks compute together, call it on each rank's tokens.
    ``seen`` is what the last call chose: (chosen [T, k], shares [T, E], kept [T, k]).
    """

    def __init__(self, width, hidden, experts, k, capacity=None):
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(f"MoE: k must be 1 to {experts} experts, got {k!r}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"MoE: capacity must be at least 1, got {capacity!r}")
        self.count, self.k, self.capacity = experts, k, capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x_TD):
        chosen, weights, shares = route(self.router(x_TD), self.k, self.bias)
        kept = torch.ones_like(chosen, dtype=torch.bool)
        if self.capacity is not None:
            kept = fits(chosen, self.count, self.capacity)
        self.seen = chosen, shares, kept
        token, choice = kept.nonzero(as_tuple=True)
        order = chosen[kept].argsort(stable=True)  # slots of expert 0 first
        token, choice = token[order], choice[order]
        counts = load(chosen[kept], self.count)
        y_SD = self.run(x_TD[token], counts)
        weighted = y_SD * weights[token, choice][:, None]
        return torch.zeros_like(x_TD).index_add(0, token, weighted.to(x_TD.dtype))

    def run(self, x_SD, counts):
        """The experts' outputs for slots sorted by expert; counts: [E]."""
        return self.experts(x_SD, counts.tolist())


class ExpertParallel(MoE):
    """``whole`` with its experts spread over the ranks of ``group``: rank r keeps the r-th
    part of them, and a copy of the router.

    Sends D numbers for each of its slots whose expert lives elsewhere, D for each slot of
    others that it answers, and counts (8 (n - 1) / n * E bytes); backward the same but counts.
    Every rank must call it, and its backward, even with no tokens: if one rank's input needs
    no gradient, neither may the others', or they wait for it. Raises ValueError if the
    ranks do not divide the experts.
    """

    def __init__(self, whole, group=None):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        if whole.count % n:
            raise ValueError(f"ExpertParallel: {n} ranks do not divide {whole.count} experts")
        nn.Module.__init__(self)
        self.count, self.k, self.capacity = whole.count, whole.k, whole.capacity
        self.group, self.ranks, self.here = group, n, whole.count // n
        router = whole.router.weight.detach()
        self.router = nn.Linear(router.shape[1], self.count, bias=False, device=router.device,
                                dtype=router.dtype)
        self.router.weight.data.copy_(router)
        self.register_buffer("bias", whole.bias.clone())
        self.experts = Experts(0, 1, 1)  # empty: its weights follow
        for name, p in whole.experts.named_parameters():
            mine = p.detach().chunk(n)[rank].clone()
            setattr(self.experts, name, nn.Parameter(mine))

    def run(self, x_SD, counts):
        """As ``MoE.run``, where the experts are: two all-to-alls around it."""
        theirs = torch.empty_like(counts)  # [n * here]: slots from rank s for my expert e
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = theirs.view(self.ranks, -1).sum(1).tolist()
        got = all_to_all(x_SD, received, sent, self.group)
        # They arrive sorted by rank, then by expert; the experts want them by expert.
        expert = torch.arange(self.here, device=counts.device).repeat(self.ranks)
        order = expert.repeat_interleave(theirs).argsort(stable=True)
        y = self.experts(got[order], theirs.view(self.ranks, -1).sum(0).tolist())
        back = torch.empty_like(y).index_copy(0, order, y)
        return all_to_all(back, sent, received, self.group)
