"""Unusual models train as in the plain loop, or are refused by name.

An int16 buffer ended `state_dict()` with gloo's "Invalid scalar type", an expanded one
the construction; a view that channels_last allows failed on two workers only; a model
without anything to train returned losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import ConfigError, HocketError, ModelError
from tests.run.support import odd_model_workers as own
from tests.run.support.forked import answers_of

pytestmark = pytest.mark.timeout(120)
TOLERANCE: Final = 1e-10
ENTRY: Final = "odd_model_workers:train"
BATCH: Final = torch.ones(8, 6), torch.ones(8, 3)


@pytest.mark.parametrize("name", own.CASES)
def test_one_worker_trains_as_the_plain_loop(name: str, tmp_path: Path) -> None:
    """All tensors of the state keep their types."""
    assert own.train(str(tmp_path), name) <= TOLERANCE


@pytest.mark.parametrize("name", own.CASES)
@pytest.mark.parametrize(
    "options", [{"cut": ["1"]}, {"num_replicas": 2}], ids=["stages", "replicas"]
)
def test_two_workers_train_as_the_plain_loop(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Values arrive with their strides, buffers with their types."""
    found = answers_of(ENTRY, str(tmp_path), name, options, folder=tmp_path)

    assert max(found) <= TOLERANCE


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Any optimizer."""
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet"),
        (lambda: torch.jit.script(nn.Linear(6, 3)), "is a scripted module"),
    ],
)
def test_what_cannot_be_captured_is_refused(make: Any, message: str) -> None:
    """By pipelines, plans and captured steps."""
    net = make()
    loss = nn.functional.mse_loss
    with pytest.raises(ConfigError, match=message):
        hocket.Pipeline(net, loss, optimizer=sgd, example=BATCH)
    with pytest.raises(ConfigError, match=message):
        hocket.compile_step(net, loss, sgd, example=BATCH)
    with pytest.raises(HocketError, match=message):
        hocket.plan(net, BATCH, loss, num_devices=1, hardware="a100-80g")


def test_nothing_to_train_is_an_error_at_the_first_step(tmp_path: Path) -> None:
    """Plain torch fails in `backward`; evaluation goes on."""
    net = nn.Linear(6, 3).requires_grad_(requires_grad=False)
    loss = nn.functional.mse_loss
    with hocket.Pipeline(
        net, loss, optimizer=sgd, example=BATCH, run_dir=tmp_path
    ) as pipeline:
        assert pipeline.evaluate([BATCH]).num_samples == 8
        with pytest.raises(ModelError, match="all of the model's parameters are froz"):
            pipeline.step(BATCH)
    with pytest.raises(ConfigError, match="nothing to train"):
        hocket.compile_step(net, loss, sgd, example=BATCH)
