"""The router of a mixture of experts: which experts a token visits, and with what weight.

Balance without an auxiliary loss (arXiv:2408.15664): a bias per expert takes part in the choice
only, and moves after each step against the load. Group-limited choice as in DeepSeek-V3
(arXiv:2412.19437, section 2.1.2).

T tokens, D width, E experts, K experts per token, G groups of experts.
"""

import math
from typing import Literal, NamedTuple, get_args

import msgspec
import torch
import torch.nn.functional as F
import torch_remat as remat
from torch import Tensor, nn

from models.initialization import Init, Zeros, make_parameter

Routing = Literal["learned", "balanced", "balanced_strided", "random"]
"""How experts are chosen: by score; in turn, which loads all alike; in turn by strides, which also
sends a token to experts that are far apart; or by a fixed hash."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a router computes."""

    num_experts: int
    num_experts_per_token: int
    score_function: Literal["sigmoid", "softmax", "sqrt_softplus"] = "sigmoid"
    num_groups: int = 1
    num_limited_groups: int = 1
    """Groups that a token's experts may come from."""
    num_group_votes: int = 2
    """Best experts of a group whose sum says how good the group is."""
    normalize_weights: bool = True
    normalize_eps: float = 1e-20
    weight_scale: float = 1.0
    logit_scale: float = 1.0
    bias: bool = False
    """Whether the logits have a bias that is learned, beside the one that balances."""
    hashed: bool = False
    """Whether a token's id alone chooses its experts (arXiv:2106.04426), not their scores."""

    def __post_init__(self) -> None:
        E, K, G = self.num_experts, self.num_experts_per_token, self.num_groups
        if E % G:
            raise ValueError(f"{E} experts do not divide into {G} groups")
        if not 1 <= self.num_limited_groups <= G:
            raise ValueError(f"{self.num_limited_groups} limited groups out of {G} groups")
        if not 1 <= self.num_group_votes <= E:
            raise ValueError(f"a group judged by its {self.num_group_votes} best experts of {E}")
        if not 1 <= K <= self.num_limited_groups * (E // G):
            raise ValueError(
                f"{K} experts per token out of the {self.num_limited_groups * (E // G)} experts "
                f"in {self.num_limited_groups} of {G} groups"
            )


class Routes(NamedTuple):
    """Where each token goes."""

    weights_TK: Tensor
    """float32."""
    experts_TK: Tensor
    """int64."""


class Router(nn.Module):
    """Scores in float32, experts by score plus bias, weights by score alone."""

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, dim: int, config: RouterConfig, *, routing: str, init: Init) -> None:
        super().__init__()
        if routing not in get_args(Routing):
            raise ValueError(f"routing is one of {', '.join(get_args(Routing))}, not {routing!r}")
        self.config = config
        self.routing = routing
        self.weight = make_parameter(config.num_experts, dim, init=init)
        self.bias = make_parameter(config.num_experts, init=Zeros()) if config.bias else None
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.register_buffer(
            "tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.int64)
        )

    def forward(self, x_TD: Tensor, tokens_T: Tensor | None = None) -> Routes:
        """Routes of the tokens; adds their number to `tokens_per_expert` while training.

        A hashed router needs the ids of the tokens.
        """
        config = self.config
        bias_E = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(x_TD.float(), self.weight.float(), bias_E)
        if config.logit_scale != 1.0:
            logits_TE = logits_TE * config.logit_scale
        scores_TE = _score(logits_TE, config.score_function)
        experts_TK = self._choose(scores_TE.detach(), tokens_T)
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.normalize_weights:
            total = weights_TK.sum(dim=-1, keepdim=True)
            weights_TK = weights_TK / (total + config.normalize_eps)
        if config.weight_scale != 1.0:
            weights_TK = weights_TK * config.weight_scale
        self._count(experts_TK)
        return Routes(weights_TK, experts_TK)

    @torch.no_grad()
    def update_bias(self, tokens_per_expert: Tensor, coefficient: float) -> None:
        """Move the bias of each expert by `coefficient` against its load, and centre the moves.

        `tokens_per_expert` (E,) holds the counts of a step, summed over all ranks.
        """
        counts = tokens_per_expert.float()
        moves = torch.sign(counts.mean() - counts) * coefficient
        self.expert_bias.add_(moves - moves.mean())

    def _choose(self, scores_TE: Tensor, tokens_T: Tensor | None) -> Tensor:
        T, E = scores_TE.shape
        K = self.config.num_experts_per_token
        if self.routing in ("balanced", "balanced_strided"):
            stride = 1 if self.routing == "balanced" else spreading_stride(E, K)
            turns = torch.arange(T * K, device=scores_TE.device)
            return (turns * stride).remainder(E).view(T, K)
        if self.routing == "random":
            return _hash_scores(T, E, scores_TE.device).topk(K, dim=-1, sorted=False).indices
        if self.config.hashed:
            assert tokens_T is not None, "a hashed router needs token ids"
            return hashed_experts(tokens_T, E, K)
        preferences_TE = self._limit_to_groups(scores_TE + self.expert_bias)
        return preferences_TE.topk(K, dim=-1, sorted=False).indices

    def _limit_to_groups(self, preferences_TE: Tensor) -> Tensor:
        """Minus infinity outside the groups whose best experts have the largest sum."""
        config = self.config
        if config.num_limited_groups == config.num_groups:
            return preferences_TE
        grouped_TGE = preferences_TE.unflatten(1, (config.num_groups, -1))
        votes = min(config.num_group_votes, grouped_TGE.shape[-1])
        group_scores_TG = grouped_TGE.topk(votes, dim=-1).values.sum(-1)
        kept = group_scores_TG.topk(config.num_limited_groups, dim=-1, sorted=False).indices
        excluded_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, False)
        return grouped_TGE.masked_fill(excluded_TG[..., None], float("-inf")).flatten(1)

    def _count(self, experts_TK: Tensor) -> None:
        # A recomputed forward has been counted already; a compiled one is never replayed.
        recomputing = not torch.compiler.is_compiling() and remat.is_recomputing()
        if self.training and not recomputing:
            ones = torch.ones_like(experts_TK).flatten()
            self.tokens_per_expert.scatter_add_(0, experts_TK.flatten(), ones)


def hashed_experts(tokens_T: Tensor, E: int, K: int) -> Tensor:
    """(T,K) the experts of each token id: K different ones, the first of them by a hash.

    In place of the table of a released checkpoint, which this repository does not have.
    """
    first_T1 = (_scramble(tokens_T) % E)[:, None]
    turns_K = torch.arange(K, device=tokens_T.device) * spreading_stride(E, K)
    return (first_T1 + turns_K) % E


def spreading_stride(E: int, K: int) -> int:
    """The step between the K experts of a token that spreads them over all E, at least E / K.

    It has no factor in common with E, so that E turns visit every expert once.
    """
    return next(step for step in range(-(-E // K), 2 * E + 1) if math.gcd(step, E) == 1)


def _hash_scores(T: int, E: int, device: torch.device) -> Tensor:
    """(T,E) int64 that look random and are the same in every step, rank and recomputation."""
    return _scramble(torch.arange(T * E, device=device)).view(T, E)


def _scramble(x: Tensor) -> Tensor:
    """int64 below 2^32 that look random, different for different x below 2^32."""
    for shift, factor in ((16, 0x9E3779B1), (13, 0x85EBCA6B), (16, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def _score(logits: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if function == "sigmoid" else F.softplus(logits).sqrt()
