"""Qwen3-VL: Qwen3 with a vision tower, positions on three axes, and DeepStack.

A workload's data are text, so images are synthetic and take the place of some of it: every complete
block of `image_interval` tokens of a document begins with an image, whose features stand where its
first tokens' embeddings would. Its pixels are noise from the id of its first token, so they say
nothing of what follows, and packed documents have the images that they have apart. Targets stay
those of the text. With interval 0, as in the presets, there are no images and the tower is idle.

Features of three layers of the tower are added to the stream after the first three layers.

B batch, S sequence, D model width, C blocks of a row, N features (and tokens) of an image.
"""

from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from models.batch import Context
from models.counts import FlopsLedger, FlopsTerm, ParameterCounts
from models.decoder import Decoder, Rotary
from models.layers.rotary import interleaved_context
from models.layers.vision import VisionConfig, VisionTower
from models.protocol import NamedBlock, State
from models.qwen3 import (
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN3_235B_A22B,
    QWEN3_DENSE_PROXY,
    QWEN3_PROXY,
    Qwen3Config,
    qwen3_block,
)


class Qwen3VLConfig(Qwen3Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Qwen3-VL network. ValueError where they do not fit together."""

    rope_theta: float = 5_000_000.0
    rope_sections: tuple[int, int, int] = (24, 20, 20)
    """Rotary pairs that turn by time, row and column."""
    vision: VisionConfig
    image_interval: int = 0
    """Tokens from the start of one image to that of the next; 0 for no images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        vision, interval = self.vision, self.image_interval
        if vision.out_dim != self.dim:
            raise ValueError(f"features of width {vision.out_dim} for a model of {self.dim}")
        if len(vision.deepstack_layers) > self.num_layers:
            raise ValueError(
                f"{self.num_layers} layers do not take {len(vision.deepstack_layers)} features"
            )
        if 2 * sum(self.rope_sections) != self.head_dim:
            raise ValueError(f"rope_sections {self.rope_sections} for heads of {self.head_dim}")
        if interval and interval < vision.num_features:
            raise ValueError(f"an image of {vision.num_features} tokens every {interval} tokens")

    def build(self, routing: str = "learned") -> "Qwen3VL":
        """The network on the default device, without values."""
        return Qwen3VL(self, routing)

    def counts(self) -> ParameterCounts:
        """Exact parameter counts; the tower is in no active count, for it works on no token."""
        return structs.replace(super().counts(), vision=self.vision.num_parameters)

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token; the tower's spread over the tokens.

        As many images as a sequence of one document has.
        """
        ledger = super().flops_per_token(sequence_length)
        if not self.image_interval:
            return ledger
        num_images = sequence_length // self.image_interval
        flops = num_images * self.vision.flops_per_image() // sequence_length
        terms = ledger.terms | {"vision": FlopsTerm(full=flops, causal=flops)}
        return structs.replace(ledger, terms=terms)


class Images(NamedTuple):
    """Where images stand in a batch; shapes depend on that of the batch alone."""

    mask_BS: Tensor
    """bool: an image's feature stands here."""
    axes_ABS: Tensor
    """int64 positions on the axes of time, row and column."""
    starts_BC: Tensor
    """int64 first token of each image; of a block that is none, 0."""
    valid_BC: Tensor
    """bool: there is such a block."""

    def add(self, x_BSD: Tensor, features: Tensor) -> Tensor:
        """x plus the features (B C,N,D) at their tokens."""
        B, S, _ = x_BSD.shape
        N = features.shape[1]
        features = features * self.valid_BC.flatten()[:, None, None]
        tokens_BCN = self.starts_BC[..., None] + torch.arange(N, device=x_BSD.device)
        tokens_BCN = tokens_BCN + S * torch.arange(B, device=x_BSD.device)[:, None, None]
        x_TD = x_BSD.flatten(0, 1).index_add(0, tokens_BCN.flatten(), features.flatten(0, 1))
        return x_TD.view_as(x_BSD)


def place_images(positions_BS: Tensor, interval: int, vision: VisionConfig) -> Images:
    """The images of packed documents.

    An image counts as many positions as its longer side has features, as in the reference.
    """
    B, S = positions_BS.shape
    N, (rows, columns) = vision.num_features, (side // vision.merge for side in vision.grid)
    block, place = positions_BS // interval, positions_BS % interval
    ends = torch.arange(S, device=positions_BS.device) + interval - 1 - place
    last = positions_BS.gather(1, ends.clamp_max(S - 1))
    complete = (ends < S) & (last == positions_BS + interval - 1 - place)
    mask_BS = complete & (place < N)
    saved = N - max(rows, columns)
    base = positions_BS - block * saved
    text = base - saved * (complete & (place >= N))
    start = base - place
    image = torch.stack((start, start + place // columns, start + place % columns))
    closed_BS = (complete & (place == interval - 1)).cumsum(1)
    number_BC = torch.arange(1, S // interval + 1, device=positions_BS.device).expand(B, -1)
    ends_BC = torch.searchsorted(closed_BS, number_BC.contiguous())
    valid_BC = ends_BC < S
    starts_BC = (ends_BC + 1 - interval) * valid_BC
    return Images(mask_BS, torch.where(mask_BS, image, text), starts_BC, valid_BC)


def synthetic_patches(seeds_I: Tensor, vision: VisionConfig) -> Tensor:
    """(I, patches, values) float32 noise, uniform from -1 to 1: the same for the same seed."""
    size = vision.num_patches * vision.patch_width
    x = seeds_I[:, None] * 0x9E3779B1 + torch.arange(size, device=seeds_I.device)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = ((x & 0xFFFFFFFF) * factor) & 0xFFFFFFFF
        x = x ^ (x >> 15)
    return (x.float() / 2**31 - 1).view(-1, vision.num_patches, vision.patch_width)


class Qwen3VL(Decoder):
    """The language model with its tower; see models.protocol."""

    indivisible = "an image's features are needed in several layers of a whole sequence"

    def __init__(self, config: Qwen3VLConfig, routing: str = "learned") -> None:
        super().__init__(
            config,
            (qwen3_block(config, routing) for _ in range(config.num_layers)),
            rotary=Rotary(config.head_dim, config.rope_theta),
            tied=config.tied,
        )
        self.vl = config
        self.vision = VisionTower(config.vision)

    def blocks(self) -> list[NamedBlock]:
        """The tower's layers and then the language model's."""
        layers = enumerate(self.vision.layers)
        return [NamedBlock(f"vision.layers.{i}", layer) for i, layer in layers] + super().blocks()

    def advance(self, state: State, tokens_BS: Tensor, positions_BS: Tensor) -> State:
        """The hidden state (B,S,D) of the whole network."""
        if not self.vl.image_interval:
            return super().advance(state, tokens_BS, positions_BS)
        assert not state, self.indivisible
        images = place_images(positions_BS, self.vl.image_interval, self.vl.vision)
        seeds_BC = tokens_BS.gather(1, images.starts_BC)
        first, *others = self.vision(synthetic_patches(seeds_BC.flatten(), self.vl.vision))
        context = self._context(positions_BS, images)
        x_BSD = images.add(self.embed(tokens_BS) * ~images.mask_BS[..., None], first)
        for number, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, context)
            if number < len(others):
                x_BSD = images.add(x_BSD, others[number])
        return (self.last_hidden(x_BSD),)

    def _context(self, positions_BS: Tensor, images: Images) -> Context:
        config = self.vl
        return interleaved_context(
            positions_BS, images.axes_ABS, config.rope_theta, config.rope_sections
        )


def _with_vision(text: Qwen3Config, vision: VisionConfig) -> Qwen3VLConfig:
    numbers = {name: getattr(text, name) for name in text.__struct_fields__}
    return Qwen3VLConfig(**numbers | {"rope_theta": 5_000_000.0}, vision=vision)


def _small_tower(out_dim: int) -> VisionConfig:
    return VisionConfig(
        dim=1024, num_layers=24, hidden_dim=4096, deepstack_layers=(5, 11, 17), out_dim=out_dim
    )


QWEN3_VL_2B = _with_vision(QWEN3_1_7B, _small_tower(2048))
QWEN3_VL_4B = _with_vision(QWEN3_4B, _small_tower(2560))
QWEN3_VL_8B = _with_vision(QWEN3_8B, VisionConfig(out_dim=4096))
QWEN3_VL_32B = _with_vision(QWEN3_32B, VisionConfig(out_dim=5120))
QWEN3_VL_30B_A3B = _with_vision(QWEN3_30B_A3B, VisionConfig(out_dim=2048))
QWEN3_VL_235B_A22B = _with_vision(QWEN3_235B_A22B, VisionConfig(out_dim=4096))

_PROXY_TOWER = VisionConfig(
    dim=64,
    num_layers=3,
    num_heads=4,
    hidden_dim=128,
    out_dim=128,
    deepstack_layers=(0, 1),
    patch_size=4,
    positions=12,
    grid=(8, 8),
)

QWEN3_VL_PROXY = structs.replace(
    _with_vision(structs.replace(QWEN3_PROXY, head_dim=128), _PROXY_TOWER), image_interval=64
)
"""Every feature of the mixtures of experts, for two CPU ranks."""

QWEN3_VL_DENSE_PROXY = structs.replace(
    _with_vision(structs.replace(QWEN3_DENSE_PROXY, head_dim=128), _PROXY_TOWER), image_interval=64
)
"""Every feature of the small dense sizes, for two CPU ranks."""
