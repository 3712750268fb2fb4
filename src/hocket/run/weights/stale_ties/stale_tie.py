"""Shared weights that one stage updates for others, and their messages' schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from hocket.core.schedule import Schedule
from hocket.run.comm.schema import Schema, schema_of


@dataclass(frozen=True, slots=True)
class StaleTie:
    """A weight of one stage that other stages read with a delay.

    Args:
        name: the weight's name in the uncut model.
        stages: the stages that hold it, ascending; the first updates it.
        devices: the stages' devices, each once; the first one is the owner's.
        delay: the largest delay of the stages.
    """

    name: str
    stages: tuple[int, ...]
    devices: tuple[int, ...]
    delay: int


def find_stale_ties(
    shared: Mapping[str, Sequence[int]], schedule: Schedule
) -> list[StaleTie]:
    """Return the shared weights whose stages cannot update them at one time.

    Args:
        shared: the stages that hold each shared weight.
        schedule: the schedule, with the stages' delays and devices.
    """
    stale_ties = []
    for name, numbers in sorted(shared.items()):
        stages = [schedule.program.stages[number] for number in numbers]
        delays = {stage.delay for stage in stages}
        devices = dict.fromkeys(stage.device for stage in stages)
        if len(delays) > 1 or len(devices) < len(stages):
            stale_ties.append(
                StaleTie(name, tuple(numbers), tuple(devices), max(delays))
            )
    return stale_ties


class SendReason(IntEnum):
    """The reason for sending values; a part of their tag."""

    UPDATED = 0
    AVERAGED = 1


def gradient_schema(parameter: nn.Parameter) -> Schema:
    """Return the schema of a gradient, and a flag for whether there is one."""
    return schema_of((parameter, parameter.new_empty(1)))


def values_schema(parameter: nn.Parameter) -> Schema:
    """Return the schema of the weights."""
    return schema_of((parameter,))
