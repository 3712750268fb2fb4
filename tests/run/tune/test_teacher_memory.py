"""What a teacher adds to the memory of the order that it fills: no activations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.support.forked import answers_of


@pytest.mark.timeout(120)
def test_a_teacher_saves_nothing_for_a_backward(tmp_path: Path) -> None:
    """And the student keeps as many microbatches as 1F1B does: p - j on device j.

    Nothing is left behind from step to step.
    """
    answers = answers_of("teacher_memory:kept", str(tmp_path), folder=tmp_path)
    for device, worker in enumerate(answers):
        for found in worker:
            saved = found["saved"]
            assert saved.pop("model") > 0
            assert all(num == 0 for num in saved.values())
            assert found["most"] == 2 - device
            assert len(set(found["alive"])) == 1
    moving = [worker[1]["saved"] for worker in answers]
    assert all(list(saved) == ["teacher"] for saved in moving)
