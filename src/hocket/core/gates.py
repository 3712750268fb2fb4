"""Group stages into gates: their gradients are checked, clipped and applied together.

To clip by a norm, every update of a gate waits for the gradients of all its stages. So
an update may stand too early in an order:

    d0  ... 2B0 2U 0B0 0U      2U waits for the gradient of stage 0, which 0B0 makes
                               behind it: with one gate over both, d0 waits for itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hocket.core.dataflow import Value, is_given, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.walk import Walk

_TRAINED: Final = ""  # all trained nets together; a net's name is never empty
# The stages of each gate.
Gates = tuple[tuple[int, ...], ...]


def gates_of(schedule: Schedule, *, clips: bool) -> Gates:
    """Return the gates of an order: one of all stages, per delay, or per stage.

    Args:
        schedule: the order. If it flushes, all stages are one gate, so that no weight
            is updated where any gradient is not finite.
        clips: whether gradients are clipped by the norm of their gate.
    """
    program = schedule.program
    trained = program.trained_stages
    if flushes(schedule):
        return (trained,)
    if not clips:
        return tuple((number,) for number in trained)
    delays = sorted({program.stages[number].delay for number in trained})
    return tuple(
        tuple(n for n in trained if program.stages[n].delay == delay)
        for delay in delays
    )


def flushes(schedule: Schedule) -> bool:
    """Return whether each step of the trained stages ends before the next begins.

    An order of one step does, and one whose lanes have the steps in sequence, without
    delays. If it has a body, this must have one step of each net on all devices, and of
    those that are trained the same one, as where a teacher's forwards of the next batch
    fill a student's order:

        d0   |: 2F0 2F1 0F0@1 2B0 2B1 2U :|      stages 0 and 1 are the teacher's
        d1   |: 3F0 3F1 3B0 3B1 1F0@1 3U :|

    Then one gate of all stages makes no lane wait for ever.
    """
    program = schedule.program
    if not schedule.body and program.num_steps == 1:
        return True
    trained = program.trained_stages
    if any(program.stages[number].delay for number in trained):
        return False
    if not _in_sequence(schedule):
        return False
    if not schedule.body:
        return True
    return _has_one_step(schedule) and not early_updates(schedule, (trained,))


def _in_sequence(schedule: Schedule) -> bool:
    """Return whether no lane begins a step of the trained stages before it ends one."""
    steps = (
        [op.step for op in lane.ops if _work_of(op, schedule) == _TRAINED]
        for lane in schedule.lanes
    )
    return all(of_lane == sorted(of_lane) for of_lane in steps)


def _has_one_step(schedule: Schedule) -> bool:
    """Return whether the body holds one step of each net, the same of all trained ones.

    What stands before it must be of earlier steps. The updates of a net that follows
    another one count to that one's step.
    """
    step_of: dict[str, int] = {}
    bodies = [*zip(schedule.lanes, schedule.body, strict=True)]
    for lane, (begin, end) in bodies:
        for op in lane.ops[begin : begin + (end - begin) // schedule.num_repeats]:
            if step_of.setdefault(_work_of(op, schedule), op.step) != op.step:
                return False
    for lane, (begin, _) in bodies:
        for op in lane.ops[:begin]:
            if op.step >= step_of.get(_work_of(op, schedule), 0):
                return False
    return True


def _work_of(op: Op, schedule: Schedule) -> str:
    """Return the net of a forward of an untrained stage; `_TRAINED` for other ops."""
    stage = schedule.program.stages[op.stage]
    is_trained = stage.trainable or op.kind is Kind.UPDATE
    return _TRAINED if is_trained else stage.net


def stage_gates(gates: Gates) -> dict[int, tuple[int, ...]]:
    """Return the gate of each stage that has one."""
    return {stage: gate for gate in gates for stage in gate}


def with_gate(op: Op, gate_of: Mapping[int, tuple[int, ...]]) -> tuple[Op, ...]:
    """Return an op, and of an update those of its gate's other stages.

    An update starts when all of these may start.

    Args:
        op: the op.
        gate_of: as `stage_gates` returns it.
    """
    if op.kind is not Kind.UPDATE:
        return (op,)
    others = (stage for stage in gate_of.get(op.stage, ()) if stage != op.stage)
    return (op, *(replace(op, stage=stage) for stage in others))


def early_updates(schedule: Schedule, gates: Gates) -> tuple[Op, ...]:
    """Return the updates at which lanes would wait for ever; none if all is well.

    Args:
        schedule: one that `check` accepts.
        gates: each update waits for the gradients of all stages of its gate.
    """
    program = schedule.program
    gate_of = stage_gates(gates)
    have: set[Value] = set()

    def lacks(op: Op) -> Value | None:
        needed = (x for one in with_gate(op, gate_of) for x in needs(one, program))
        return next((x for x in needed if x not in have and not is_given(x)), None)

    walk = Walk([lane.ops for lane in schedule.lanes], lacks)
    for _, op in walk:
        for value in makes(op, program):
            have.add(value)
            walk.come(value)
    return tuple(op for op in walk.heads.values() if op.kind is Kind.UPDATE)


def describe(gate: Sequence[int], program: Program) -> str:
    """Name a gate in an error."""
    delays = sorted({program.stages[stage].delay for stage in gate})
    stages = ", ".join(map(str, gate))
    return f"stages {stages} (delay {', '.join(map(str, delays))})"
