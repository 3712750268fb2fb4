"""Who looks at a value gets it, or an error that says why there is none."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from hocket.errors import WaitError
from hocket.run.device.late import Late
from tests.run.support.forked import answers_of


def test_is_read_once() -> None:
    """And stays known when the pipeline has ended."""
    numbers = count(2)
    late = Late(lambda: next(numbers))
    assert late.value == 2
    late.give_up(WaitError("it has ended"))
    assert late.value == 2


def test_what_failed_once_fails_again() -> None:
    """With the same words; no worker is asked a second time."""
    num_asked = 0

    def wait() -> int:
        nonlocal num_asked
        num_asked += 1
        raise WaitError("rank 1 is gone")

    late = Late(wait)
    for _ in range(2):
        with pytest.raises(WaitError, match="rank 1 is gone"):
            _ = late.value
    late.give_up(WaitError("it has ended"))
    with pytest.raises(WaitError, match="rank 1 is gone"):
        _ = late.value
    assert num_asked == 1


@pytest.mark.timeout(120)
def test_after_the_end_the_norm_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Where steps overlap and the block around the pipeline failed."""
    answers = answers_of("fragile_workers:left_unread", str(tmp_path), folder=tmp_path)
    for message in (reported for worker in answers for reported in worker):
        assert "the norm of step 0's gradients is unknown" in message
