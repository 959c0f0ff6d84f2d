"""Grouped-query attention (arXiv:2305.13245) with what families add: norms, gates, biases, sinks.

B batch, S sequence, H query heads, D head width.
"""

import torch
from torch import Tensor, nn

from models.batch import Context
from models.counts import AttentionLayers
from models.initialization import Zeros, fan_in, make_parameter
from models.layers.attention import AttentionCore
from models.layers.linear import Linear
from models.layers.rotary import rotate_halves
from models.layers.tensor_plan import TensorPlan


class GroupedQueryAttention(nn.Module):
    """Attention of query heads that share key/value heads, model width to model width.

    Queries and keys are normed per head where there is a norm, then rotated unless `rotary` is off.
    Each head's output is normed where there is a norm and, if `gated`, multiplied by
    sigmoid(gate x). `scale` is that of the scores, 1 / sqrt(D) by default.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        output_scale: float,
        window: int = 0,
        rotary: bool = True,
        scale: float = 0.0,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        gated: bool = False,
        bias: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary = rotary
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = Linear(dim, width, bias=bias)
        self.k_proj = Linear(dim, kv_width, bias=bias)
        self.v_proj = Linear(dim, kv_width, bias=bias)
        self.gate_proj = Linear(dim, width) if gated else None
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.core = AttentionCore(
            scale=scale or head_dim**-0.5,
            window=window,
            width=2 * width,
            sinks=make_parameter(num_heads, init=Zeros()) if sinks else None,
        )
        self.output_norm = output_norm
        self.o_proj = Linear(width, dim, init=fan_in(width, scale=output_scale))
        # Not a bias of o_proj: where its rows are divided it is added once, after their sum.
        self.output_bias = make_parameter(dim, init=Zeros()) if bias else None

    @property
    def tensor_plan(self) -> TensorPlan:
        """Heads are divided: query heads and the key/value heads that they share."""
        columns = ["q_proj", "k_proj", "v_proj"]
        vectors = [f"{name}.bias" for name in columns if self.get_submodule(name).bias is not None]
        if self.gate_proj is not None:
            columns.append("gate_proj")
        if self.core.sinks is not None:
            vectors.append("core.sinks")
        projections = (self.q_proj, self.k_proj)
        return TensorPlan(
            heads=tuple(proj.out_features // self.head_dim for proj in projections),
            columns=tuple(columns),
            vectors=tuple(vectors),
            rows=("o_proj",),
            gather_inputs=("",),
        )

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q, k, v = (self._heads(proj(x_BSD)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _apply(self.query_norm, q), _apply(self.key_norm, k)
        if self.rotary:
            q, k = rotate_halves(q, context), rotate_halves(k, context)
        out = _apply(self.output_norm, self.core.mix(q, (k, v), context)).flatten(2)
        if self.gate_proj is not None:
            out = out * torch.sigmoid(self.gate_proj(x_BSD))
        out = self.o_proj(out)
        return out if self.output_bias is None else out + self.output_bias

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError for heads that do not share evenly or cannot be rotated in pairs."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not share {num_kv_heads} key/value heads")
    if head_dim % 2:
        raise ValueError(f"head_dim is rotated in pairs: {head_dim} is odd")


def gqa_parameters(
    dim: int,
    num_heads: int,
    *,
    num_kv_heads: int,
    head_dim: int,
    normed: bool = False,
    gated: bool = False,
    bias: bool = False,
    sinks: bool = False,
) -> int:
    """Parameters of a layer; `normed`: queries and keys with a gain for each width of a head."""
    width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    matrices = dim * ((3 if gated else 2) * width + 2 * kv_width)
    biases = width + 2 * kv_width + dim if bias else 0
    return matrices + biases + (2 * head_dim if normed else 0) + (num_heads if sinks else 0)


def gqa_layers(
    num_heads: int, head_dim: int, *, num_full: int, num_windowed: int = 0, window: int = 0
) -> list[AttentionLayers]:
    """What the FLOPs of layers come from: those with full attention, then those with a window."""
    full = AttentionLayers(
        num_layers=num_full, num_heads=num_heads, qk_head_dim=head_dim, v_head_dim=head_dim
    )
    windowed = AttentionLayers(
        num_layers=num_windowed,
        num_heads=num_heads,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        window=window,
    )
    return [full, windowed] if num_windowed else [full]
