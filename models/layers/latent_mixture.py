"""Experts of Kimi K3: they work in a latent space, beside a shared one at the model's width.

E experts, K experts per token.
"""

from functools import partial

import msgspec
from torch import nn

from models.initialization import fan_in
from models.layers.feed_forward import FeedForward
from models.layers.linear import Linear
from models.layers.moe import GroupedExperts, MoE
from models.layers.norm import RMSNorm
from models.layers.router import Router, RouterConfig
from models.layers.situ import situ_glu


class LatentMixtureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one layer's experts."""

    dim: int
    latent_dim: int
    """Width at which the routed experts work."""
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    """Merged into one of their summed width, at the model's width."""
    gate_bound: float
    up_bound: float
    norm_eps: float

    def router(self) -> RouterConfig:
        """The router."""
        return RouterConfig(
            num_experts=self.num_experts, num_experts_per_token=self.num_experts_per_token
        )

    def parameters(self) -> tuple[int, int]:
        """All, and those that work on one token."""
        latent = 2 * self.dim * self.latent_dim + self.latent_dim
        shared = 3 * self.dim * self.num_shared_experts * self.expert_hidden_dim
        common = self.dim * self.num_experts + latent + shared
        expert = 3 * self.latent_dim * self.expert_hidden_dim
        return common + self.num_experts * expert, common + self.num_experts_per_token * expert

    def dense(self, hidden_dim: int, output_scale: float) -> FeedForward:
        """A feed-forward layer with the experts' activation, at the model's width."""
        return FeedForward(
            self.dim, hidden_dim, output_scale=output_scale, activation=self._activation()
        )

    def build(self, routing: str, output_scale: float) -> MoE:
        """The layer."""
        dim, latent, hidden = self.dim, self.latent_dim, self.expert_hidden_dim
        up_proj = Linear(latent, dim, init=fan_in(latent, scale=output_scale))
        return MoE(
            Router(dim, self.router(), routing=routing, init=fan_in(dim)),
            GroupedExperts(self.num_experts, latent, hidden, activation=self._activation()),
            shared=self.dense(self.num_shared_experts * hidden, output_scale),
            entry=Linear(dim, latent),
            exit=nn.Sequential(RMSNorm(latent, self.norm_eps), up_proj),
        )

    def _activation(self) -> partial:
        return partial(situ_glu, gate_bound=self.gate_bound, up_bound=self.up_bound)
