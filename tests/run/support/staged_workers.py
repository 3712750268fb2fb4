"""What workers of staged messages do: train, with copies that take time."""

from __future__ import annotations

from typing import Any

import pytest

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
