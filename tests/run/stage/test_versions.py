"""Which weights a stage computes with, and where its own ones are meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.run.stage.versions import WeightVersions


def made(delay: int = 1) -> tuple[nn.Linear, nn.Parameter, WeightVersions]:
    """A layer, its weight, which is the number of its updates, and the versions."""
    layer = nn.Linear(1, 1, bias=False)
    weight = nn.Parameter(torch.zeros(1, 1))
    layer.weight = weight
    return layer, weight, WeightVersions(layer, delay)


def update(weight: nn.Parameter, versions: WeightVersions, step: int) -> None:
    """The end of a step."""
    versions.complete(step)
    versions.before_update()
    with torch.no_grad():
        weight.add_(1.0)
    versions.after_update()


def output(layer: nn.Linear, versions: WeightVersions, step: int) -> Tensor:
    """Of a forward on 1: the weight that it reads."""
    with versions.put(step):
        found: Tensor = layer(torch.ones(1))
    return found


def test_each_step_reads_the_weights_that_its_delay_promises() -> None:
    """Also where steps take turns."""
    layer, weight, versions = made(2)
    for step in range(5):
        ahead = [step, step + 1, step]
        read = [output(layer, versions, number).item() for number in ahead]
        assert read == [max(0, number - 2) for number in ahead]
        update(weight, versions, step)


def test_parameters_come_back() -> None:
    """The very same ones, with the newest values, also if nothing was put."""
    layer, weight, versions = made()
    versions.take_out()
    for step in range(3):
        output(layer, versions, step)
        assert layer.weight is not weight
        update(weight, versions, step)
    output(layer, versions, 3)
    versions.take_out()

    assert layer.weight is weight
    assert weight.item() == 3.0


def test_weights_that_are_not_read_again_are_released() -> None:
    """They do not stay in their places until the next forward."""
    layer, weight, versions = made()
    update(weight, versions, 0)
    output(layer, versions, 1)
    assert versions.num_bytes == weight.nbytes
    versions.complete(1)

    assert versions.num_bytes == 0
    assert layer.weight is weight


def test_gradients_go_to_the_step_that_read() -> None:
    """The next step's may have begun, with other weights."""
    layer, weight, versions = made()
    update(weight, versions, 0)
    for step in (1, 2, 1):
        output(layer, versions, step).backward()
    assert weight.grad is None

    versions.complete(1)
    assert weight.grad is not None
    assert weight.grad.item() == 2.0
