"""Who asks for the norm gets it, or an error that says why there is none."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from hocket.errors import WaitError
from hocket.run.weights.gradient_status import PendingGradientStatus
from hocket.run.weights.gradients import GradientStatus
from tests.run.support.forked import answers_of


def test_is_found_out_once() -> None:
    """And stays known when the pipeline has ended."""
    numbers = count(2)
    gradient_status = PendingGradientStatus(
        7, lambda: GradientStatus(float(next(numbers)))
    )
    assert gradient_status.status.norm == 2.0
    gradient_status.give_up()
    assert gradient_status.status.norm == 2.0


def test_what_failed_once_fails_again() -> None:
    """With the same words; no worker is asked a second time."""
    num_asked = 0

    def wait() -> GradientStatus:
        nonlocal num_asked
        num_asked += 1
        raise WaitError("rank 1 is gone")

    gradient_status = PendingGradientStatus(7, wait)
    for _ in range(2):
        with pytest.raises(WaitError, match="rank 1 is gone"):
            _ = gradient_status.status
    gradient_status.give_up()
    with pytest.raises(WaitError, match="rank 1 is gone"):
        _ = gradient_status.status
    assert num_asked == 1


@pytest.mark.timeout(120)
def test_after_the_end_the_norm_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Where steps overlap and the block around the pipeline failed."""
    answers = answers_of(
        "tests.run.support.training_workers:left_unread",
        str(tmp_path),
        num_workers=2,
        folder=tmp_path,
    )
    for message in (reported for worker in answers for reported in worker):
        assert "the norm of step 0's gradients is unknown" in message
