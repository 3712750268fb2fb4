"""Infer the simplest program that a list of lanes can be an order of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hocket.core.op import COLLECTIVES, Kind
from hocket.core.program import Program
from hocket.core.schedule import Lane
from hocket.errors import ParseError

_IN_EVALUATION = frozenset(
    {Kind.FORWARD, Kind.LOSS, Kind.GATHER, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}
)


def infer_program(lanes: Sequence[Lane], *, path: str = "<text>") -> Program:
    """Infer one net with its stages in a chain without delay.

    Args:
        lanes: whose ops are read.
        path: named in errors.

    Raises:
        ParseError: the ops contradict each other (a stage on two devices, or a
            stage, microbatch or step that is left out).
        PlanError: the numbers of the devices have gaps.
    """
    ops = [op for lane in lanes for op in lane.ops]
    devices = _devices(lanes, path)
    kinds = {op.kind for op in ops}
    return Program.chain(
        [devices[stage] for stage in range(_count("stage", devices, path))],
        _count("microbatch", {op.microbatch or 0 for op in ops}, path),
        num_steps=_count("step", {op.step for op in ops}, path),
        num_replicas=1 if kinds.isdisjoint(COLLECTIVES) else 2,
        trainable=not kinds <= _IN_EVALUATION,
        batch_loss=Kind.LOSS in kinds,
        loss_over_replicas=Kind.GATHER in kinds,
    )


def _devices(lanes: Sequence[Lane], path: str) -> dict[int, int]:
    devices: dict[int, int] = {}
    for lane in lanes:
        for op in lane.ops:
            other = devices.setdefault(op.stage, lane.device)
            if other != lane.device:
                raise ParseError(
                    f"{path}: stage {op.stage} runs on device {other} and, as {op}, "
                    f"on device {lane.device}; a stage lives on one device"
                )
    return devices


def _count(noun: str, numbers: Collection[int], path: str) -> int:
    """Count the numbers, and refuse gaps.

    Looks at no more numbers than there are: a file may hold any, like 999999999.
    """
    left_out = set(range(len(numbers))).difference(numbers)
    if left_out:
        raise ParseError(
            f"{path}: no op of {noun} {min(left_out)}, but one of {noun} "
            f"{max(numbers)}; count from 0 without gaps"
        )
    return len(numbers)
