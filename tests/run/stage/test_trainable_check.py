"""Parameters that are frozen or thawed under way are noticed before the next step."""

from __future__ import annotations

import pytest
from torch import nn

from hocket.errors import ModelError
from hocket.run.engine.executor import TrainableCheck


@pytest.mark.parametrize("trained", [True, False])
def test_names_the_parameter_and_both_sides(trained: bool) -> None:
    """Frozen or thawed; put back, training goes on."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(requires_grad=trained)
    same = TrainableCheck(dict(model.named_parameters()))
    same.check(0)
    model[1].requires_grad_(requires_grad=not trained)
    with pytest.raises(ModelError) as raised:
        same.check(7)
    expected = (
        f"requires_grad of 1.weight (and of 1 more) was {trained} when the pipeline "
        f"was made, and is {not trained} at step 7"
    )
    assert expected in str(raised.value)
    assert "make another pipeline" in str(raised.value)
    model[1].requires_grad_(requires_grad=trained)
    same.check(8)


def test_one_alone() -> None:
    """Says nothing of others."""
    layer = nn.Linear(3, 3)
    same = TrainableCheck(dict(layer.named_parameters()))
    layer.bias.requires_grad = False
    with pytest.raises(ModelError, match="requires_grad of bias was True"):
        same.check(1)


def test_a_stage_without_parameters() -> None:
    """Has none that could change."""
    TrainableCheck({}).check(3)
