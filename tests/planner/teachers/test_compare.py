"""Whether a teacher is worth a pipeline, on toys whose times are known."""

from __future__ import annotations

import pytest

from hocket.errors import PlanError
from hocket.planner.teachers.compare import Comparison, TeacherJob, compare
from tests.planner.toys import MIB, cluster, work

SECONDS = 32 * (8 * 0.03 + 8 * 0.01) / 4  # 32 samples through both nets, 4 devices


def compared(
    delay: int | None,
    *,
    memory_bytes: int = 10**12,
    teacher_bytes: int = 8 * MIB,
    num_layers: int = 8,
) -> Comparison:
    """A student of 8 layers and a teacher of as many, or of others, on 4 devices."""
    teacher = work(num_layers, weight_bytes=teacher_bytes, message_bytes=0)
    job = TeacherJob(work(8, message_bytes=0), teacher, delay, batch_size=32)
    return compare(job, cluster(4, memory_bytes=memory_bytes))


@pytest.mark.parametrize("delay", [None, 0, 1])
def test_nets_that_fit_a_device_are_not_worth_a_pipeline(delay: int | None) -> None:
    """Data parallelism has no bubble, and a fast link hides its reductions."""
    found = compared(delay)
    assert found.data_parallel_s == pytest.approx(SECONDS, rel=0.01)
    assert found.sentence.endswith("this teacher is not worth a pipeline.")


@pytest.mark.parametrize("delay", [None, 1])
def test_a_teacher_that_fits_no_device_fills_a_pipeline(delay: int | None) -> None:
    """Ahead, its forwards leave no bubble; with the same batch's there is one."""
    found = compared(delay, memory_bytes=400 * MIB, teacher_bytes=64 * MIB)
    best = found.pipeline
    assert found.data_parallel is None
    assert best is not None
    assert best.step_s == pytest.approx(SECONDS, rel=0.01)
    assert best.same_batch_s > 1.05 * best.step_s
    assert best.peak_bytes <= 400 * MIB
    assert "times as fast as with the teacher of the same batch" in found.sentence
    assert found.sentence.endswith("data parallelism does not fit.")


def test_without_delay_nothing_is_ahead() -> None:
    """Both times are one, and the sentence speaks of no gain."""
    found = compared(0, memory_bytes=400 * MIB, teacher_bytes=64 * MIB)
    best = found.pipeline
    assert best is not None
    assert best.step_s == best.same_batch_s > SECONDS
    assert "times as fast" not in found.sentence


def test_a_frozen_teacher_balances_the_students_devices() -> None:
    """Of 4 layers, each as long as a forward of the student: devices are even."""
    found = compared(
        None, memory_bytes=400 * MIB, teacher_bytes=128 * MIB, num_layers=4
    )
    assert found.pipeline is not None
    work_s = 32 * (8 * 0.03 + 4 * 0.01) / 4
    assert found.pipeline.step_s == pytest.approx(work_s, rel=0.03)


def test_little_memory_fits_neither() -> None:
    """The sentence says so."""
    found = compared(1, memory_bytes=20 * MIB)
    assert found.pipeline is None
    assert found.sentence == "Neither a pipeline nor data parallelism fits the memory."


def test_a_teacher_that_follows_has_no_more_layers_than_the_student() -> None:
    """It may have fewer: the student has a predictor."""
    assert compared(1, num_layers=6).pipeline is not None
    with pytest.raises(PlanError, match="has 9 layers, and the student 8"):
        compared(1, num_layers=9)
