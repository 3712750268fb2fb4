"""Which shared weights one stage updates for others, and in which messages they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from hocket.core.schedule import Schedule
from hocket.run.comm.schema import Schema, schema_of


@dataclass(frozen=True, slots=True)
class StaleTie:
    """A weight of one stage that others read, too.

    Args:
        name: in the uncut model.
        stages: that hold it, ascending; the first updates it.
        devices: theirs, each once; the first is the first stage's.
        delay: the largest of the stages'.
    """

    name: str
    stages: tuple[int, ...]
    devices: tuple[int, ...]
    delay: int


def find_stale_ties(
    shared: Mapping[str, Sequence[int]], schedule: Schedule
) -> list[StaleTie]:
    """The shared weights that their stages cannot update together, at one time.

    Args:
        shared: the stages that hold each shared weight.
        schedule: says their delays, and where they live.
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
    """Why values are sent; it stands in their tag, beside the number of updates."""

    UPDATED = 0
    LOADED = 1
    AVERAGED = 2


def gradient_schema(parameter: nn.Parameter) -> Schema:
    """Of a gradient, and whether there is any."""
    return schema_of((parameter, parameter.new_empty(1)))


def values_schema(parameter: nn.Parameter, *, predicts: bool) -> Schema:
    """Of the weights; and of what is read in their place, where that is another."""
    return schema_of((parameter, parameter) if predicts else (parameter,))
