"""Images for views."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.teacher.views import TwoViews, TwoViewSamples


def random_images(num_images: int, side: int = 20) -> Tensor:
    """(N, 3, side, side), uint8."""
    rng = torch.Generator().manual_seed(0)
    shape = num_images, 3, side, side
    return torch.randint(256, shape, dtype=torch.uint8, generator=rng)


def view_samples(num_images: int, side: int = 16) -> TwoViewSamples:
    """Views of random images; image r has the class r."""
    images = random_images(num_images)
    labels = torch.arange(num_images)
    return TwoViewSamples(images.__getitem__, labels, TwoViews(side))
