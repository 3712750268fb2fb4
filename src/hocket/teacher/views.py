"""Two views of each image, in one batch: the first views, then the second views.

    view    crop, mirror   jitter 0.8, grey 0.2   blur    solarize   normalise
    one     always         always                 1.0     0.0        always
    two     always         always                 0.1     0.2        always

These are the lists of BYOL and MoCo-v3, and of DINO's two large views; torchvision does
the work, and is imported when a view is first made.

Sources: Grill et al., arXiv:2006.07733, table 6; Chen et al., arXiv:2104.02057, section
4.1; Caron et al., arXiv:2104.14294, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import ConfigError, MissingPackageError
from hocket.run.data.reads import ReadSpec
from hocket.run.data.sample_loader import SampleLoader, fetch
from hocket.run.data.sampler import BatchRows
from hocket.run.data.samples import EpochRandom

Transform = Callable[[Any], Tensor]

_MARGIN: Final = 256 / 224  # the size that evaluation scales to, before the middle


@dataclass(frozen=True, slots=True)
class TwoViews:
    """How two views are made of an image: a Pillow image, or (3, H, W) of uint8.

    Args:
        side: the pixels of a view's side.
        least_area: the smallest share of the image that a view shows: 0.08 for BYOL and
            MoCo-v3 with ViT, 0.2 for MoCo-v3 with ResNet, 0.4 for DINO.
        mean: the mean of each channel, of pixels from 0 to 1; ImageNet's by default.
        std: the channels' standard deviations.

    Raises:
        ConfigError: a number is out of range.
    """

    side: int
    least_area: float = 0.08
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        """Refuse views without pixels."""
        if self.side < 1 or not 0.0 < self.least_area <= 1.0:
            raise ConfigError(
                f"TwoViews(side={self.side}, least_area={self.least_area}): the side "
                "must be 1 pixel or more, the area above 0 and at most 1"
            )

    def __call__(self, images: Sequence[Any] | Tensor, seeds: Sequence[int]) -> Tensor:
        """Make a batch of two views of each image.

        Args:
            images: N images.
            seeds: a seed for each: its views depend on it alone.

        Returns:
            (2 N, 3, side, side), float32: the first views, then the second views.

        Raises:
            MissingPackageError: torchvision is not installed.
        """
        return torch.stack(
            [
                self.view(second, image, seed)
                for second in (False, True)
                for image, seed in zip(images, seeds, strict=True)
            ]
        )

    def view(self, second: bool, image: Any, seed: int) -> Tensor:
        """Make one view: (3, side, side), float32.

        Args:
            second: whether it is the second one.
            image: the image.
            seed: the image's seed; its views draw different numbers.
        """
        make = _transforms(self)[second]
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed accelerators, too.
            torch.default_generator.manual_seed(2 * seed + second)
            return make(image)

    def plain(self, image: Any) -> Tensor:
        """Scale the image and crop its middle, as for evaluation."""
        return _transforms(self)[2](image)


@lru_cache(maxsize=8)
def _transforms(views: TwoViews) -> tuple[Transform, Transform, Transform]:
    """Return the transforms of the first view, the second one, and for evaluation.

    Raises:
        MissingPackageError: torchvision is not installed.
    """
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise MissingPackageError(
            "the views of images are made by torchvision, which is not installed or "
            f"does not load ({error}): pip install 'hocket[vision]'"
        ) from error
    side = views.side
    begin = [v2.ToImage(), v2.RGB()]
    end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(views.mean, views.std)]

    def varied(blur: float, solarize: float) -> Transform:
        jitter = v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
        gaussian = v2.GaussianBlur(side // 10 | 1, sigma=(0.1, 2.0))  # 23 of 224
        steps = [
            v2.RandomResizedCrop(side, scale=(views.least_area, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([jitter], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([gaussian], p=blur),
            v2.RandomSolarize(threshold=128, p=solarize),
        ]
        return _plain_tensor(v2.Compose([*begin, *steps, *end]))

    middle = [v2.Resize(round(side * _MARGIN), antialias=True), v2.CenterCrop(side)]
    plain = _plain_tensor(v2.Compose([*begin, *middle, *end]))
    return varied(1.0, 0.0), varied(0.1, 0.2), plain


def _plain_tensor(transform: Callable[[Any], Tensor]) -> Transform:
    """Return a plain tensor instead of torchvision's subclass."""
    return lambda image: transform(image).as_subclass(Tensor)


# Loads batches of two views, resumable, each worker only the rows that it needs.
#
# images of the batch   a b c
# rows of the batch     a b c    a b c          6 samples, the sizes of microbatches
# view                  one      two
# rows of the data set  r ...    N + r ...      N images
_SEEDS: Final = 2.0**53  # numbers that `EpochRandom.uniform` distinguishes


@dataclass(frozen=True, slots=True)
class TwoViewSamples:
    """Views by row: row r is the first view of image r, row N + r its second view.

    Without augmentation, as in evaluation, it is the middle of the image.

    Args:
        image_of: returns the image of a row from 0 to N - 1.
        labels: the images' classes: (N,).
        views: how the views are made.
        fingerprint: 32 bits that depend on the content.
    """

    image_of: Callable[[int], Any]
    labels: Tensor
    views: TwoViews
    fingerprint: int = 0

    @property
    def num_samples(self) -> int:
        """The number of images, N."""
        return len(self.labels)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Return (B, 3, side, side), float32."""
        images = rows % self.num_samples
        if draw is None:
            found = [self.views.plain(self.image_of(row)) for row in images.tolist()]
            return torch.stack(found)
        seeds = (draw.uniform(images, 1)[:, 0] * _SEEDS).long().tolist()
        is_second = (rows >= self.num_samples).tolist()
        return torch.stack(
            [
                self.views.view(second, self.image_of(row), seed)
                for second, row, seed in zip(
                    is_second, images.tolist(), seeds, strict=True
                )
            ]
        )

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Return the classes of the images: (B,)."""
        del draw
        return self.labels[rows % self.num_samples]


class TwoViewLoader(SampleLoader):
    """Loads batches of two views: n first views, and then the same images' second ones.

    As `SampleLoader`, of which `batch_size` counts images: a batch has twice as many
    rows. Each worker reads and augments only the rows of its own replica.

    Args:
        samples: the views by row.
        batch_size: images per batch.
        **options: as for `SampleLoader`.

    Raises:
        DataError: there are no samples, or not one full batch.
    """

    def parts(self, reads: ReadSpec | None) -> Iterator[Any]:
        """Yield batches from the position to the end of the pass, advancing it."""
        draws = (
            (BatchRows(rows.epoch, self._both(rows.rows)), self.draw(rows.epoch, reads))
            for rows in self.sampler.upcoming()
        )
        fetched = fetch(self.samples, draws, reads, self.num_workers)
        return self.sampler.counted(fetched)

    def example(self) -> tuple[Any, Any]:
        """Return both views of the first images, to make a Pipeline with."""
        images = torch.arange(min(self.batch_size, self.samples.num_samples))
        rows = self._both(images)
        return self.samples.inputs(rows, None), self.samples.targets(rows, None)

    def _both(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows + self.samples.num_samples])
