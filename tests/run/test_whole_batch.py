"""A loss over the whole batch, in a pipeline: equal to the plain loop over batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from torch import nn

import hocket
from hocket.errors import ConfigError, ScheduleError, ShapeError
from hocket.passes.add_whole_batch_loss import add_whole_batch_loss
from tests.run.support.forked import answers_of
from tests.run.support.whole_batch_workers import (
    LOSSES,
    barlow,
    data,
    pipeline,
    train,
    train_plainly,
)

GPIPE: Final = {"schedule": "gpipe", "stages_per_device": None}
AUTO: Final = {"schedule": "auto", "stages_per_device": None}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To rounding in the order of additions."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-10)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-10)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("settings", [{}, GPIPE, {"recompute": "all"}, AUTO])
def test_equals_the_plain_loop(name: str, settings: dict[str, Any]) -> None:
    """Losses and weights, over batches of two sizes, in each order that can."""
    assert_equal(train(name, settings), train_plainly(name))


@pytest.mark.parametrize(
    ("num_workers", "settings", "reads"),
    [
        (2, GPIPE, "parts"),
        (2, {"num_microbatches": 2}, "batches"),
        (4, GPIPE | {"num_replicas": 2}, "batches"),
        (2, {"num_replicas": 2, "stages_per_device": 3}, "parts"),
    ],
)
def test_equals_the_plain_loop_on_several_workers(
    num_workers: int, settings: dict[str, Any], reads: str, tmp_path: Path
) -> None:
    """With replicas, the loss is over the samples of all of them."""
    answers = answers_of(
        "whole_batch_workers:train",
        "barlow",
        settings,
        reads,
        num_workers=num_workers,
        folder=tmp_path,
    )
    for found in answers:
        assert_equal(found, train_plainly("barlow"))


def test_without_the_declaration_it_is_refused() -> None:
    """Cut into microbatches, it is another loss."""
    with (
        pipeline(barlow) as refused,
        pytest.raises(hocket.ModelError, match="WholeBatch"),
    ):
        refused.step(data()[0])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1"])
def test_orders_that_cannot_name_those_that_can(schedule: str) -> None:
    """A backward of theirs comes before the last forward."""
    settings: dict[str, Any] = {"schedule": schedule, "stages_per_device": None}
    with pytest.raises(ShapeError, match=r"B0 comes before .F2.*these can: .*gpipe"):
        pipeline(hocket.WholeBatch(barlow), **settings)


def test_batches_that_accumulate_are_no_whole() -> None:
    """The loss would see one of them."""
    with pytest.raises(
        ConfigError, match="accumulate is 2: a loss over the whole batch"
    ):
        pipeline(hocket.WholeBatch(barlow), accumulate=2)


def test_an_order_with_op_l_needs_such_a_loss() -> None:
    """And plays it as it is."""
    order = add_whole_batch_loss(
        hocket.make_schedule("gpipe", num_devices=1, num_microbatches=3)
    )
    settings: dict[str, Any] = {"schedule": order, "stages_per_device": None}
    with pytest.raises(ScheduleError, match=r"loss=hocket.WholeBatch\(loss\)"):
        pipeline(nn.functional.cross_entropy, **settings)
    with pipeline(hocket.WholeBatch(barlow), **settings) as trained:
        assert trained.step(data()[0]).step == 0
        assert trained.evaluate(data()[:1]).num_samples == len(data()[0][0])
