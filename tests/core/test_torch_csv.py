"""PyTorch's CSV, in and out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    _Action,
    _add_unshard_reshard,
)

from hocket.core.check import check
from hocket.core.formats.torch_csv import from_csv, to_csv
from hocket.core.op import SHARDING, STEP_ENDS, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.errors import ParseError, PlanError, ScheduleError
from hocket.passes.add_gathers import KEEPS, Keep, add_gathers, drop_gathers
from hocket.passes.add_messages import add_messages
from hocket.passes.split_backward import split_backward
from hocket.schedules import SCHEDULES, make_schedule
from tests.core.support.torch_actions import (
    Rows,
    actions_of,
    assert_torch_simulates,
    ends_over_one_queue,
    lowered_by_torch,
)
from tests.strategies import accepted

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


# Two nets; steps that are not flushed; one device alone.
NOT_TORCHS = {
    *("chimera", "tspipe"),  # several nets
    "reverse-first-k",
    *("pipedream", "pipedream-2bw", "wpipe", "wpipe-overlapped"),
}


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - NOT_TORCHS))
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


def test_messages_go_along_where_there_are_some() -> None:
    """torch names one stage of each, and divides the gradients where we say so."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    assert to_csv(add_messages(schedule)) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    )


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - NOT_TORCHS))
def test_torch_runs_what_it_would_write_itself(name: str) -> None:
    """Past bug: receives stood first, and torch's simulation found a deadlock.

    Messages stand where torch puts them into the same compute. So its simulation ends,
    and they do over one queue per rank, too.
    """
    for shape in [shape for shape in accepted(name) if shape.num_devices > 1][::4]:
        schedule = SCHEDULES[name].make(shape)
        rows = actions_of(to_csv(add_messages(schedule)))
        assert rows == lowered_by_torch(schedule)
        assert_torch_simulates(rows, schedule)
        assert ends_over_one_queue(rows, schedule)


