"""Kimi Delta Attention (arXiv:2510.26692): linear attention whose channels decay each by itself.

B batch, S sequence, H heads, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import Context
from models.initialization import Constant, LogUniform, Zeros, fan_in, make_parameter
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.layers.linear import Linear, local
from models.layers.norm import RMSNorm
from models.layers.tensor_plan import TensorPlan


class KimiDeltaAttention(nn.Module):
    """The layer as Kimi K3 has it, model width to model width.

    With f = decay x + bias, from a latent, and a rate per head: log decay = bound sigmoid(rate f)
    where there is a lower bound, as in K3, or -rate softplus(f), as in Kimi Linear. A head's output
    is normed and multiplied by sigmoid(gate x).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int,
        decay_rank: int,
        decay_bound: float | None,
        convolution_width: int,
        norm_eps: float,
        output_scale: float,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.decay_bound = decay_bound
        width = num_heads * head_dim
        self.q_proj = Linear(dim, width)
        self.k_proj = Linear(dim, width)
        self.v_proj = Linear(dim, width)
        self.gate_proj = Linear(dim, width)
        self.beta_proj = Linear(dim, num_heads)
        self.decay_proj = nn.Sequential(Linear(dim, decay_rank), Linear(decay_rank, width))
        self.q_convolution = ShortConvolution(width, convolution_width)
        self.k_convolution = ShortConvolution(width, convolution_width)
        self.v_convolution = ShortConvolution(width, convolution_width)
        # Not published for K3: states that forget little to begin with.
        bounded = decay_bound is not None
        self.log_rate = make_parameter(num_heads, init=Zeros() if bounded else LogUniform(1, 16))
        self.decay_bias = make_parameter(width, init=Constant(-4.0))
        self.core = DeltaRuleCore(num_heads, qk_head_dim=head_dim, v_head_dim=head_dim)
        self.norm = RMSNorm(head_dim, norm_eps)
        self.o_proj = Linear(width, dim, init=fan_in(width, scale=output_scale))

    @property
    def tensor_plan(self) -> TensorPlan:
        """Heads are divided; the decays' latent is computed on every rank."""
        names = ("q", "k", "v")
        columns = (*(f"{x}_proj" for x in names), "gate_proj", "beta_proj", "decay_proj.1")
        convolutions = (f"{x}_convolution.weight" for x in names)
        return TensorPlan(
            heads=(self.v_proj.out_features // self.head_dim,),
            columns=columns,
            vectors=(*convolutions, "log_rate", "decay_bias"),
            rows=("o_proj",),
            gather_inputs=("",),
        )

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q = self._heads(self.q_convolution(self.q_proj(x_BSD), context))
        k = self._heads(self.k_convolution(self.k_proj(x_BSD), context))
        v = self._heads(self.v_convolution(self.v_proj(x_BSD), context))
        beta_BSH = torch.sigmoid(self.beta_proj(x_BSD))
        out = self.core(q, k, v, self._log_decay(x_BSD), beta_BSH, context)
        out = self.norm(out) * torch.sigmoid(self._heads(self.gate_proj(x_BSD)))
        return self.o_proj(out.flatten(2))

    def _log_decay(self, x_BSD: Tensor) -> Tensor:
        """(B,S,H,D) float32."""
        rate_H1 = local(self.log_rate).float().exp()[:, None]
        f = self._heads(self.decay_proj(x_BSD).float() + local(self.decay_bias).float())
        if self.decay_bound is None:
            return -rate_H1 * F.softplus(f)
        return self.decay_bound * torch.sigmoid(rate_H1 * f)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def kimi_delta_attention_parameters(
    dim: int, num_heads: int, *, head_dim: int, decay_rank: int, convolution_width: int
) -> int:
    """Parameters of a layer."""
    width = num_heads * head_dim
    matrices = dim * (5 * width + num_heads + decay_rank) + decay_rank * width
    return matrices + 3 * convolution_width * width + num_heads + width + head_dim
