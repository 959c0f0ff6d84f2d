"""The attention core: the one replaceable submodule between the projections of a layer."""

from torch import Tensor, nn

from models.batch import Context
from models.ops.attention import attention, attention_kernel


class AttentionCore(nn.Module):
    """Softmax attention of a layer: q (B,S,H,D), k (B,S,Hkv,D), v (B,S,Hkv,Dv) to (B,S,H,Dv).

    Context parallelism, a key/value cache for decoding and other kernels replace this module; the
    layer around it does not change.
    """

    def __init__(self, *, scale: float, window: int = 0) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.kernel = ""
        """The kernel that served the last forward, for the record."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        self.kernel = attention_kernel(q.device.type, q.dtype, q.shape[-1])
        out, _ = attention(q, k, v, context.positions_BS, self.scale, self.window)
        return out
