"""PipeDream-2BW's order, for tests that want a flush-free one."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule


def two_buffered_weights(
    num_devices: int, num_microbatches: int, num_steps: int
) -> Schedule:
    """1F1B without a flush: steps follow each other, every stage reads one step late.

        d0  0F0 0F1 |: 0F2 0B0 0F0@1 0B1 0F1@1 0B2 0U :| 0F2@1 0B0@1 ...
        d1  1F0 |: 1F1 1B0 1F2 1B1 1F0@1 1B2 1U :| 1F1@1 ...

    Device `d` begins with `p - 1 - d` forwards; then pairs of a forward and a backward,
    `m` to a step; then the backwards that are left. Source: arXiv:2006.09503, Fig. 3.
    """
    program = Program.chain(
        range(num_devices),
        num_microbatches,
        num_steps=num_steps,
        delays=[1] * num_devices,
    )
    lanes, body = [], []
    for device in range(num_devices):
        warm_up = num_devices - 1 - device
        ops = tuple(_lane(device, warm_up, num_microbatches, num_steps))
        lanes.append(Lane(device, 0, ops))
        length = (num_steps - 1) * (2 * num_microbatches + 1)
        body.append((warm_up, warm_up + length))
    return Schedule(program, tuple(lanes), tuple(body), num_steps - 1)


def _lane(
    stage: int, warm_up: int, num_microbatches: int, num_steps: int
) -> Iterator[Op]:
    total = num_microbatches * num_steps
    for i in range(total + warm_up):
        if i < total:
            step, microbatch = divmod(i, num_microbatches)
            yield Op(Kind.FORWARD, stage, microbatch, step)
        if i >= warm_up:
            step, microbatch = divmod(i - warm_up, num_microbatches)
            yield Op(Kind.BACKWARD, stage, microbatch, step)
            if microbatch == num_microbatches - 1:
                yield Op(Kind.UPDATE, stage, None, step)
