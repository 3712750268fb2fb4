"""Group stages into gates, whose gradients are judged, clipped and applied together.

To clip by a norm, every update of a gate waits for the gradients of all its stages. So
an update may stand too early in an order:

    d0  ... 2B0 2U 0B0 0U      2U waits for the gradient of stage 0, which 0B0 makes
                               behind it: with one gate over both, d0 waits for itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hocket.core.dataflow import Value, is_given, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule

# The stages of each gate.
Gates = tuple[tuple[int, ...], ...]


def gates_of(program: Program, *, overlaps: bool, clips: bool) -> Gates:
    """Return the gates of a program: one of all stages, per delay, or per stage.

    Args:
        program: the program, with the delays of its stages.
        overlaps: whether a step begins before the one before it has ended. If not, all
            stages are one gate, so that no weight is updated where any gradient is not
            finite.
        clips: whether gradients are clipped by the norm of their gate.
    """
    trained = [n for n, stage in enumerate(program.stages) if stage.trainable]
    if not overlaps:
        return (tuple(trained),)
    if not clips:
        return tuple((number,) for number in trained)
    delays = sorted({program.stages[number].delay for number in trained})
    return tuple(
        tuple(n for n in trained if program.stages[n].delay == delay)
        for delay in delays
    )


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
    position = [0] * len(schedule.lanes)
    have: set[Value] = set()

    def may_start(op: Op) -> bool:
        # Gradients of a stage are complete once its update of the step before is made.
        return all(
            value in have or is_given(value)
            for one in with_gate(op, gate_of)
            for value in needs(one, program)
        )

    moved = True
    while moved:
        moved = False
        for number, lane in enumerate(schedule.lanes):
            for op in lane.ops[position[number] :]:
                if not may_start(op):
                    break
                have.update(makes(op, program))
                position[number] += 1
                moved = True
    stuck = [
        lane.ops[at]
        for lane, at in zip(schedule.lanes, position, strict=True)
        if at < len(lane.ops)
    ]
    return tuple(op for op in stuck if op.kind is Kind.UPDATE)


def describe(gate: Sequence[int], program: Program) -> str:
    """Name a gate in an error."""
    delays = sorted({program.stages[stage].delay for stage in gate})
    stages = ", ".join(map(str, gate))
    return f"stages {stages} (delay {', '.join(map(str, delays))})"
