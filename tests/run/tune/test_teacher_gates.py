"""One gate over all of a student's stages, though its teacher is a batch ahead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run.support.forked import answers_of

DELAYS = [None, 0, 1, 2]  # None: a frozen teacher


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_no_stage_is_updated_from_a_step_with_a_bad_gradient(
    num_workers: int, tmp_path: Path
) -> None:
    """As in the order that was filled: all workers stop, with the same error.

    The gradient of stage 0 alone is not finite, and complete after that of stage 1.
    """
    for worker in answers_of(
        "tests.run.support.gated_teachers:train_fragile",
        DELAYS,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    ):
        for kind, words, num_done, is_same in worker:
            assert kind == "NonFiniteError"
            assert re.fullmatch(
                "the losses of step 4 are finite, its gradients are not: the first "
                r"at fault is that of 0\.weight, stage \d; no weights were updated "
                "from it",
                words,
            )
            assert num_done == 4
            assert is_same


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_loss_scale_goes_with_a_teacher_ahead(
    num_workers: int, tmp_path: Path
) -> None:
    """Skips the steps that torch's scaler skips, and no teacher moves in them.

    Whether step k overflowed is known before the student begins with step k + 1; the
    teacher's forwards, which began, do not depend on the loss scale.
    """
    for worker in answers_of(
        "tests.run.support.gated_teachers:train_in_float16",
        DELAYS,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    ):
        for answer in worker:
            assert answer["skipped"] == answer["expected"]
            assert 0 < sum(answer["skipped"]) < len(answer["skipped"])
            assert answer["off"] < 1e-3
