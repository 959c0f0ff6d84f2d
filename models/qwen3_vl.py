"""Qwen3-VL: Qwen3 with a vision tower, positions on three axes, and DeepStack.

A workload's data are text, so images are synthetic and take the place of some of it: every complete
block of `image_interval` tokens of a document begins with an image, whose features stand where its
first tokens' embeddings would. Its pixels are noise from the id of its first token, so they say
nothing of what follows, and packed documents have the images that they have apart. Targets stay
those of the text. With interval 0, as in the presets, there are no images and the tower is idle.

Features of three layers of the tower are added to the stream after the first three layers; until
then they are part of the state, beside the stream.

B batch, S sequence, D model width.
"""

from msgspec import structs
from torch import Tensor

from models.batch import NO_TOKEN, Context
from models.counts import FlopsLedger, FlopsTerm, ParameterCounts
from models.decoder import Decoder, Rotary
from models.layers.images import Images, ImageTower, image_flops_per_token, place_images
from models.layers.rotary import interleaved_context
from models.layers.vision import VisionConfig
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
        flops = image_flops_per_token(self.vision, self.image_interval, sequence_length)
        terms = ledger.terms | {"vision": FlopsTerm(full=flops, causal=flops)}
        return structs.replace(ledger, terms=terms)


class Qwen3VL(Decoder):
    """The language model with its tower; see models.protocol."""

    vision: ImageTower | None

    def __init__(self, config: Qwen3VLConfig, routing: str = "learned") -> None:
        super().__init__(
            config,
            (qwen3_block(config, routing) for _ in range(config.num_layers)),
            rotary=Rotary(config.head_dim, config.rope_theta),
            tied=config.tied,
        )
        self.vl = config
        self.vision = ImageTower(config.vision, config.image_interval)

    @property
    def encoder(self) -> ImageTower | None:
        """The tower."""
        return self.vision

    def drop_encoder(self) -> None:
        """Leave out the tower."""
        self.vision = None

    def blocks(self) -> list[NamedBlock]:
        """The tower's layers and then the language model's."""
        layers = self.vision.layers if self.vision is not None else ()
        tower = [NamedBlock(f"vision.layers.{i}", layer) for i, layer in enumerate(layers)]
        return tower + self.sequence_blocks()

    def num_streams(self, layer: int) -> int:
        """The stream, and the features that this layer and later ones are followed by."""
        features = len(self.vl.vision.deepstack_layers) if self.vl.image_interval else 0
        return 1 + max(features - layer, 0)

    def context(self, positions_BS: Tensor) -> Context:
        """What the blocks of one forward pass share, and where the images are."""
        config = self.vl
        if not config.image_interval:
            return super().context(positions_BS)
        images = place_images(positions_BS, config.image_interval, config.vision)
        context = interleaved_context(
            positions_BS, images.axes_ABS, config.rope_theta, config.rope_sections
        )
        return context._replace(family=images)

    def advance(self, state: State, tokens_BS: Tensor, positions_BS: Tensor) -> State:
        """The state after the parts that are here, from the state before them; all but the head."""
        if not self.vl.image_interval:
            return super().advance(state, tokens_BS, positions_BS)
        context = self.context(positions_BS)
        x_BSD, *features = state or self._embed_with_images(tokens_BS, context)
        for layer in self.layers:
            if layer is not None:
                x_BSD = layer(x_BSD, context)
                if features:
                    x_BSD = x_BSD + features.pop(0)
        return (x_BSD, *features) if self.norm is None else (self.last_hidden(x_BSD),)

    def _embed_with_images(self, tokens_BS: Tensor, context: Context) -> State:
        """The stream that enters the first layer, and the features for after the first layers."""
        assert self.vision is not None
        images: Images = context.family
        first, *others = self.vision(tokens_BS, context)
        return (self.embed(tokens_BS.masked_fill(images.mask_BS, NO_TOKEN)) + first, *others)


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
