"""PipeTransformer's schedule, to the table that its released code computes."""

from __future__ import annotations

import pytest

from hocket.errors import ConfigError
from hocket.freeze import Alpha
from hocket.freeze.policy import Decider, num_frozen_after

TABLE = [
    (1 / 2, 12, "0 6 9 11 12 12 12 12 12 12"),
    (2 / 5, 12, "0 5 8 10 11 12 12 12 12 12"),
    (1 / 3, 12, "0 4 7 9 10 11 11 12 12 12"),
    (1 / 4, 12, "0 3 6 7 9 10 10 11 11 12"),
    (1 / 5, 12, "0 3 5 6 8 9 9 10 10 11"),
    (0.07, 12, "0 1 2 3 4 4 5 5 6 6"),
    (1 / 3, 24, "0 8 14 17 20 21 22 23 24 24"),
]


@pytest.mark.parametrize(("alpha", "num_layers", "expected"), TABLE)
def test_equals_the_published_table(
    alpha: float, num_layers: int, expected: str
) -> None:
    """Layers frozen in epochs 0 to 9."""
    decider = Decider(Alpha(alpha), num_layers)
    found = [0] + [decider.ask(epoch) for epoch in range(1, 10)]
    assert found == [int(x) for x in expected.split()]


@pytest.mark.parametrize("alpha", [4e-5, 1e-12, 5e-324])
def test_a_small_share_freezes_too(alpha: float) -> None:
    """Past bug: below 5e-5 it was rounded to 0, and nothing ever froze."""
    assert num_frozen_after(alpha, 12, 0) == 0
    assert num_frozen_after(alpha, 12, 1) == 1
    assert num_frozen_after(6e-5, 10_000, 3) == 2  # 1.8, where 1e-4 comes to 3.0


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_is_between_0_and_1(alpha: float) -> None:
    """At 1 nothing would be left to train; at 0 nothing would freeze."""
    with pytest.raises(ConfigError, match=r"alpha is .*: it must be above 0"):
        Alpha(alpha)


def test_is_due_at_epochs_or_every_few_steps() -> None:
    """With every_steps the ends of epochs count for nothing, and vice versa."""
    at_epochs = Decider(Alpha(1 / 2), 4)
    assert at_epochs.is_due(7, epoch_ended=True)
    assert not at_epochs.is_due(7, epoch_ended=False)
    by_steps = Decider(Alpha(1 / 2, every_steps=3), 4)
    due = [n for n in range(1, 8) if by_steps.is_due(n, epoch_ended=False)]
    assert due == [3, 6]
    assert not by_steps.is_due(7, epoch_ended=True)
    with pytest.raises(ConfigError, match="every_steps is 0"):
        Alpha(1 / 2, every_steps=0)
