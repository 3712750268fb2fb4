"""The error about a wrong metrics function says what it must return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ModelError
from hocket.run.data.metrics import DeviceSums, EvaluationSums, named_means
from tests.run.support.plainly import SGD
from tests.run.support.started import started


@pytest.mark.parametrize(
    "value", [torch.tensor(0.25), torch.tensor([0.25]), 0.25, np.float64(0.25)]
)
def test_numbers_are_means(value: object) -> None:
    """Of any kind that holds just one; added up in float64."""
    (mean,) = named_means({"accuracy": value}).values()
    assert (mean.shape, mean.dtype, mean.item()) == ((), torch.float64, 0.25)


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        (0.25, r"must return a dict of named means .* got a float"),
        (torch.tensor(0.25), "got a Tensor"),
        (None, "got a NoneType"),
        ({"hits": torch.ones(3)}, r"'hits' must be one number.* of shape \(3,\)"),
        ({"hits": "many"}, "'hits' must be one number.* got a str"),
        ({"hits": [1.0, 2.0]}, "'hits' must be one number.* got a list"),
    ],
)
def test_anything_else_is_refused(value: object, reported: str) -> None:
    """With what it was, and what it must be."""
    with pytest.raises(ModelError, match=reported):
        named_means(value)


def alone() -> tuple[hocket.Pipeline, tuple[Tensor, Tensor]]:
    """A pipeline of one worker, and a batch."""
    torch.manual_seed(0)
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    pipeline = started(
        nn.Sequential(nn.Linear(3, 2)), nn.functional.cross_entropy, SGD, batch
    )
    return pipeline, batch


def test_what_is_no_function_ends_nothing() -> None:
    """The pipeline goes on: no worker has run yet."""
    pipeline, batch = alone()

    def hits(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"hits": (output.argmax(1) == targets).double().mean()}

    several: Any = {"hits": hits}
    with pipeline:
        with pytest.raises(ModelError, match=r"must be one function.* got a dict"):
            pipeline.evaluate([batch], several)
        assert 0.0 <= pipeline.evaluate([batch], hits).metrics["hits"] <= 1.0


def test_a_mean_without_a_name_is_reported_by_evaluation() -> None:
    """Not by an AttributeError from within."""

    def half(output: Tensor, targets: Tensor) -> Any:
        return 0.5

    pipeline, batch = alone()
    with pipeline, pytest.raises(ModelError, match="must return a dict of named means"):
        pipeline.evaluate([batch], half)


def test_a_metric_may_be_left_out_for_some_microbatches() -> None:
    """It is then the mean over the samples of the others."""
    sums = DeviceSums(lambda output, _: {"hits": output} if output else {})
    sums.add_losses({"loss": torch.tensor(1.0)}, 4.0)
    for output, count in ((0.5, 1), (0.0, 2), (1.0, 1)):
        sums.add_samples(output, None, count)
    assert EvaluationSums([sums.read()], None).result().metrics == {"hits": 0.75}
