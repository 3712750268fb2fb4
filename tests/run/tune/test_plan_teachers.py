"""`hocket.plan` with teachers: what one ahead gains, or that it gains nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import PlanError
from hocket.planner.ranking.report import Ranking

WIDTH = 1024


def net(num_blocks: int) -> nn.Sequential:
    """Equal blocks, on the meta device."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(num_blocks)
        )
    )


def never(output: Tensor, targets: Tensor, teachers: object) -> Tensor:
    """Stand for a loss that reads its teachers; a plan has no outputs of theirs."""
    raise AssertionError("it is not counted")


def planned(memory_bytes: int, hardware: str | None = "v100-32g") -> Ranking:
    """A plan of a student, a frozen teacher and a momentum teacher."""
    with torch.device("meta"):
        student, teacher = net(8), net(16)
        batch = torch.empty(8, 64, WIDTH), torch.empty(8)
    teachers = {
        "teacher": hocket.Teacher(teacher),
        "slow": hocket.Teacher(student, update=hocket.Momentum(0.99), delay=1),
    }
    return hocket.plan(
        student,
        batch,
        never,
        teachers=teachers,
        num_devices=2,
        hardware=hardware,
        memory_bytes=memory_bytes,
        search=hocket.Search(schedules=("1f1b",)),
    )


def test_both_nets_on_every_device_are_faster_where_they_fit() -> None:
    """A sentence for each teacher says so."""
    notes = [note for note in planned(32 << 30).notes if note.startswith("With ")]
    assert [note.split(":")[0] for note in notes] == ["With teacher", "With slow"]
    assert all("not worth a pipeline" in note for note in notes)


def test_a_pipeline_is_chosen_where_nothing_else_fits() -> None:
    """With what it gains over the teacher of the same batch."""
    notes = [note for note in planned(950 << 20).notes if note.startswith("With ")]
    assert "data parallelism does not fit" in notes[0]
    assert "times as fast as with the teacher of the same batch" in notes[0]


def test_a_kind_of_device_is_needed() -> None:
    """Nothing is measured of a teacher here."""
    with pytest.raises(PlanError, match=r"teachers teacher, slow .*hardware="):
        planned(32 << 30, None)
