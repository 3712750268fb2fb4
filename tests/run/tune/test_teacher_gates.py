"""One gate over all of a student's stages, though its teacher is a batch ahead."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hocket.core.gates import flushes
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.run.engine.refusals import refuse_settings
from hocket.run.weights.settings import TrainingConfig
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
        "gated_teachers:train_fragile",
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
@pytest.mark.parametrize(("num_workers", "delays"), [(1, DELAYS[::2]), (2, DELAYS)])
def test_a_loss_scale_goes_with_a_teacher_ahead(
    num_workers: int, delays: list[int | None], tmp_path: Path
) -> None:
    """Skips the steps that torch's scaler skips, and no teacher moves in them.

    Whether step k overflowed is known before the student begins with step k + 1; the
    teacher's forwards, which began, do not depend on the loss scale.
    """
    for worker in answers_of(
        "gated_teachers:train_in_float16",
        delays,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    ):
        for answer in worker:
            assert answer["skipped"] == answer["expected"]
            assert 0 < sum(answer["skipped"]) < len(answer["skipped"])
            assert answer["off"] < 1e-3


# A filled order whose first device has nothing that is trained.
FROZEN_DEVICE = """steps 3
repeats 2
net t microbatches=1
net s microbatches=1
stage 0 net=t device=0 trainable=no
stage 1 net=s device=0 trainable=no
stage 2 net=s device=1
flow 1>2
flow 0>2
d0  0F0 |: 1F0 0F0@1 1F0@1 0F0@2 :| 1F0@2
d1  |: 2F0 2B0 2U 2F0@1 2B0@1 2U@1 :| 2F0@2 2B0@2 2U@2"""


def test_a_device_without_gradients_knows_no_loss_scale() -> None:
    """It works for the next batch before it could hear of an overflow."""
    schedule = Schedule.parse(FROZEN_DEVICE)
    assert flushes(schedule)
    settings = TrainingConfig(optimizer=torch.optim.AdamW, precision="float16")
    with pytest.raises(ConfigError, match="device 0 has no stage that is trained"):
        refuse_settings(settings, schedule)
    refuse_settings(replace(settings, precision="bfloat16"), schedule)
