"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from one latent.

B batch, S sequence, H heads, D model width.
"""

import torch
from torch import Tensor, nn

from models.batch import Context
from models.initialization import fan_in
from models.layers.attention import AttentionCore, Expansion
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.rotary import rotate_adjacent
from models.layers.tensor_plan import TensorPlan


class MultiHeadLatentAttention(nn.Module):
    """Queries (from a latent if q_lora_rank > 0) and keys, whose rotated part all heads share.

    Without `rotary` that part stays as it is; `gated`: the output is multiplied by sigmoid(gate x).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        norm_eps: float,
        scale: float,
        output_scale: float,
        rotary: bool = True,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.kv_split = [kv_lora_rank, qk_rope_head_dim]
        self.qk_split = [qk_nope_head_dim, qk_rope_head_dim]
        self.head_split = [qk_nope_head_dim, v_head_dim]
        q_dim = num_heads * sum(self.qk_split)
        self.q_proj: nn.Module
        if q_lora_rank:
            self.q_proj = nn.Sequential(
                Linear(dim, q_lora_rank), RMSNorm(q_lora_rank, norm_eps), Linear(q_lora_rank, q_dim)
            )
        else:
            self.q_proj = Linear(dim, q_dim)
        self.kv_down_proj = Linear(dim, sum(self.kv_split))
        self.kv_norm = RMSNorm(kv_lora_rank, norm_eps)
        self.kv_up_proj = Linear(kv_lora_rank, num_heads * sum(self.head_split))
        width = num_heads * (sum(self.qk_split) + v_head_dim)
        self.core = AttentionCore(scale=scale, width=width)
        v_dim = num_heads * v_head_dim
        self.gate_proj = Linear(dim, v_dim) if gated else None
        self.o_proj = Linear(v_dim, dim, init=fan_in(v_dim, scale=output_scale))

    @property
    def tensor_plan(self) -> TensorPlan:
        """Heads are divided; between ranks travel the latents, not what they are made from."""
        q_up = "q_proj.2" if isinstance(self.q_proj, nn.Sequential) else "q_proj"
        gate = () if self.gate_proj is None else ("gate_proj",)
        return TensorPlan(
            heads=(self.kv_up_proj.out_features // sum(self.head_split),),
            columns=(q_up, "kv_up_proj", *gate),
            rows=("o_proj",),
            gather_inputs=(q_up, *gate),
            gather_outputs=("kv_down_proj",),
        )

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_nope, q_rope = self._heads(self.q_proj(x_BSD), self.qk_split)
        latent, k_rope = self.kv_down_proj(x_BSD).split(self.kv_split, dim=-1)
        sources = self.kv_norm(latent), self._rotate(k_rope[:, :, None], context)
        q = _join(q_nope, self._rotate(q_rope, context))
        expansion = Expansion(self.kv_up_proj, self.keys_and_values)
        out = self.core.mix(q, sources, context, expansion).flatten(2)
        if self.gate_proj is not None:
            out = out * torch.sigmoid(self.gate_proj(x_BSD))
        return self.o_proj(out)

    def keys_and_values(self, up: Tensor, k_rope_BS1R: Tensor) -> tuple[Tensor, Tensor]:
        """Split what a latent expands to; all heads' keys end in the same rotated part."""
        k_nope, v = self._heads(up, self.head_split)
        return _join(k_nope, k_rope_BS1R.expand(-1, -1, k_nope.shape[2], -1)), v

    def _rotate(self, x_BSHD: Tensor, context: Context) -> Tensor:
        return rotate_adjacent(x_BSHD, context) if self.rotary else x_BSHD

    def _heads(self, x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)


def _join(nope_BSHD: Tensor, rope_BSHD: Tensor) -> Tensor:
    """The two parts of a head beside each other, laid out head by head as products read them."""
    parts = (nope_BSHD.transpose(1, 2), rope_BSHD.transpose(1, 2))
    return torch.cat(parts, dim=-1).transpose(1, 2)


def mla_parameters(
    dim: int,
    num_heads: int,
    *,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    gated: bool = False,
) -> int:
    """Parameters of a layer."""
    queries = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
    values = num_heads * v_head_dim
    q = q_lora_rank * (dim + 1 + queries) if q_lora_rank else dim * queries
    kv_down = dim * (kv_lora_rank + qk_rope_head_dim) + kv_lora_rank
    kv_up = kv_lora_rank * (num_heads * qk_nope_head_dim + values)
    return q + kv_down + kv_up + (2 if gated else 1) * values * dim
