"""Which loaders do not go together with a cache of frozen layers' outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import DataError
from hocket.freeze.cache.settings import Cache
from hocket.model.trace.per_sample import tensors_in
from hocket.run.data.sample_loader import SampleLoader

_NUM_COMPARED: Final = 32
_WAY_OUT: Final = (
    "give a hocket.SampleLoader, whose batches name their samples, or leave out cache="
)
_DRAW_ONCE: Final = (
    "Cache(..., draws_once=True) draws them once for each sample, "
    "SampleLoader(..., varied=False) leaves them out; or leave out cache="
)


def checked_loader(loader: Iterable[Any], settings: Cache) -> SampleLoader:
    """Return a loader whose samples can be kept.

    Args:
        loader: the user's.
        settings: the cache's.

    Raises:
        DataError: it does not name its samples, or they are not the same when they are
            read again; gives the numbers.
    """
    if not isinstance(loader, SampleLoader):
        raise DataError(
            f"the cache finds outputs by sample, and a {type(loader).__name__} does "
            f"not say which samples a batch has: {_WAY_OUT}"
        )
    refuse_random(loader, settings)
    return loader


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
