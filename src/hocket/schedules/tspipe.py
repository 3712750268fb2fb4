"""TSPipe: GPipe, with the next batch's teacher in its bubble."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.step_end import close_step, repeat_ahead
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, all_microbatches, step_bubble_s

NUM_NETS: Final = 2  # teacher and student; a stage of each on each device


def tspipe(shape: Shape) -> Schedule:
    """Fill GPipe's bubble with the teacher's forwards of the next batch.

    A momentum teacher, cut into as many stages as the student and on the same devices,
    runs one batch ahead with weights that are one update old (delay 1). The student is
    never stale. Of each microbatch of the teacher the student has two, so that its
    backwards are shorter. Between its forwards and its backwards, device `d` does
    `2 (p - 1 - d)` forwards of the teacher, and the others behind its backwards. If a
    teacher's forward takes `2 F` and `B = 2 F`, these fill the gap of the released code
    exactly. The paper has `m = 4 (p - 1)`: two views of `p - 1` microbatches, each cut
    in two.

    The loss is over the whole batch (op L). Every device holds all `m` microbatches.
    With as long forwards of both nets, the bubble of `n` steps is
    `n (p - 1) (F + B) / 2`, less `(n - 1) min(m / 2, 2 (p - 1)) F / 2`: the first step
    has it all, and later ones what the teacher leaves of it. `hocket.fill_with` fills
    other orders of the student so, and with any times of both nets.

    >>> shape = Shape(2, num_microbatches=4, stages_per_device=2, num_steps=2)
    >>> print(tspipe(shape))  # doctest: +NORMALIZE_WHITESPACE
    steps 2
    replicas 1
    net teacher microbatches=2
    net student microbatches=4 loss=batch
    stage 0 net=teacher device=0 delay=1 trainable=no follows=2
    stage 1 net=teacher device=1 delay=1 trainable=no follows=3
    stage 2 net=student device=0
    stage 3 net=student device=1
    flow 0>1
    flow 2>3
    flow 1>3
    d0  0F0 0F1 |: 2F0 2F1 2F2 2F3 0F0@1 0F1@1 2B3 2B2 2B1 2B0 2U 0U :| 2F0@1 2F1@1
          2F2@1 2F3@1 2B3@1 2B2@1 2B1@1 2B0@1 2U@1 0U@1
    d1  1F0 1F1 |: 3F0 3F1 3F2 3F3 3L 3B3 3B2 3B1 3B0 1F0@1 1F1@1 3U 1U :| 3F0@1
          3F1@1 3F2@1 3F3@1 3L@1 3B3@1 3B2@1 3B1@1 3B0@1 3U@1 1U@1

    Source: Lim et al., "TSPipe: Learn from Teacher Faster with Pipelines", ICML'22,
    and the order of its released code. There, a forward of the student takes two
    microbatches at once, and so does its message; here these are two forwards.

    Args:
        shape: a shape with two stages per device, one of each net.

    Raises:
        ShapeError: other than two stages per device, or an odd number of microbatches.
    """
    if shape.stages_per_device != NUM_NETS:
        raise ShapeError(
            f"tspipe has a stage of the teacher and one of the student on each device, "
            f"got stages_per_device={shape.stages_per_device}: use {NUM_NETS}"
        )
    m = shape.num_microbatches
    if m % 2:
        raise ShapeError(
            "tspipe has two microbatches of the student for each of the teacher, got "
            f"num_microbatches={m}: use {m + 1}" + (f" or {m - 1}" if m > 1 else "")
        )
    program = _program(shape)
    lanes = [
        close_step(program, device, _order(shape, device))
        for device in range(shape.num_devices)
    ]
    return repeat_ahead(program, lanes)


def _order(shape: Shape, device: int) -> Iterator[Op]:
    """Yield a step's work on a device; the teacher's is of the next batch."""
    student = shape.num_devices + device
    microbatches = range(shape.num_microbatches)
    ahead = [Op(Kind.FORWARD, device, i, 1) for i in range(len(microbatches) // 2)]
    num_between = 2 * (shape.num_devices - 1 - device)
    for microbatch in microbatches:
        yield Op(Kind.FORWARD, student, microbatch)
    if not num_between:
        yield Op(Kind.LOSS, student)
    yield from ahead[:num_between]
    for microbatch in reversed(microbatches):
        yield Op(Kind.BACKWARD, student, microbatch)
    yield from ahead[num_between:]


def _program(shape: Shape) -> Program:
    p = shape.num_devices
    return Program(
        nets=(
            Net("teacher", shape.num_microbatches // 2),
            Net("student", shape.num_microbatches, batch_loss=True),
        ),
        stages=(
            *(Stage("teacher", d, False, 1, follows=(p + d,)) for d in range(p)),
            *(Stage("student", d) for d in range(p)),
        ),
        flows=(
            *((stage, stage + 1) for stage in range(2 * p - 1) if stage != p - 1),
            (p - 1, 2 * p - 1),
        ),
        num_steps=shape.num_steps,
        num_replicas=shape.num_replicas,
    )


def _bubble_s(shape: Shape, share: StageCost) -> float:
    num_filled = min(shape.num_microbatches // 2, 2 * (shape.num_devices - 1))
    filled_s = (shape.num_steps - 1) * num_filled * share.forward_s
    return (step_bubble_s(shape, share) - filled_s) / NUM_NETS


def _num_buffers(shape: Shape) -> int:
    """Return 2 where a forward of the teacher is sent while another one waits."""
    several = min(shape.num_devices, shape.num_steps, shape.num_microbatches // 2)
    return 2 if several > 1 else 1


ENTRY: Final = Entry(
    tspipe,
    _bubble_s,
    all_microbatches,
    _num_buffers,
    stages_per_device=NUM_NETS,
    holds_for=lambda _, x: x.forward_s <= x.input_grad_s + x.weight_grad_s,
)
