"""What old weights take, by where tensors are in memory; and who may share places."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from hocket.run.stage.versions import WeightVersions
from hocket.run.weights.stale_ties.make import SameDeviceSource

NUM_STEPS: Final = 6


def stage_of(*, trains: bool = True) -> nn.Sequential:
    """Two weights and two biases."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    return stage.requires_grad_(requires_grad=trains)


def step(stage: nn.Sequential, versions: WeightVersions, number: int) -> None:
    """Forward, backward, update; in place, as optimizers do it."""
    with versions.put(number):
        loss = stage(torch.ones(2, 3, dtype=torch.float64)).square().mean()
    versions.take_out()
    if loss.requires_grad:
        loss.backward()
    versions.complete(number)
    versions.before_update()
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    versions.after_update()


def places(tensors: Iterable[Tensor]) -> set[int]:
    """In memory."""
    return {tensor.data_ptr() for tensor in tensors}


def read_by(
    versions: WeightVersions, stage: nn.Sequential, number: int
) -> list[Tensor]:
    """What stands in the weights' places for a step's forward."""
    with versions.put(number):
        found = [layer._parameters[key] for layer in stage for key in layer._parameters]
    versions.take_out()
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_stage_of_delay_d_holds_d_copies_more(delay: int) -> None:
    """The newest version is the live weights themselves, and no old one is."""
    stage = stage_of()
    versions = WeightVersions(stage, delay)
    for number in range(NUM_STEPS):
        step(stage, versions, number)
    live = list(stage.parameters())
    newest = read_by(versions, stage, NUM_STEPS + delay)
    assert places(newest) == places(live)
    old = [list(version.values()) for version in versions.old()]
    assert len(old) == delay
    assert all(places(version).isdisjoint(places(live)) for version in old)
    assert len(places([x for version in old for x in version])) == delay * len(live)
    assert versions.num_bytes == delay * sum(p.nbytes for p in live)


def test_a_stage_may_have_nothing_to_train() -> None:
    """One in the middle, with stages in front that are trained."""
    stage = stage_of(trains=False)
    versions = WeightVersions(stage, 1)
    for number in range(NUM_STEPS):
        step(stage, versions, number)
    assert versions.num_bytes == 0


def test_stages_of_one_device_may_run_the_same_module() -> None:
    """Each finds what it put there, whatever the other one has put in between."""
    front = stage_of()
    layer = front[0]
    back = nn.Sequential(layer, nn.Linear(3, 3).double())
    lender = WeightVersions(front, 1)
    names = ("0.weight", "0.bias")
    stale_ties = {
        name: SameDeviceSource(1, partial(lender.read, name)) for name in names
    }
    borrower = WeightVersions(back, 0, tied=stale_ties)
    for number in range(2):
        step(front, lender, number)
    first = lender.old()[0]["0.weight"]
    second = front.get_parameter("0.weight").detach()
    assert not torch.equal(first, second)
    for versions, number, expected in (
        (lender, 3, second),
        (borrower, 2, first),
        (lender, 3, second),
        (borrower, 3, second),
        (borrower, 2, first),
    ):
        with versions.put(number):
            placed = layer._parameters["weight"]
            assert placed is not None
            assert torch.equal(placed, expected)
    for versions in (lender, borrower):
        versions.take_out()
    assert all(isinstance(p, nn.Parameter) for p in back.parameters())
