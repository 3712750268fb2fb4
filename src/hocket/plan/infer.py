"""The simplest program that a list of lanes can be an order of."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.errors import ParseError
from hocket.plan.op import Kind, Op
from hocket.plan.program import Program
from hocket.plan.schedule import Lane


def infer_program(lanes: Sequence[Lane], *, path: str = "<text>") -> Program:
    """One net, its stages in a chain without delay, as the ops tell.

    Args:
        lanes: whose ops are read.
        path: named in errors.

    Raises:
        ParseError: the ops contradict each other (a stage on two devices, or one that
            nobody runs).
    """
    devices: dict[int, int] = {}
    trained = set()
    for lane in lanes:
        for op in lane.ops:
            other = devices.setdefault(op.stage, lane.device)
            if other != lane.device:
                raise ParseError(
                    f"{path}: stage {op.stage} runs on device {other} and, as {op}, "
                    f"on device {lane.device}; a stage lives on one device"
                )
            if op.kind not in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD):
                trained.add(op.stage)
    missing = sorted(set(range(max(devices, default=0) + 1)) - set(devices))
    if missing:
        raise ParseError(f"{path}: no op for stage {', '.join(map(str, missing))}")
    ops = [op for lane in lanes for op in lane.ops]
    return Program.chain(
        [devices[stage] for stage in sorted(devices)],
        _count(ops, "microbatch"),
        num_steps=_count(ops, "step"),
        num_replicas=2 if any(op.kind is Kind.REDUCE for op in ops) else 1,
        trainable=bool(trained),
    )


def _count(ops: Sequence[Op], field: str) -> int:
    return 1 + max((getattr(op, field) or 0 for op in ops), default=0)
