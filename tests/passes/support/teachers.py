"""Programs of a student and a teacher, for tests that fill one's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.program import Net, Program, Stage

FROZEN: Final = None  # in the place of a delay
_EQUAL: Final = StageCost(1.0, 1.0, 1.0)


def with_teacher(
    student: Program,
    num_microbatches: int,
    *,
    delay: int | None = FROZEN,
    num_steps: int = 1,
    devices: Sequence[int] = (),
    whole_batch: bool = False,
) -> Program:
    """A student and a teacher that is cut as the student, or else where it is said.

    Args:
        student: its program alone.
        num_microbatches: the teacher's.
        delay: of a teacher that follows the student stage by stage; FROZEN for one
            that never moves.
        num_steps: of both.
        devices: of the teacher's stages; those of the student's when not given.
        whole_batch: the student's loss reads all of the teacher's outputs.
    """
    homes = devices or [stage.device for stage in student.stages]
    count, moves = len(homes), delay is not FROZEN
    teacher = tuple(
        Stage("teacher", device, False, delay or 0, (count + j,) if moves else ())
        for j, device in enumerate(homes)
    )
    ends = [n for n, targets in enumerate(student.targets) if not targets]
    into_losses = tuple((count - 1, count + end) for end in ends)
    return replace(
        student,
        nets=(Net("teacher", num_microbatches), *student.nets),
        stages=(*teacher, *student.stages),
        flows=(
            *((j, j + 1) for j in range(count - 1)),
            *((count + a, count + b) for a, b in student.flows),
            *into_losses,
        ),
        num_steps=num_steps,
        copies=tuple(tuple(count + n for n in group) for group in student.copies),
        whole_batch_flows=frozenset(into_losses if whole_batch else ()),
    )


def equal_costs(
    program: Program, teacher_s: float, student: StageCost = _EQUAL
) -> Costs:
    """Costs of devices that have equal shares of each net.

    Args:
        program: as `with_teacher` makes it.
        teacher_s: a microbatch of the teacher in a device's whole share.
        student: what a microbatch of the student costs there.
    """
    shares = {"teacher": StageCost(forward_s=teacher_s)}
    return Costs(
        tuple(
            _split(shares.get(stage.net, student), program, number)
            for number, stage in enumerate(program.stages)
        )
    )


def _split(share: StageCost, program: Program, number: int) -> StageCost:
    """Divide a share evenly among the device's stages of one kind."""
    stage = program.stages[number]
    own = [program.stages[n] for n in program.stages_on[stage.device]]
    num = sum(other.trainable == stage.trainable for other in own)
    return StageCost(
        share.forward_s / num, share.input_grad_s / num, share.weight_grad_s / num
    )
