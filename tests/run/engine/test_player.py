"""The player does what its table says, in the schedule's order: no model, no worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import Batches, NetBatches, StepBatch
from hocket.run.device.cpu import CpuDevice
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.action import Instruction, OpAction, Playing
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import Portion, plan_to_play
from hocket.run.engine.lanes.player import OpTable, Player
from hocket.schedules import make_schedule

ORDER = make_schedule("1f1b", num_devices=2, num_microbatches=3)


class NotingTable(OpTable):
    """Notes what it is asked to do; each op is timed, and one of them may fail."""

    def __init__(self, *, fails: str = "") -> None:
        self.torch_device = torch.device("cpu")
        self.log: list[str] = []
        self.asked: list[Op] = []
        self._fails = fails

    def action(self, op: Op) -> OpAction:
        """Return what notes the op, with the step and the microbatch of its batch."""
        self.asked.append(op)

        def compute(one: Playing) -> None:
            one.timer.start()
            self.log.append(f"{op} of step {one.batch['model'].step.number}")
            if str(op) == self._fails:
                raise ValueError(f"{op} fails")
            one.received, one.made = (op, one.index), len(self.log)
            one.timer.end()

        def put(one: Playing) -> None:
            assert one.received == (op, op.microbatch or 0)
            assert one.made == len(self.log)

        return OpAction(
            [Instruction("compute", compute), Instruction("put", put)],
            op.microbatch or 0,
        )

    def begin(self, steps: Any) -> None:
        """Note it."""
        self.log.append(f"begin step {steps['model'].number}")

    def begin_portion(self, portion: Portion, first: int, batches: Batches) -> None:
        """Note it."""
        self.log.append(f"begin {portion.value}")

    def begin_step_end(self) -> None:
        """Note it."""
        self.log.append("step end")

    def take_finished(self) -> None:
        """Note it."""
        self.log.append("take")

    def leave_portion(self) -> None:
        """Note it."""
        self.log.append("leave")

    def end_portion(self, portion: Portion, first: int, batches: Batches) -> None:
        """Note it."""
        self.log.append(f"end {portion.value}")


def batch_of(number: int, *, ends_step: bool = True) -> NetBatches:
    """A batch of three samples, each of them a microbatch."""
    parts = tuple(Microbatch((), None, 1) for _ in range(3))
    step = StepHeader(number, 0, 3, (1, 1, 1))
    return {"model": StepBatch(step, parts, ends_step)}


def played(
    table: NotingTable, device: int = 0, *, ends_step: bool = True
) -> tuple[Player, OpTimes]:
    """Play step 7 of the order."""
    player = Player(plan_to_play(ORDER), device, table, FlightRecorder())
    return player, player.play(Portion.STEP, 7, {7: batch_of(7, ends_step=ends_step)})


def noting(table: NotingTable, text: str) -> OpAction:
    """An action that notes a text."""
    return OpAction([Instruction("note", lambda _: table.log.append(text))])


def ops_in(table: NotingTable) -> list[str]:
    """The ops that were played, in their order, as the schedule writes them."""
    return [text.split()[0] for text in table.log if " of step " in text]


@pytest.mark.parametrize("device", [0, 1])
def test_ops_are_played_in_the_order_of_the_lane(device: int) -> None:
    """The order of each device, between what stands around the portion."""
    table = NotingTable()
    played(table, device=device)
    assert ops_in(table) == [str(op) for op in ORDER.lanes[device].ops]
    assert table.log[0] == "begin step"
    assert table.log[-2:] == ["leave", "end step"]


def test_an_action_is_made_once_for_all_steps() -> None:
    """Also where prologue, body and epilogue play the same op in several steps."""
    order = make_schedule(
        "pipedream-2bw", num_devices=2, num_microbatches=2, num_steps=6
    )
    table = NotingTable()
    Player(plan_to_play(order), 0, table, FlightRecorder())
    assert len(table.asked) == len({*table.asked})
    assert {op.step for op in table.asked} == {0}


def test_steps_of_a_portion_get_their_own_batches() -> None:
    """A body of an order without flushes has ops of several steps."""
    order = make_schedule(
        "pipedream-2bw", num_devices=2, num_microbatches=3, num_steps=6
    )
    plan, table = plan_to_play(order), NotingTable()
    player = Player(plan, 0, table, FlightRecorder())
    batches = {4 + i: batch_of(104 + i) for i in range(plan.num_steps)}
    player.play(Portion.PROLOGUE, 4, batches)
    lane = plan.portions[Portion.PROLOGUE].lanes[0]
    found = [text.split() for text in table.log if " of step " in text]
    assert [int(x[-1]) - 104 for x in found] == [one.op.step for one in lane]
    assert len({x[-1] for x in found}) > 1


def test_a_batch_that_does_not_end_its_step_has_no_reductions_and_updates() -> None:
    """Gradients of several batches add up until the last one."""
    table = NotingTable()
    played(table, ends_step=False)
    own = [op for op in ORDER.lanes[0].ops if op.kind is not Kind.UPDATE]
    assert ops_in(table) == [str(op) for op in own]
    assert "step end" not in table.log


def test_an_update_is_announced() -> None:
    """Messages that stand before an R or U must be there before it may wait."""
    table = NotingTable()
    played(table)
    update = next(i for i, text in enumerate(table.log) if text.startswith("0U"))
    assert table.log[update - 1] == "step end"
    assert table.log.count("step end") == 1


def test_finished_reductions_are_taken_between_ops() -> None:
    """Behind each of them."""
    table = NotingTable()
    played(table)
    behind = [i + 1 for i, text in enumerate(table.log) if " of step " in text]
    assert [i for i, text in enumerate(table.log) if text == "take"] == behind


def test_a_failing_op_is_reported_and_ends_the_portion() -> None:
    """The reporter gets the op and its step, and the error is raised as it is."""
    table, seen = NotingTable(fails="0B1"), list[tuple[str, int, str]]()
    player = Player(
        plan_to_play(ORDER),
        0,
        table,
        FlightRecorder(),
        on_error=lambda op, step, error: seen.append((str(op), step, str(error))),
    )
    with pytest.raises(ValueError, match="0B1 fails"):
        player.play(Portion.STEP, 7, {7: batch_of(7)})
    assert seen == [("0B1", 7, "0B1 fails")]
    assert table.log[-1] == "leave"
    assert ops_in(table)[-1] == "0B1"


def test_times_are_those_of_the_ops() -> None:
    """In the lane's order; each one begins when the one before has ended."""
    player, times = played(NotingTable())
    (start_s,), (end_s,) = times.start_s, times.end_s
    assert len(start_s) == times.num_ops == len(ORDER.lanes[0].ops)
    assert (start_s > 0.0).all()
    assert (start_s <= end_s).all()
    assert (end_s[:-1] <= start_s[1:]).all()
    busy_s, last_s = player.worked_s(Portion.STEP, times)
    assert busy_s == pytest.approx(float((end_s - start_s).sum()))
    assert last_s == end_s[-1]


