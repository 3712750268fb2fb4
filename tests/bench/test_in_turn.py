"""Contestants in turn: who runs when, and what medians and ratios come to."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from bench.in_turn import (
    alternate,
    environment,
    paired_ratio,
    spread,
)
from hocket.run.cluster.world import join_world


def test_the_order_turns_round_after_every_round() -> None:
    """So that no contestant always follows the same one; warm rounds do not count."""
    ran: list[str] = []
    steps: dict[str, Any] = {x: (lambda x=x: ran.append(x)) for x in "abc"}
    with closing(join_world()) as world:
        seconds = alternate(steps, world, num_rounds=2, num_warm=1)

    assert "".join(ran) == "cbaabccba"
    assert {name: len(found) for name, found in seconds.items()} == dict.fromkeys(
        "abc", 2
    )


def test_ratios_are_of_medians_and_of_rounds() -> None:
    """Twice as long in every round is 2, however the rounds differ."""
    b = [1.0, 2.0, 3.0, 10.0]
    ratio = paired_ratio([2 * x for x in b], b)

    assert set(ratio.values()) == {2.0}
    assert spread(b)["median_ms"] == pytest.approx(2500.0)


def test_the_environment_says_when_and_where() -> None:
    """What a kept result is worth nothing without."""
    found = environment()

    assert found["num_cores"] >= 1
    assert len(found["date"]) == len("2026-01-01")
    assert found["torch"]
