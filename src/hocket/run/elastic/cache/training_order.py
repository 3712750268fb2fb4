"""The order in which training uses samples, and which loaders keep to none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import DataError
from hocket.freeze.cache.next_use import NextUse
from hocket.freeze.settings import Cache
from hocket.model.trace.per_sample import tensors_in
from hocket.run.data.reads import PartBatch, ReadSpec
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.data.sampler import BatchRows


class TrainingOrder:
    """Follows a loader, batch by batch.

    Args:
        settings: the cache's.
        num_parts: the microbatches of the whole batch.
        accumulate: batches of a step.
        device: where batches go.

    Attributes:
        use: when samples are used next.
    """

    def __init__(
        self, settings: Cache, num_parts: int, accumulate: int, device: torch.device
    ) -> None:
        self.use = NextUse(0, 0, 1, lambda _: torch.arange(0).numpy())
        self._settings = settings
        self._accumulate = accumulate
        self._reads = ReadSpec(
            inputs=True,
            targets=True,
            num_microbatches=num_parts,
            num_replicas=1,
            replica=0,
            device=device,
            draws_once=True,  # also where no sample seems to vary
        )
        self._checked: SampleLoader | None = None
        self._recent: deque[BatchRows] = deque()  # of the present step

    def begin(self, loader: Iterable[Any]) -> Iterator[PartBatch]:
        """Follow a loader from its position on; return its whole batches.

        Raises:
            DataError: it does not name its samples, or they are not the same when they
                are read again; gives the numbers.
        """
        if not isinstance(loader, SampleLoader):
            raise DataError(
                f"the cache finds outputs by sample, and a {type(loader).__name__} "
                f"does not say which samples a batch has: {_WAY_OUT}"
            )
        if loader is not self._checked:
            refuse_random(loader, self._settings)
            self._checked = loader
        self._recent.clear()
        sampler = loader.sampler
        num_used = sampler.num_samples
        if sampler.drop_last:
            num_used = sampler.batches_per_epoch * sampler.batch_size
        seed = sampler.seed if loader.varied else None
        data = loader.samples.fingerprint, sampler.num_samples, seed
        self.use = NextUse(
            crc32(repr(data).encode()),
            sampler.num_samples,
            num_used,
            lambda epoch: sampler.order(epoch).numpy(),
        )
        self.use.now = sampler.current.epoch * num_used + sampler.current.position
        return loader.parts(self._reads)

    def advance(self, batch: PartBatch) -> tuple[list[int], bool]:
        """Go on to the step that a batch is of.

        Returns:
            The samples of steps that are over, and whether an epoch is.
        """
        assert batch.samples is not None
        self._recent.append(batch.samples)
        samples: list[int] = []
        epochs = {batch.samples.epoch}
        while len(self._recent) > self._accumulate:
            over = self._recent.popleft()
            samples += over.rows.tolist()
            epochs.add(over.epoch)
        first = self._recent[0]
        self.use.now = self.use.time_of(first.epoch, int(first.rows[0]))
        return samples, len(epochs) > 1


_NUM_COMPARED: Final = 32
_WAY_OUT: Final = (
    "give a hocket.SampleLoader, whose batches name their samples, or leave out cache="
)
_DRAW_ONCE: Final = (
    "Cache(..., draws_once=True) draws them once for each sample, "
    "SampleLoader(..., varied=False) leaves them out; or leave out cache="
)


def refuse_batch() -> None:
    """Refuse a batch that comes without a loader.

    Raises:
        DataError: always.
    """
    raise DataError(
        "the cache finds outputs by sample, and the batch given to step() does not "
        f"say which samples it has: train from a loader; {_WAY_OUT}"
    )


def refuse_random(
    loader: SampleLoader, settings: Cache, way_out: str = _DRAW_ONCE
) -> None:
    """Refuse samples that are not the same when they are read again.

    Args:
        loader: the loader, of which the next samples are read.
        settings: the cache's.
        way_out: the sentence on what to do about random transforms.

    Raises:
        DataError: some differ; gives the numbers.
    """
    current = loader.sampler.current
    rows = loader.sampler.order(current.epoch)[:_NUM_COMPARED]
    epochs = (0, 0) if settings.draws_once else (0, 1)
    first, second = (
        pytree.tree_leaves(loader.samples.inputs(rows, loader.draw(epoch, None)))
        for epoch in epochs
    )
    num_changed = int(_changed(first, second, len(rows)).sum())
    if not num_changed:
        return
    if settings.draws_once:
        raise DataError(
            f"{num_changed} of {len(rows)} samples differ when they are read twice "
            "with the same random numbers (EpochRandom), so their outputs cannot be "
            "kept: let the data set draw from the numbers that it is given, or leave "
            "out cache="
        )
    raise DataError(
        f"{num_changed} of {len(rows)} samples differ between epochs 0 and 1, for "
        "random transforms are drawn again in each epoch: outputs of the frozen layers "
        f"cannot be kept. {way_out}"
    )


def _changed(first: list[Any], second: list[Any], num_samples: int) -> Tensor:
    """Return which samples differ: (num_samples,) of bool."""
    found = torch.zeros(num_samples, dtype=torch.bool)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
            if x.shape != y.shape:
                found[:] = True
            elif x.dim() and len(x) == num_samples:
                differs = (x != y) & ~((x != x) & (y != y))  # NaN equals NaN here
                found |= differs.reshape(num_samples, -1).any(dim=1)
            else:
                found |= not torch.equal(x, y)
    return found
