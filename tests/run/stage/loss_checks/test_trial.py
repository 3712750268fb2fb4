"""What a loss changes while it is tried out is undone, and nothing else."""

from __future__ import annotations

from typing import Any

from hocket.run.stage.loss_checks.trial import restored_attributes
from hocket.run.stage.stage_loss import LossValues


def test_what_the_library_counts_is_not_undone() -> None:
    """Past bug: a loss that reached its job set back the messages that it had sent."""
    counts, values = {"calls": 0}, LossValues(0, None)

    def loss(*given: Any) -> Any:
        return counts, values

    with restored_attributes(loss):
        counts["calls"], values.outcome = 1, "changed"
    assert counts == {"calls": 0}
    assert values.outcome == "changed"