def test_receives_that_are_posted_first_hold_up_one_queue() -> None:
    """What the tests above stand on: torch and the queue refuse such an order."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    rows = actions_of(
        "0RECV_B0,0F0,0SEND_F0,0F1,0SEND_F1,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )

    assert not ends_over_one_queue(rows, schedule)
    with pytest.raises((ValueError, IndexError)):  # torch fails to print where it is
        assert_torch_simulates(rows, schedule)


BUBBLES: Final = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,\n"
OVERLAPPED: Final = (
    "0F0,0F1,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3B1,,0B1\n"
    "1F0,2F0,1F1,(2F1;2B0)OVERLAP_F_B,1B0,2B1,1B1\n"
)


@pytest.mark.parametrize("text", [ORDER, BUBBLES, OVERLAPPED])
def test_a_file_goes_out_as_it_came_in(text: str) -> None:
    """With its bubbles and its overlapped pairs, which are no part of the order."""
    assert to_csv(from_csv(text)) == text


def test_an_overlapped_pair_goes_out_with_messages() -> None:
    """The messages of both follow the pair, and bubbles go: torch takes none here."""
    text = to_csv(add_messages(from_csv(OVERLAPPED)))

    assert ",2RECV_B0,(2F1;2B0)OVERLAP_F_B,2SEND_F1,1B0," in text
    assert ",," not in text


def test_other_ops_go_out_one_by_one() -> None:
    """Cells of the file that was read are forgotten once the order is another."""
    schedule = from_csv(BUBBLES)
    first, second = schedule.lanes
    ops = (second.ops[0], *split_backward(schedule).lanes[1].ops[1:])
    changed = replace(schedule, lanes=(first, replace(second, ops=ops)))

    assert to_csv(changed) == "0F0,0F1,,,0B0,0B1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v", "ooo-fast-forward"])
def test_messages_are_left_out_when_read(name: str) -> None:
    """The runtime adds its own messages, so reading drops those of the file."""
    schedule = make_schedule(name, num_devices=3, num_microbatches=6)
    assert from_csv(to_csv(add_messages(schedule))) == schedule


def test_reads_what_torch_does_besides() -> None:
    """For sharded weights, for its messages, and at the end."""
    text = (
        "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD,0RESHARD\r\n"
        '1RECV_F0,"1F0",1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD\r\n'
    )
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=1)
    assert from_csv(text) == schedule


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no ops in the file"),
        ("0F0,0B0\n,,\n1F0", "line 2: device 1 has no ops"),
        ("0UNSHARD\n", "line 1: device 0 has no ops"),
        ("0F0,0B0\n1F0,1X0\n", "line 2, cell 2: '1X0' is no action; expected an op"),
        ("0F0,,0U\n", "line 1, cell 3: '0U' is no action"),
        ("0F0,0SEND_F0>1\n", "line 1, cell 2: '0SEND_F0>1' is no action"),
        ("0F0@1\n", "line 1, cell 1: '0F0@1' is no action"),
        ("0F0,0SEND_F\n", "line 1, cell 2: '0SEND_F' is no action"),
        ("(0F0;0B)OVERLAP_F_B\n", "line 1, cell 1: '(0F0;0B)OVERLAP_F_B' is no"),
        ("0F0;0B0\n", "line 1, cell 1: '0F0;0B0' is no action"),
        ("0F0,\r0B0\n", "line 1: new-line character seen in unquoted field"),
        ("0F0\n0B0\n", "stage 0 runs on device 0 and, as 0B0, on device 1"),
        ("0F0\n2F0\n", "no op of stage 1"),
    ],
)
def test_names_what_cannot_be_read(text: str, reason: str) -> None:
    """The error names the path and the line, and the cell if there is one."""
    with pytest.raises(ParseError) as caught:
        from_csv(text, path="order.csv")
    assert str(caught.value).startswith("order.csv, line ")
    assert reason in str(caught.value)


def test_names_all_that_is_doubled_or_dropped() -> None:
    """Each with its place: a weight gradient too many or too few is a wrong model."""
    text = "0F0,0F1,0I0,0W0,0I1,0W0\n1F0,1B0,1F1,1F1,1B1,1I1\n"
    with pytest.raises(ScheduleError) as caught:
        from_csv(text, path="order.csv")
    assert caught.value.faults == (
        "order.csv, line 1, cell 6: 0W0 is there again, after order.csv, line 1, "
        "cell 4; expected each op once",
        "order.csv, line 2, cell 4: 1F1 is there again, after order.csv, line 2, "
        "cell 3; expected each op once",
        "order.csv, line 1, cell 5: for microbatch 1, stage 0 has 0F1 0I1; "
        "expected 0F1 0B1, or 0F1 0I1 0W1",
        "order.csv, line 2, cell 6: for microbatch 1, stage 1 has 1F1 1B1 1I1; "
        "expected 1F1 1B1, or 1F1 1I1 1W1",
    )


def test_an_evaluation_has_no_backward() -> None:
    """Forwards alone are whole where there is nothing else."""
    assert str(from_csv("0F0,0F1\n1F0,1F1\n")) == "d0  0F0 0F1\nd1  1F0 1F1"


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


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_gathers_come_back(name: str, keeps: Keep) -> None:
    """Where they stood, with their numbers; torch reads each cell."""
    schedule = make_schedule(name, num_devices=2, num_microbatches=4, num_shards=2)
    schedule = add_gathers(schedule, keeps)
    text = to_csv(add_messages(schedule))

    read = from_csv(text, num_shards=2)
    check(read)
    assert add_gathers(read, keeps) == schedule
    assert [drop_reductions(x) for x in read.lanes] == [
        drop_reductions(x) for x in schedule.lanes
    ]
    assert_torch_simulates(without_gathers(actions_of(text)), schedule)
    whole = from_csv(text, num_replicas=2)
    assert whole.kinds.isdisjoint(SHARDING)
    check(whole)


def drop_reductions(lane: Lane) -> tuple[Op, ...]:
    """A lane without what the file does not hold in its place."""
    return tuple(op for op in lane.ops if op.kind not in STEP_ENDS)


def without_gathers(rows: Rows) -> Rows:
    """The rows that torch's simulation of messages knows."""
    return {
        rank: [x for x in row if x.computation_type not in (UNSHARD, RESHARD)]
        for rank, row in rows.items()
    }


def test_compute_alone_has_no_gathers() -> None:
    """As in torch's form "compute_only"; they are placed again when it is read."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2, num_shards=2)
    text = to_csv(schedule)

    assert text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert add_gathers(from_csv(text, num_shards=2)) == schedule


def test_gathers_that_torch_places_are_right() -> None:
    """It holds three stages of a rank at most, and releases others for those."""
    plain = make_schedule(
        "interleaved-1f1b", num_devices=2, num_microbatches=4, stages_per_device=4
    )
    rows = actions_of(to_csv(plain))
    lowered = {rank: _add_unshard_reshard([*row]) for rank, row in rows.items()}
    text = "".join(",".join(map(str, row)) + "\n" for row in lowered.values())
    schedule = from_csv(text, num_shards=2)

    assert schedule.kinds >= SHARDING
    check(schedule)
    assert drop_gathers(schedule).lanes == from_csv(text, num_replicas=2).lanes
