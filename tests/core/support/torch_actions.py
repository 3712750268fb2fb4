"""What torch itself makes of an order, and what one queue per rank does with it."""

from __future__ import annotations

from typing import Any, Final

from torch.distributed.pipelining.schedules import (
    FORWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _simulate_comms_compute,
)

from hocket.core.formats.torch_csv import to_csv
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.passes.add_messages import drop_messages

Rows = dict[int, list[_Action]]

_MESSAGES: Final = (SEND_F, SEND_B, RECV_F, RECV_B)


def actions_of(text: str) -> Rows:
    """torch's actions, rank by rank."""
    return {
        rank: [_Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }


def lowered_by_torch(schedule: Schedule) -> Rows:
    """The same compute with the messages and reductions that torch puts into it."""
    program = schedule.program
    rows = actions_of(to_csv(drop_messages(schedule)))
    num_microbatches = program.num_microbatches_of(0)
    compute: dict[int, Any] = {
        rank: _add_reduce_grad([*row], num_microbatches) for rank, row in rows.items()
    }
    return _add_send_recv(
        compute, lambda stage: program.stages[stage].device, program.num_stages
    )


def assert_torch_simulates(rows: Rows, schedule: Schedule) -> None:
    """Play the rows as torch does; it knows nothing of reductions.

    Raises:
        ValueError: they do not come to an end.
    """
    program = schedule.program
    known = {
        rank: [action for action in row if action.computation_type != REDUCE_GRAD]
        for rank, row in rows.items()
    }
    _simulate_comms_compute(
        known, lambda stage: program.stages[stage].device, program.num_stages
    )


def ends_over_one_queue(rows: Rows, schedule: Schedule) -> bool:
    """Whether all comes to an end where all messages of a rank go through one queue.

    A post does not wait, but its message does, until it is the first at both ends.
    """
    program = schedule.program
    left = {rank: list(row) for rank, row in rows.items()}
    queues: Rows = {rank: [] for rank in rows}
    come: set[_Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in left.items():
            while row and _may_start(row[0], come, program):
                if row[0].computation_type in _MESSAGES:
                    queues[rank].append(row[0])
                del row[0]
                moved = True
        for queue in queues.values():
            other = _other_end(queue[0]) if queue else None
            peer = queues[program.stages[other.stage_index].device] if other else []
            if peer and peer[0] == other:
                come |= {queue.pop(0), peer.pop(0)}
                moved = True
    return not any(left.values()) and not any(queues.values())


def _may_start(action: _Action, come: set[_Action], program: Program) -> bool:
    """Whether what an action reads has come, if it comes by a message."""
    if action.computation_type in _MESSAGES or action.computation_type == REDUCE_GRAD:
        return True
    is_forward = action.computation_type == FORWARD
    if str(action.computation_type.value) == "W":
        return True
    source = action.stage_index + (-1 if is_forward else 1)
    if not 0 <= source < program.num_stages:
        return True
    home = program.stages[action.stage_index].device
    kind = RECV_F if is_forward else RECV_B
    receive = _Action(action.stage_index, kind, action.microbatch_index)
    return program.stages[source].device == home or receive in come


def _other_end(action: _Action) -> _Action:
    kind = action.computation_type
    others = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}
    distance = 1 if kind in (SEND_F, RECV_B) else -1
    return _Action(action.stage_index + distance, others[kind], action.microbatch_index)
