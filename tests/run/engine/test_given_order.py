"""A pipeline plays the order of a file, or says what is wrong with it and where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket.core.formats.given import read_schedule
from hocket.core.op import Kind
from hocket.errors import ParseError, PlanError, ScheduleError, ShapeError
from hocket.schedules import make_schedule
from tests.run.support.plainly import SGD
from tests.run.support.started import started

NUM_STEPS = 7
GOOD = "0F0,0F1,0I0,0I1,0W0,0W1\n"


def pipeline(order: str | Path) -> hocket.Pipeline:
    """Of one device, which plays two microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    return started(
        model,
        nn.functional.cross_entropy,
        SGD,
        (torch.randn(4, 3), torch.tensor([0, 1, 1, 0])),
        schedule=order,
    )


def test_plays_the_order_of_a_file(free_dir: Path) -> None:
    """Named by a string or a path; as CSV, or as text."""
    Path("order.csv").write_text(GOOD)
    Path("order.txt").write_text("d0  0F0 0F1 0I0 0I1 0W0 0W1 0U")
    for order in ("order.csv", "order.txt", Path("order.csv"), "./order.txt"):
        with pipeline(order) as found:
            ops = " ".join(str(op) for op in found.plan.schedule.lanes[0].ops)
            assert ops == "0F0 0F1 0I0 0I1 0W0 0W1 0U"
            assert found.plan.schedule_name == str(order)


def test_reductions_of_replicas_are_added(free_dir: Path) -> None:
    """A CSV does not say how many replicas there are."""
    order = make_schedule("zb-v", num_devices=2, num_microbatches=4)
    order.to_csv("order.csv")
    replicated = make_schedule(
        "zb-v", num_devices=2, num_microbatches=4, num_replicas=3
    )

    assert read_schedule(Path("order.csv"), num_replicas=3) == replicated
    assert any(op.kind is Kind.REDUCE for op in replicated.lanes[0].ops)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("0F0,0B0\n", ShapeError, "1 microbatches, not 2 (num_microbatches=1 fits"),
        (
            "0F0,0B0\n1F0,1B0\n",
            ShapeError,
            "2 devices, not 1 (one worker for each), and 1 mi",
        ),
        ("0F0,0F1,0B0;0B1\n", ParseError, "order.csv, line 1, cell 3: '0B0;0B1' is no"),
        (
            GOOD.replace(",0W1", ""),
            ScheduleError,
            "order.csv, line 1, cell 4: for microbatch 1, stage 0 has 0F1 0I1; "
            "expected 0F1 0B1, or 0F1 0I1 0W1",
        ),
        (
            GOOD.replace("0W1", "0W0,0W1"),
            ScheduleError,
            "order.csv, line 1, cell 6: 0W0 is there again, after order.csv, line 1, "
            "cell 5; expected each op once",
        ),
        ("0F0,0F1,0B1,0I0,0W0,0F2\n", ScheduleError, "cell 6: for microbatch 2, stage"),
    ],
)
def test_says_what_is_wrong_with_a_file(
    free_dir: Path, text: str, kind: type[PlanError], reason: str
) -> None:
    """Before anything runs, with the line and the cell where there is one."""
    Path("order.csv").write_text(text)
    with pytest.raises(kind) as caught:
        pipeline("order.csv")
    assert reason in str(caught.value)


def test_a_file_that_is_not_there(free_dir: Path) -> None:
    """A path is not taken for a name."""
    with pytest.raises(ParseError, match=r"^none\.csv: cannot be read: No such file"):
        pipeline("none.csv")


def test_gradients_of_two_steps_are_complete_at_once(free_dir: Path) -> None:
    """Those of the later step wait for the update of the earlier one."""
    Path("order.txt").write_text(
        "steps 3\nnet model microbatches=2\nstage 0 net=model device=0 delay=2\n"
        "d0  0F0 0F1 0B0 0B1 |: 0F0@1 0F1@1 0B0@1 0B1@1 0U :| "
        "0F0@2 0F1@2 0B0@2 0B1@2 0U@1 0U@2"
    )
    torch.manual_seed(1)
    batches = [
        (torch.randn(4, 3), torch.tensor([0, 1, 1, 0])) for _ in range(NUM_STEPS)
    ]
    with pipeline("order.txt") as trained:
        losses = [result.loss for result in trained.train(batches)]
        program = trained.plan.schedule.program
        state = trained.state_dict()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    expected = hocket.emulate(
        program,
        model,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batches,
    )
    assert losses == [each["loss"] for each in expected]
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
