"""The vision tower of Qwen3-VL: patches of images to features for the language model.

All images have one grid, so that a batch of them has one shape. Patches stand in the order of the
squares that are merged into one feature, row by row within a square. Rotations are by row and by
column; the table of learned positions is resampled bilinearly to the grid.

I images, P patches of an image, N features of an image (a square of merge x merge patches each),
D tower width, O width of the language model, R rotary pairs.
"""

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import Context
from models.initialization import Normal, make_parameter
from models.layers.linear import Linear
from models.layers.norm import LayerNorm
from models.layers.rotary import rotary_frequencies, rotate_halves
from models.ops.attention import attention
from models.ops.kernels import attention_kernel


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a tower. ValueError where they do not fit together."""

    dim: int = 1152
    num_layers: int = 27
    num_heads: int = 16
    hidden_dim: int = 4304
    out_dim: int
    """Width of the language model."""
    deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """Layers whose output also goes to the language model, to its first layers in turn."""
    patch_size: int = 16
    frames: int = 2
    """Frames of a patch: of an image, copies."""
    merge: int = 2
    """Patches along a side of the square that makes one feature."""
    positions: int = 48
    """Side of the square table of learned positions."""
    grid: tuple[int, int] = (32, 32)
    """Rows and columns of patches of every image."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.dim % (4 * self.num_heads):
            raise ValueError(
                f"{self.num_heads} heads of a tower of width {self.dim}: a head's width must be a "
                "multiple of 4, for pairs that turn by row and pairs that turn by column"
            )
        if any(side % self.merge or side < 1 for side in self.grid):
            raise ValueError(f"a grid of {self.grid} patches has no squares of side {self.merge}")
        if any(not 0 <= layer < self.num_layers for layer in self.deepstack_layers):
            raise ValueError(f"deepstack_layers {self.deepstack_layers} of {self.num_layers}")

    @property
    def patch_width(self) -> int:
        """Values of a patch."""
        return 3 * self.frames * self.patch_size**2

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def num_features(self) -> int:
        """Features of an image, and the tokens that they take the place of."""
        return self.num_patches // self.merge**2

    @property
    def num_parameters(self) -> int:
        """Parameters of the tower."""
        mergers = self._merger(self.dim)
        mergers += len(self.deepstack_layers) * self._merger(self.merge**2 * self.dim)
        return self.positions**2 * self.dim + self._per_patch() + mergers

    def flops_per_image(self) -> int:
        """Forward and backward: 6 per parameter and patch, or merged patch, and attention."""
        mergers = self._merger(self.dim)
        mergers += len(self.deepstack_layers) * self._merger(self.merge**2 * self.dim)
        attention = 2 * self.num_layers * self.dim * self.num_patches
        per_patches = self.num_patches * (self._per_patch() + attention)
        return 6 * (per_patches + self.num_features * mergers)

    def _per_patch(self) -> int:
        """Parameters that work on a patch."""
        dim, hidden = self.dim, self.hidden_dim
        block = 4 * dim * dim + 4 * dim + 2 * dim * hidden + hidden + dim + 4 * dim
        return (self.patch_width + 1) * dim + self.num_layers * block

    def _merger(self, normed: int) -> int:
        width = self.merge**2 * self.dim
        return 2 * normed + (width + 1) * width + (width + 1) * self.out_dim


