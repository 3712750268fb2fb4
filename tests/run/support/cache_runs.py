"""What training with a cache of frozen layers' outputs is compared with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import hocket
from tests.run.support.cached_workers import ROOM, STEPS_PER_EPOCH, WIDTH, train
from tests.run.support.short_measurements import measure_shortly

SAMPLE_BYTES: Final = 8 * WIDTH
NUM_TRIALS: Final = 3 * 4  # samples of the microbatches that are measured
Found = tuple[list[Any], dict[str, Tensor]]


def let_reading_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading pay however slow it is, so that tests know what is read."""
    measure_shortly(monkeypatch)
    monkeypatch.setattr("hocket.freeze.cache.payoff._MOST", float("inf"))


def in_folder(folder: Path, **options: Any) -> hocket.Cache:
    """A cache with room for all."""
    budgets = {"ram_bytes": ROOM, "disk_bytes": ROOM}
    return hocket.Cache(folder / "cache", **{**budgets, **options})


def in_epochs(found: list[Any]) -> list[int]:
    """The hits of each epoch."""
    hits, each = [x[3] for x in found], STEPS_PER_EPOCH
    return [sum(hits[i : i + each]) for i in range(0, len(hits), each)]


def assert_equal(found: Found, expected: Found, *, exact: bool = False) -> None:
    """In frozen layers, losses and weights."""
    assert [x[0] for x in found[0]] == [x[0] for x in expected[0]]
    rtol, atol = (0.0, 0.0) if exact else (1e-10, 1e-12)
    losses, others = (
        torch.tensor([x[2] for x in steps], dtype=torch.float64)
        for steps in (found[0], expected[0])
    )
    torch.testing.assert_close(losses, others, rtol=rtol, atol=atol)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=rtol, atol=atol)


def rest_of(
    pipeline: hocket.Pipeline, loader: hocket.SampleLoader, num_epochs: int
) -> Found:
    """Train some epochs, of which the first may have begun."""
    found = [
        [x.num_frozen, x.layout, x.loss, x.cache_hits]
        for _ in range(num_epochs)
        for x in pipeline.train(loader)
    ]
    return found, pipeline.state_dict()


@functools.cache
def without() -> Found:
    """Six epochs without a cache."""
    return train(None)
