"""What layers of linear attention share: the core, the short convolution, the output's gated norm.

B batch, S sequence, C channels, H value heads, Hk heads of queries and keys, D their width, Dv that
of values, G log decays of a token and head (D or 1).
"""

from torch import Tensor, nn

from models.batch import Context
from models.initialization import fan_in, make_parameter
from models.layers.linear import local
from models.ops.delta_rule import Inputs, delta_rule, kernel_of
from models.ops.short_convolution import short_convolution


class DeltaRuleCore(nn.Module):
    """The gated delta rule of a layer; see `models.ops.delta_rule`.

    Context parallelism and decoding replace the forward: they hand the operator the state that
    other ranks or the last token have left.
    """

    def __init__(self, num_heads: int, *, qk_head_dim: int, v_head_dim: int) -> None:
        super().__init__()
        self.scale = qk_head_dim**-0.5
        self.flops_per_token = 2 * 4 * num_heads * qk_head_dim * v_head_dim
        """Of a forward pass, at any length of the sequence."""
        self.kernel = ""
        """The kernel that served the last forward, for the record."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, context: Context
    ) -> Tensor:
        """(B,S,H,Dv) from q, k (B,S,Hk,D), v (B,S,H,Dv), log_decay (B,S,H,G), beta (B,S,H)."""
        out, _, _ = delta_rule(self.inputs(q, k, v, log_decay, beta, context.positions_BS), None)
        return out

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, positions_BS: Tensor
    ) -> Inputs:
        """What the operator takes; `kernel` names what serves it from here on."""
        inputs = Inputs(q, k, v, log_decay, beta, positions_BS, self.scale)
        self.kernel = kernel_of(inputs)
        return inputs


class ShortConvolution(nn.Module):
    """silu(causal convolution) of each channel within its document, (B,S,C) to (B,S,C).

    Where ranks hold parts of a sequence, `short_convolution` with the tokens before them replaces
    the forward.
    """

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = make_parameter(num_channels, width, init=fan_in(width))

    def forward(self, x_BSC: Tensor, context: Context) -> Tensor:
        return short_convolution(x_BSC, local(self.weight), context.positions_BS, None)
