"""Plasticity: a layer freezes when it is flat; a lower rate brings all back."""

from __future__ import annotations

from hocket.freeze import Plasticity
from hocket.freeze.policy import Decider


def test_freezes_the_first_layer_when_it_is_flat() -> None:
    """It falls, then stays; the second layer is watched only from then on."""
    policy = Plasticity(window=2, patience=2)
    decider, found = Decider(policy, 3), []
    for number, value in enumerate([8.0, 4.0, 2.0, 1.9, 1.9, 1.9]):
        found.append(decider.ask(number, 1.0, (value, 9.0, 9.0)))
    assert found == [0, 0, 0, 0, 1, 1]


def test_a_layer_that_keeps_falling_does_not_freeze() -> None:
    """Every slope is as steep as the steepest."""
    decider = Decider(Plasticity(window=2, patience=1), 2)
    assert [decider.ask(n, 1.0, (9.0 - n, 0.0)) for n in range(6)] == [0] * 6


def test_unfreezes_all_at_a_tenth_of_the_rate() -> None:
    """And watches from the first layer on again."""
    decider = Decider(Plasticity(window=2, patience=1), 3)
    falling = [9.0, 5.0, 4.9, 4.9]
    for number, value in enumerate(falling):
        decider.ask(number, 1.0, (value, 9.0 - number, 3.0))
    assert decider.num_frozen == 1
    assert decider.ask(5, 0.11, (0.0, 4.0, 3.0)) == 1
    assert decider.ask(6, 0.1, (0.0, 3.0, 3.0)) == 0
    assert decider.ask(7, 0.1, (2.0, 3.0, 3.0)) == 0


def test_what_is_no_number_freezes_nothing() -> None:
    """A layer whose activations overflow is not flat."""
    decider = Decider(Plasticity(window=2, patience=1), 2)
    assert [decider.ask(n, 1.0, (float("nan"), 0.0)) for n in range(6)] == [0] * 6


def test_a_drop_between_two_decisions_unfreezes() -> None:
    """The rate that counts is that of the decision to freeze, not of the next one."""
    decider = Decider(Plasticity(window=2, patience=1), 3)
    for number, value in enumerate([9.0, 5.0, 4.9]):
        decider.ask(number, 1.0, (value, 9.0 - number, 3.0))
    assert decider.num_frozen == 1
    decider.ask(4, 0.1, (0.0, 4.0, 3.0))
    assert decider.ask(5, 0.1, (0.0, 3.0, 3.0)) == 0


def test_without_unfreezing_layers_stay_frozen() -> None:
    """Whatever the rate does."""
    decider = Decider(Plasticity(window=2, patience=1, unfreeze_at=None), 3)
    for number, value in enumerate([9.0, 5.0, 4.9]):
        decider.ask(number, 1.0, (value, 3.0, 3.0))
    assert decider.ask(4, 1e-9, (0.0, 3.0, 3.0)) == 1
