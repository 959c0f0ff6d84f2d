"""Grouped-query attention (arXiv:2305.13245) with normed queries and keys and a gated output.

B batch, S sequence, H query heads, D head width.
"""

import torch
from torch import Tensor, nn

from models.batch import Context
from models.initialization import fan_in
from models.layers.attention import AttentionCore
from models.layers.linear import Linear
from models.layers.norm import rms_norm
from models.layers.rotary import rotate_halves
from models.layers.tensor_plan import TensorPlan


class GroupedQueryAttention(nn.Module):
    """Attention of Muse Spark, model width to model width.

    Queries and keys are normed per head without a gain, queries then scaled by `query_scale`, both
    rotated unless `rotary` is off. Each head's output is normed and gated by sigmoid(gate x).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        rotary: bool,
        query_scale: float,
        norm_eps: float,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary = rotary
        self.query_scale = query_scale
        self.norm_eps = norm_eps
        width = num_heads * head_dim
        self.q_proj = Linear(dim, width)
        self.k_proj = Linear(dim, num_kv_heads * head_dim)
        self.v_proj = Linear(dim, num_kv_heads * head_dim)
        self.gate_proj = Linear(dim, width)
        self.core = AttentionCore(scale=head_dim**-0.5, window=window, width=2 * width)
        self.o_proj = Linear(width, dim, init=fan_in(width, scale=output_scale))

    @property
    def tensor_plan(self) -> TensorPlan:
        """Heads are divided: query heads and the key/value heads that they share."""
        return TensorPlan(
            columns=("q_proj", "k_proj", "v_proj", "gate_proj"),
            rows=("o_proj",),
            gather_inputs=("",),
        )

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q, k, v = (self._heads(proj(x_BSD)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = rms_norm(q, self.norm_eps) * self.query_scale
        k = rms_norm(k, self.norm_eps)
        if self.rotary:
            q, k = rotate_halves(q, context), rotate_halves(k, context)
        k, v = self.core.exchange(k, v)
        out = rms_norm(self.core(q, k, v, context), self.norm_eps).flatten(2)
        return self.o_proj(out * torch.sigmoid(self.gate_proj(x_BSD)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))
