"""PyTorch's compute-only CSV, in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from torch.distributed.pipelining.schedules import _Action

from hocket.errors import ParseError, PlanError
from hocket.plan.op import Kind
from hocket.plan.program import Program
from hocket.plan.schedule import Schedule
from hocket.plan.torch_csv import from_csv, to_csv
from hocket.schedules import SCHEDULES, make_schedule

ORDER: Final = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_writes_what_the_documents_show() -> None:
    """One row per device, compute alone."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    assert to_csv(schedule) == ORDER


def test_reads_holes_and_adds_the_updates() -> None:
    """torch writes an empty cell where it expects a device to wait."""
    text = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,\n\n"
    schedule = from_csv(text)
    assert schedule == make_schedule("1f1b", num_devices=2, num_microbatches=2)


def test_reads_split_backwards() -> None:
    """I and W are ops like any other; the update follows the last W."""
    schedule = from_csv("0F0,0I0,0W0\n")
    assert str(schedule) == "d0  0F0 0I0 0W0 0U"


def test_a_file_comes_back(tmp_path: Path) -> None:
    """Through a path, as users do it."""
    schedule = make_schedule("gpipe", num_devices=3, num_microbatches=2)
    schedule.to_csv(tmp_path / "order.csv")
    assert Schedule.from_csv(tmp_path / "order.csv") == schedule


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"chimera"}))  # two nets
def test_torch_reads_every_cell(name: str) -> None:
    """Each cell is an action to torch, and prints as we wrote it."""
    text = to_csv(make_schedule(name, num_devices=2, num_microbatches=4))
    for cell in text.replace("\n", ",").rstrip(",").split(","):
        assert str(_Action.from_str(cell)) == cell


def test_reductions_are_implied() -> None:
    """Replicas are no matter of the order's, to torch."""
    replicated = make_schedule(
        "1f1b", num_devices=2, num_microbatches=2, num_replicas=2
    )
    assert any(op.kind is Kind.REDUCE for op in replicated.lanes[0].ops)
    assert to_csv(replicated) == ORDER


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no ops in the file"),
        ("0F0,0B0\n,,\n1F0", "line 2: device 1 has no ops"),
        ("0F0,0B0\n1F0,1X0\n", "line 2: '1X0' is not an op"),
        ("0F0,0U\n", "line 1: '0U' is not a forward or backward"),
        ("0F0,0SEND_F0>1\n", "line 1: '0SEND_F0>1' is not a forward or backward"),
        ("0F0@1\n", "line 1: '0F0@1' is not a forward or backward of one step"),
        ("0UNSHARD\n", "line 1: '0UNSHARD' is not an op"),
        ("0F0\n0B0\n", "stage 0 runs on device 0 and, as 0B0, on device 1"),
        ("0F0\n2F0\n", "no op of stage 1"),
    ],
)
def test_names_what_cannot_be_read(text: str, reason: str) -> None:
    """With the path, and the line where there is one."""
    with pytest.raises(ParseError) as caught:
        from_csv(text, path="order.csv")
    assert str(caught.value).startswith("order.csv")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (
            make_schedule("1f1b", num_devices=2, num_microbatches=2, num_steps=2),
            "holds one step, this order has 2",
        ),
        (
            Schedule.parse("d0  0F0 0I0 0U\nd0.1  0W0"),
            "this order has lanes d0, d0.1",
        ),
        (
            Schedule(Program.chain([0], 1, delays=[1]), ()),
            "no delays; this program is more",
        ),
        (
            Schedule(Program.chain([0], 1, batch_loss=True), ()),
            "a loss per microbatch",
        ),
    ],
)
def test_refuses_what_the_format_cannot_hold(schedule: Schedule, reason: str) -> None:
    """Rather than to write an order that means something else."""
    with pytest.raises(PlanError, match=reason):
        to_csv(schedule)
