"""The synthetic images of packed documents: where they stand, their pixels and their features.

Every complete block of `interval` tokens of a document begins with an image. Its pixels are noise
from the id of its first token.

B batch, S sequence, D model width, C blocks of a row, N features (and tokens) of an image,
I = B C images.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.batch import Context
from models.layers.encoder import Encoder
from models.layers.vision import VisionConfig, VisionTower


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

    def spread(self, features_IND: Tensor) -> Tensor:
        """(B,S,D): the features at their tokens, zero at all others."""
        B, S = self.mask_BS.shape
        _, N, D = features_IND.shape
        features_IND = features_IND * self.valid_BC.flatten()[:, None, None]
        tokens_BCN = self.starts_BC[..., None] + torch.arange(N, device=features_IND.device)
        tokens_BCN = tokens_BCN + S * torch.arange(B, device=features_IND.device)[:, None, None]
        spread_TD = features_IND.new_zeros(B * S, D)
        spread_TD = spread_TD.index_add(0, tokens_BCN.flatten(), features_IND.flatten(0, 1))
        return spread_TD.view(B, S, D)


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


class ImageTower(VisionTower, Encoder):
    """The tower at work on the images of a batch; idle where `interval` is 0."""

    def __init__(self, config: VisionConfig, interval: int) -> None:
        super().__init__(config)
        self.interval = interval

    def forward(self, tokens_BS: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Features (B,S,D), zero where no image is: for the embedding, then the first layers.

        `context.family` says where the images are.
        """
        images: Images = context.family
        seeds_BC = tokens_BS.gather(1, images.starts_BC)
        features = self.features(synthetic_patches(seeds_BC.flatten(), self.config))
        return tuple(images.spread(features_IND) for features_IND in features)

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of forward and backward: as many images as a sequence of one document has."""
        if not self.interval:
            return 0
        return image_flops_per_token(self.config, self.interval, sequence_length)


def image_flops_per_token(vision: VisionConfig, interval: int, sequence_length: int) -> int:
    """FLOPs of forward and backward of the images in a sequence of one document, per token."""
    return sequence_length // interval * vision.flops_per_image() // sequence_length
