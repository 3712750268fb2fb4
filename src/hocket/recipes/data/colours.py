"""Colours of images, normalised channel by channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Colours:
    """Mean and standard deviation of each channel, of pixels from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def normalised(self, image_BCSS: Tensor) -> Tensor:
        """Bytes as float32 of mean 0 and standard deviation 1."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return (image_BCSS.float() / 255 - mean) / std
