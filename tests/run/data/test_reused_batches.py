"""A loader that fills the same memory for each batch trains as one that does not.

Found with orders that read a batch before the one before was played: teachers that look
ahead and waves trained on what was filled in since, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import hocket
from hocket.errors import ModelError
from tests.conformance.script import batches, chain, sgd


class Filled:
    """Yields batches, all of them in the same memory if asked for.

    Args:
        reuses: whether it does.
        as_array: whether targets are a NumPy array.
    """

    def __init__(self, *, reuses: bool, as_array: bool) -> None:
        self.reuses, self.as_array = reuses, as_array

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        """Fill it, and yield it."""
        first = tuple(torch.empty_like(x) for x in batches()[0])
        for x, y in batches(num=6):
            found = first if self.reuses else tuple(each.clone() for each in first)
            found[0].copy_(x)
            found[1].copy_(y)
            yield found[0], np.asarray(found[1]) if self.as_array else found[1]


def _pipelined(loader: Filled, **settings: Any) -> list[float]:
    batch = next(iter(loader))
    options = {"optimizer": sgd, "example": batch, "num_microbatches": 2, "loss": _loss}
    with hocket.Pipeline(chain().double(), **{**options, **settings}) as pipeline:
        losses = [float(x.loss) for x in pipeline.train(loader)]
        return [*losses, pipeline.evaluate(loader).loss]


def _loss(output: Tensor, targets: Any, teachers: Any = None) -> Tensor:
    found = mse_loss(output, torch.as_tensor(targets))
    return found if teachers is None else found + mse_loss(output, teachers["t"].own)


def accumulated(loader: Filled) -> list[float]:
    """Two batches a step."""
    return _pipelined(loader, accumulate=2)


def flush_free(loader: Filled) -> list[float]:
    """Several steps in flight, over one profile: another cut has other delays."""
    return _pipelined(loader, schedule="wpipe", profile_dir="profiles")


def looking_ahead(loader: Filled) -> list[float]:
    """A teacher that is one batch ahead."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = chain().double().eval()
    return _pipelined(loader, teachers={"t": hocket.Teacher(net, look_ahead=1)})


def in_waves(loader: Filled) -> list[float]:
    """Two batches at a time."""
    with hocket.Waves(chain().double(), _loss, optimizer=sgd, sync="wave") as waves:
        return [float(x.loss) for x in waves.train(loader)]


def in_order(loader: Filled) -> list[float]:
    """One batch at a time: nothing is copied."""
    return _pipelined(loader, schedule="1f1b")


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize(
    "train", [in_order, accumulated, flush_free, looking_ahead, in_waves]
)
def test_the_same_memory_for_each_batch(
    train: Callable[[Filled], list[float]], as_array: bool, free_dir: Path
) -> None:
    """Equal in all bits."""
    torch.set_num_threads(1)
    found = train(Filled(reuses=True, as_array=as_array))
    assert found == train(Filled(reuses=False, as_array=as_array))


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"schedule": "pipedream-2bw"}])
def test_copies_must_stay_as_they_are(settings: dict[str, Any], free_dir: Path) -> None:
    """A loss that changes its targets in place would change them, not the batch."""

    def adds(output: Tensor, targets: Tensor) -> Tensor:
        targets += 1.0
        return mse_loss(output, targets)

    with pytest.raises(ModelError, match="changes its outputs or targets in place"):
        _pipelined(
            Filled(reuses=False, as_array=False),
            loss=hocket.PerMicrobatch(adds),
            num_microbatches=1,
            **settings,
        )
