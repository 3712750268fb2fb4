"""Which modules count as layers, and which decisions are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hocket.errors import ConfigError
from hocket.freeze.policy import Decider, LayerObservation, Planned, Policy
from hocket.run.nets.freezable import blocks_in, blocks_matching


@dataclass(frozen=True, slots=True)
class Listed(Planned):
    """A policy of a user's own: decides what a list says."""

    numbers: tuple[int, ...]

    def decide(self, state: None, seen: LayerObservation) -> int:
        """The next of the list."""
        return self.numbers[seen.number - 1]


def test_a_sequence_without_inner_lists_keeps_its_last_child() -> None:
    """It is the head, which never freezes."""
    assert blocks_in({"": [("0", 4), ("1", 4), ("2", 1)]}, 9) == ["0", "1"]


def test_small_lists_inside_blocks_are_not_mistaken() -> None:
    """Each block's own sequence holds less than half of the parameters."""
    blocks = [(f"blocks.{i}", 10) for i in range(3)]
    inner = {f"blocks.{i}.mlp": [("a", 4), ("b", 4)] for i in range(3)}
    found = blocks_in({"blocks": blocks, **inner}, 100)
    assert found == [name for name, _ in blocks]


def test_refuses_a_model_without_lists() -> None:
    """And says how layers can be named."""
    with pytest.raises(ConfigError, match=r"encoder\.layers"):
        blocks_in({"": [("0", 4), ("1", 0)]}, 4)
    with pytest.raises(ConfigError, match="names no module"):
        blocks_matching("encoder.*", ["body.0"])


def test_a_policy_of_the_users_own_is_one() -> None:
    """By its methods; it inherits only what it wants to."""
    policy = Listed((1, 2, 5))
    assert isinstance(policy, Policy)
    decider = Decider(policy, 4)
    assert [decider.ask(1), decider.ask(2)] == [1, 2]
    with pytest.raises(ConfigError, match="Listed freezes 5 layers after step 3, of 4"):
        decider.ask(3)


@dataclass(frozen=True, slots=True)
class Keeps(Listed):
    """Keeps a list in its state."""

    def observe(self, state: Any, seen: LayerObservation) -> Any:
        """The state with a list in it."""
        return (1, ("a", [2]))


def test_refuses_a_state_that_no_checkpoint_can_hold() -> None:
    """At the first decision, not at the first save."""
    with pytest.raises(ConfigError, match="state of Keeps holds a list after step 1"):
        Decider(Keeps((1,)), 4).ask(1)
