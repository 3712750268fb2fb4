"""Infer the simplest program that a list of lanes can be an order of."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.core.op import COLLECTIVES, SHARDING, Kind, Op
from hocket.core.program import Program
from hocket.errors import ParseError

# The device of a lane, and its ops.
_Lane = tuple[int, tuple[Op, ...]]
_IN_EVALUATION = frozenset(
    {Kind.FORWARD, Kind.LOSS, Kind.GATHER, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}
)


def infer_program(
    lanes: Sequence[_Lane], *, path: str = "<text>", lines: Sequence[int] = ()
) -> Program:
    """Infer one net with its stages in a chain without delay.

    Args:
        lanes: the device and the ops of each.
        path: named in errors.
        lines: the line of each lane, named in errors; 1, 2, ... when not given.

    Raises:
        ParseError: the ops contradict each other (a stage on two devices, or a
            stage, microbatch or step that is left out).
        PlanError: the numbers of the devices have gaps.
    """
    lines = lines or range(1, len(lanes) + 1)
    ops = [op for _, of_lane in lanes for op in of_lane]
    places = [
        f"{path}, line {line}"
        for line, (_, of_lane) in zip(lines, lanes, strict=True)
        for _ in of_lane
    ]
    devices = _devices(lanes, path, lines)
    kinds = {op.kind for op in ops}
    return Program.chain(
        [
            devices[stage]
            for stage in range(_count("stage", [op.stage for op in ops], places))
        ],
        _count(
            "microbatch",
            [0 if op.kind in SHARDING else op.microbatch or 0 for op in ops],
            places,
        ),
        num_steps=_count("step", [op.step for op in ops], places),
        num_replicas=1 if kinds.isdisjoint(COLLECTIVES - SHARDING) else 2,
        trainable=not kinds - SHARDING <= _IN_EVALUATION,
        batch_loss=Kind.LOSS in kinds,
        loss_over_replicas=Kind.GATHER in kinds,
    )


def _devices(lanes: Sequence[_Lane], path: str, lines: Sequence[int]) -> dict[int, int]:
    devices: dict[int, int] = {}
    for (device, ops), line in zip(lanes, lines, strict=True):
        for op in ops:
            other = devices.setdefault(op.stage, device)
            if other != device:
                raise ParseError(
                    f"{path}, line {line}: stage {op.stage} runs on device {other} "
                    f"and, as {op}, on device {device}; a stage lives on one "
                    "device"
                )
    return devices


def _count(noun: str, numbers: Sequence[int], places: Sequence[str]) -> int:
    """Count the different numbers, and refuse gaps.

    Looks at no more numbers than there are: a file may hold any, like 999999999.

    Args:
        noun: what the numbers count.
        numbers: the number of each op.
        places: the place of each op, named in errors.
    """
    different = set(numbers)
    left_out = set(range(len(different))) - different
    if left_out:
        largest = max(different)
        raise ParseError(
            f"{places[numbers.index(largest)]}: no op of {noun} {min(left_out)}, but "
            f"one of {noun} {largest}; count from 0 without gaps"
        )
    return len(different)
