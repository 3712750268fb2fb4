"""Parameters that are trained under way, and were not, are noticed before the step."""

from __future__ import annotations

import pytest
from torch import nn

from hocket.errors import ModelError
from hocket.run.engine.executor import TrainableCheck


@pytest.mark.parametrize(
    ("first", "fixed", "way_out"),
    [
        (False, (), "freeze it before the first step"),
        (True, ("0.bias", "1.weight"), "save and make another pipeline"),
    ],
)
def test_names_the_parameter_and_both_sides(
    first: bool, fixed: tuple[str, ...], way_out: str
) -> None:
    """Of which old versions are kept, or none; put back, training goes on."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(requires_grad=first)
    same = TrainableCheck(dict(model.named_parameters()), fixed)
    same.check(0)
    model[1].requires_grad_(requires_grad=not first)
    with pytest.raises(ModelError) as raised:
        same.check(7)
    expected = (
        f"requires_grad of 1.weight was {first} when the pipeline was made, and is "
        f"{not first} at step 7"
    )
    assert expected in str(raised.value)
    assert way_out in str(raised.value)
    model[1].requires_grad_(requires_grad=first)
    same.check(8)


def test_frozen_and_trained_again() -> None:
    """What was trained at first may be frozen, and trained again."""
    layer = nn.Linear(3, 3)
    same = TrainableCheck(dict(layer.named_parameters()))
    for trained in (False, True, False):
        layer.bias.requires_grad = trained
        same.check(1)


def test_a_stage_without_parameters() -> None:
    """Has none that could change."""
    TrainableCheck({}).check(3)
