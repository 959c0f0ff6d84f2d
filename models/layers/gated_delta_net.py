"""Gated DeltaNet (arXiv:2412.06464): linear attention whose state has one decay per head and token.

B batch, S sequence, H value heads, Hk heads of queries and keys, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import Context
from models.initialization import LogUniform, Ones, fan_in, make_parameter
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.layers.linear import Linear, local
from models.layers.norm import RMSNorm
from models.layers.tensor_plan import TensorPlan


class GatedDeltaNet(nn.Module):
    """The layer as Qwen3.5 has it, model width to model width.

    decay = exp(A) softplus(decay x + bias), beta = sigmoid(beta x). Each query and key head serves
    H / Hk value heads in a row. A head's output is normed and multiplied by silu(gate x).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_qk_heads: int,
        head_dim: int,
        convolution_width: int,
        norm_eps: float,
        output_scale: float,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        qk_width, width = num_qk_heads * head_dim, num_heads * head_dim
        self.q_proj = Linear(dim, qk_width)
        self.k_proj = Linear(dim, qk_width)
        self.v_proj = Linear(dim, width)
        self.gate_proj = Linear(dim, width)
        self.beta_proj = Linear(dim, num_heads)
        self.decay_proj = Linear(dim, num_heads)
        self.q_convolution = ShortConvolution(qk_width, convolution_width)
        self.k_convolution = ShortConvolution(qk_width, convolution_width)
        self.v_convolution = ShortConvolution(width, convolution_width)
        # Decays of 0.01 to 16 times softplus(1) to begin with, as in the reference.
        self.log_rate = make_parameter(num_heads, init=LogUniform(0.01, 16.0))
        self.decay_bias = make_parameter(num_heads, init=Ones())
        self.core = DeltaRuleCore(num_heads, qk_head_dim=head_dim, v_head_dim=head_dim)
        self.norm = RMSNorm(head_dim, norm_eps)
        self.o_proj = Linear(width, dim, init=fan_in(width, scale=output_scale))

    @property
    def tensor_plan(self) -> TensorPlan:
        """Heads are divided: value heads and the query and key heads that serve them."""
        convolutions = ("q_convolution", "k_convolution", "v_convolution")
        widths = (self.q_proj.out_features, self.v_proj.out_features)
        return TensorPlan(
            heads=tuple(width // self.head_dim for width in widths),
            columns=("q_proj", "k_proj", "v_proj", "gate_proj", "beta_proj", "decay_proj"),
            vectors=(*(f"{name}.weight" for name in convolutions), "log_rate", "decay_bias"),
            rows=("o_proj",),
            gather_inputs=("",),
        )

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q = self._heads(self.q_convolution(self.q_proj(x_BSD), context))
        k = self._heads(self.k_convolution(self.k_proj(x_BSD), context))
        v = self._heads(self.v_convolution(self.v_proj(x_BSD), context))
        beta_BSH = torch.sigmoid(self.beta_proj(x_BSD))
        out = self.core(q, k, v, self._log_decay(x_BSD)[..., None], beta_BSH, context)
        out = self.norm(out) * F.silu(self._heads(self.gate_proj(x_BSD)))
        return self.o_proj(out.flatten(2))

    def _log_decay(self, x_BSD: Tensor) -> Tensor:
        """(B,S,H) float32."""
        rate_H, bias_H = local(self.log_rate).float().exp(), local(self.decay_bias).float()
        return -rate_H * F.softplus(self.decay_proj(x_BSD).float() + bias_H)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def gated_delta_net_parameters(
    dim: int, num_heads: int, *, num_qk_heads: int, head_dim: int, convolution_width: int
) -> int:
    """Parameters of a layer."""
    qk_width, width = num_qk_heads * head_dim, num_heads * head_dim
    matrices = dim * (2 * qk_width + 3 * width + 2 * num_heads)
    return matrices + convolution_width * (2 * qk_width + width) + 2 * num_heads + head_dim