class VisionBlock(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x), between the patches of an image.

    All patches see all: to the operator they are keys that lie before the queries, see `_context`.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.kernel = ""
        """The kernel of attention that served the last forward, for the record."""
        self.attention_norm = LayerNorm(dim, config.norm_eps)
        self.qkv_proj = Linear(dim, 3 * dim, bias=True)
        self.o_proj = Linear(dim, dim, bias=True)
        self.feed_forward_norm = LayerNorm(dim, config.norm_eps)
        self.up_proj = Linear(dim, config.hidden_dim, bias=True)
        self.down_proj = Linear(config.hidden_dim, dim, bias=True)

    def forward(self, x_IPD: Tensor, context: Context) -> Tensor:
        qkv = self.qkv_proj(self.attention_norm(x_IPD)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(2)
        q, k = rotate_halves(q, context), rotate_halves(k, context)
        self.kernel = attention_kernel(q.device.type, q.dtype, q.shape[-1])
        positions = context.positions_BS.expand(x_IPD.shape[0], -1)
        out, _ = attention(q, k, v, positions, q.shape[-1] ** -0.5, 0)
        x_IPD = x_IPD + self.o_proj(out.flatten(2))
        hidden = F.gelu(self.up_proj(self.feed_forward_norm(x_IPD)), approximate="tanh")
        return x_IPD + self.down_proj(hidden)


class Merger(nn.Module):
    """Squares of patches to features, (I,P,D) to (I,N,O); normed by patch or by square."""

    def __init__(self, config: VisionConfig, *, norm_squares: bool) -> None:
        super().__init__()
        width = config.merge**2 * config.dim
        self.patches = config.merge**2
        self.norm_squares = norm_squares
        self.norm = LayerNorm(width if norm_squares else config.dim, config.norm_eps)
        self.up_proj = Linear(width, width, bias=True)
        self.down_proj = Linear(width, config.out_dim, bias=True)

    def forward(self, x_IPD: Tensor) -> Tensor:
        if not self.norm_squares:
            x_IPD = self.norm(x_IPD)
        squares = x_IPD.unflatten(1, (-1, self.patches)).flatten(2)
        if self.norm_squares:
            squares = self.norm(squares)
        return self.down_proj(F.gelu(self.up_proj(squares)))


class VisionTower(nn.Module):
    """The parameters of a tower and its work on patches; what calls it says which there are."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_proj = Linear(config.patch_width, config.dim, bias=True)
        self.position = make_parameter(config.positions**2, config.dim, init=Normal(0.02))
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.merger = Merger(config, norm_squares=False)
        self.deepstack = nn.ModuleList(
            Merger(config, norm_squares=True) for _ in config.deepstack_layers
        )

    def features(self, patches: Tensor) -> list[Tensor]:
        """Patches (I,P,values) to features (I,N,O): for the embedding, then the first layers."""
        x_IPD = self.patch_proj(patches.to(self.patch_proj.weight.dtype))
        x_IPD = x_IPD + self._positions(x_IPD.device).to(x_IPD.dtype)
        context = self._context(x_IPD.device)
        mergers = dict(zip(self.config.deepstack_layers, self.deepstack, strict=True))
        features = []
        for number, layer in enumerate(self.layers):
            x_IPD = layer(x_IPD, context)
            if number in mergers:
                features.append(mergers[number](x_IPD))
        return [self.merger(x_IPD), *features]

    def _context(self, device: torch.device) -> Context:
        """Rotations of a grid's patches: the first half of the pairs by row, the rest by column.

        The positions are those of a document of all keys and, after them, all queries.
        """
        config = self.config
        half = config.dim // config.num_heads // 2
        frequencies = rotary_frequencies(half, config.rope_theta, None, device)
        rows_P, columns_P = patch_places(config, device)
        angles = torch.cat([place[:, None] * frequencies for place in (rows_P, columns_P)], dim=-1)
        positions = torch.arange(2 * config.num_patches, device=device)
        return Context(positions[None], angles.cos()[None], angles.sin()[None])

    def _positions(self, device: torch.device) -> Tensor:
        """(P,D): the learned table, resampled so that its corners are those of the grid."""
        config = self.config
        taps = [
            _resample(places, side, config.positions)
            for places, side in zip(patch_places(config, device), config.grid, strict=True)
        ]
        (rows, row_weights), (columns, column_weights) = taps
        index_P4 = (rows[:, :, None] * config.positions + columns[:, None]).flatten(1)
        weights_P4 = (row_weights[:, :, None] * column_weights[:, None]).flatten(1)
        vectors = F.embedding(index_P4, self.position)
        return (vectors * weights_P4[..., None].to(vectors.dtype)).sum(1)


def patch_places(config: VisionConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, column) of each patch (P,) int64, squares one after the other."""
    (height, width), merge = config.grid, config.merge
    place = torch.arange(height * width, device=device).view(height, width)
    blocks = place.view(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()
    return blocks // width, blocks % width


def _resample(place_P: Tensor, side: int, source: int) -> tuple[Tensor, Tensor]:
    """(indices (P,2) into a line of `source`, weights (P,2)) of places on a line of `side`."""
    at = place_P.float() * (source - 1) / max(side - 1, 1)
    floor = at.floor()
    index = torch.stack((floor, floor + 1), dim=-1).clamp_max(source - 1)
    return index.long(), torch.stack((1 - (at - floor), at - floor), dim=-1)
