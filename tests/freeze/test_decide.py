"""What a policy decides is a number of layers, or it is refused on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hocket.errors import ConfigError
from hocket.freeze import LayerObservation
from hocket.freeze.policy import Decider, Planned


@dataclass(frozen=True, slots=True)
class Decides(Planned):
    """Decides on anything."""

    value: Any

    def decide(self, state: None, seen: LayerObservation) -> int:
        """The value as it is."""
        found: int = self.value
        return found


@pytest.mark.parametrize("value", [np.int64(2), np.array(2), torch.tensor(2)])
def test_any_whole_number_is_one(value: object) -> None:
    """Past bug: a numpy integer stayed one, and could not be sent to the others."""
    decider = Decider(Decides(value), 4)
    found = decider.ask(7)
    assert (found, type(found), type(decider.num_frozen)) == (2, int, int)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "decides on 1.5 after step 7, a float that is no whole number"),
        (2.0, "decides on 2.0 after step 7, a float that is no whole number"),
        (None, "decides on None after step 7, a NoneType that is no whole number"),
        (torch.tensor(1.5), r"decides on tensor\(1.5000\) after step 7, a Tensor that"),
        (torch.ones(2).int(), ".* after step 7, a Tensor that is no whole number"),
        (-1, "freezes -1 layers after step 7, of 4"),
        (np.int64(5), "freezes 5 layers after step 7, of 4"),
    ],
)
def test_refuses_what_is_no_number_of_layers(value: object, text: str) -> None:
    """With the policy, the step, the value and what it may be."""
    decider = Decider(Decides(value), 4)
    with pytest.raises(ConfigError, match=f"Decides {text}.*: decide on 0 to 4"):
        decider.ask(7)
    assert decider.num_frozen == 0
