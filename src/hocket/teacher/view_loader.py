"""Loads batches of two views, resumable, each worker only the rows that it needs.

images of the batch   a b c
rows of the batch     a b c    a b c          6 samples, the sizes of microbatches
view                  one      two
rows of the data set  r ...    N + r ...      N images
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hocket.run.data.fetch import fetch
from hocket.run.data.reads import ReadSpec
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.data.sampler import BatchRows
from hocket.run.data.samples import EpochRandom
from hocket.teacher.views import TwoViews

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

    def __init__(
        self, samples: TwoViewSamples, batch_size: int, **options: Any
    ) -> None:
        super().__init__(samples, batch_size, **options)

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