def test_a_table_is_printed() -> None:
    """One line for each op: what is done, in its order."""
    player, _ = played(NotingTable())
    lines = str(player).splitlines()
    ops = ORDER.lanes[0].ops
    assert lines == [f"{op}    compute │ put" for op in ops]


@pytest.fixture
def lanes() -> Iterator[CpuDevice]:
    """A device of two lanes."""
    with CpuDevice(2, budget_bytes=1 << 30, timeout_s=10.0) as device:
        yield device


def test_ops_of_several_lanes_wait_for_each_other(lanes: CpuDevice) -> None:
    """Each W comes after its I, which another lane plays; and U after all of them."""
    order = Schedule.parse(
        "net model microbatches=3\nstage 0 net=model device=0\n"
        "d0    0F0 0I0 0F1 0I1 0F2 0I2 0U\nd0.1  0W0 0W1 0W2\n"
    )
    table = NotingTable()
    player = Player(plan_to_play(order), 0, table, FlightRecorder(), lanes=lanes)
    for step in range(5):
        table.log.clear()
        player.play(Portion.STEP, step, {step: batch_of(step)})
        found = ops_in(table)
        assert len(found) == len({*found}) == 10
        assert all(found.index(f"0I{m}") < found.index(f"0W{m}") for m in range(3))
        assert found[-1] == "0U"


def test_ops_of_another_net_are_played_between(lanes: CpuDevice) -> None:
    """They stand where the filled order has them, and are in none of the times."""
    table = NotingTable()
    table.takes_others = True
    player = Player(plan_to_play(ORDER), 0, table, FlightRecorder())
    assert player.takes_others
    first, last = Op(Kind.FORWARD, 2, 0), Op(Kind.FORWARD, 2, 1)
    lane = ORDER.lanes[0]
    filled = Schedule(
        ORDER.program,
        (
            type(lane)(0, 0, (first, *lane.ops[:3], last, *lane.ops[3:])),
            *ORDER.lanes[1:],
        ),
    )
    others = {op: noting(table, str(op)) for op in (first, last)}
    player.play_others(filled, others)
    times = player.play(Portion.STEP, 7, {7: batch_of(7)})
    found = [text for text in table.log if text in {"2F0", "2F1"} or " of " in text]
    assert found.index("2F0") == 0
    assert found.index("2F1") == 4
    assert times.num_ops == len(lane.ops)
    assert not Player(
        plan_to_play(ORDER), 0, NotingTable(), FlightRecorder()
    ).takes_others
