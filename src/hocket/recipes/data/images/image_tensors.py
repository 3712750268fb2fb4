"""Normalises the colours of images, and shifts and mirrors them at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hocket.run.data.samples import EpochRandom


@dataclass(frozen=True, slots=True)
class Colours:
    """Mean and standard deviation of each channel, of pixels from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def normalised(self, image_BCSS: Tensor) -> Tensor:
        """Convert bytes to float32 of mean 0 and standard deviation 1."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return (image_BCSS.float() / 255 - mean) / std


@dataclass(frozen=True, slots=True)
class Variation:
    """What small images become: moved and mirrored at random, and scaled then.

    Args:
        shift_pixels: the largest shift of a training image, in both directions.
        flip: whether half of the training images are mirrored.
        side: the pixels that all images are scaled to, after that.
    """

    shift_pixels: int
    flip: bool
    side: int

    def of(self, image_BCSS: Tensor, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, C, side, side), float32.

        Args:
            image_BCSS: normalised images.
            rows: their numbers in the data set.
            draw: draws how each is moved; None where nothing is.
        """
        if draw is not None:
            image_BCSS = vary_images(
                image_BCSS,
                draw.uniform(rows, 3),
                shift_pixels=self.shift_pixels,
                flip=self.flip,
            )
        if image_BCSS.shape[-1] == self.side:
            return image_BCSS
        return functional.interpolate(image_BCSS, self.side, mode="bilinear")


def vary_images(
    images_BCSS: Tensor, uniform_B3: Tensor, *, shift_pixels: int, flip: bool
) -> Tensor:
    """Shift each image by some pixels in both directions, and mirror half of them.

        pad by shift_pixels on each side, crop S x S anywhere, mirror left to right

    Args:
        images_BCSS: normalised images; zero, their mean colour, pads the edges.
        uniform_B3: random numbers in [0, 1): down, right, mirrored.
        shift_pixels: the largest shift.
        flip: whether images are mirrored at all.

    Source: Lee et al., "Deeply-supervised nets", arXiv:1409.5185, section 4 (zero
    padding by 4 pixels); He et al., arXiv:1512.03385, section 4.2, does the same.
    """
    side = images_BCSS.shape[-1]
    padded = functional.pad(images_BCSS, (shift_pixels,) * 4)
    offsets_B2 = (uniform_B3[:, :2] * (2 * shift_pixels + 1)).long()
    pixel_S = torch.arange(side)
    rows_BS1 = (offsets_B2[:, :1] + pixel_S)[:, :, None]
    columns_BS = pixel_S.expand(len(images_BCSS), side)
    if flip:
        mirrored_B1 = uniform_B3[:, 2:] < 0.5
        columns_BS = torch.where(mirrored_B1, side - 1 - columns_BS, columns_BS)
    columns_B1S = (offsets_B2[:, 1:] + columns_BS)[:, None, :]
    which_B11 = torch.arange(len(images_BCSS))[:, None, None]
    return padded[which_B11, :, rows_BS1, columns_B1S].permute(0, 3, 1, 2).contiguous()
