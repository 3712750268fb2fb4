"""Pipelines whose messages go by way of the host, as on a GPU that workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run.support.comparison import case, check_runs
from tests.run.support.delayed_copies import DelayedCopies
from tests.run.support.exactness import train_all

DELAY_S = 0.0005


def train_staged(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train every case; no copy's memory may be used before its copy has ended."""
    made = []

    def copies_of(_: object) -> DelayedCopies:
        made.append(DelayedCopies(DELAY_S))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.run.comm.transports.copies_of", copies_of)
        answers = train_all(cases, folder)
    assert len(made) >= len(cases)
    assert not any(copies.faults for copies in made)
    return answers


CASES = [
    case("tied-dropout", "1f1b", 4),
    case("perceptron", "zb-v", 4),
    case("perceptron", "gpipe", 2, num_replicas=2),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_staged_messages_train_the_same_weights(
    tmp_path: Path, *, shares_memory: bool
) -> None:
    """Each copy to the host ends half a millisecond late, over both transports."""
    cases = CASES if shares_memory else [{**CASES[0], "transport": "torch"}]

    check_runs(cases, 2, tmp_path, whole_s=120.0, entry=f"{__name__}:train_staged")
