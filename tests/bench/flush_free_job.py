"""What the workers of the tests of bench/flush_free do: the bench, on a small model."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from bench.flush_free.field import Field
from bench.flush_free.kinds import measure
from bench.flush_free.stretch import in_turn
from bench.models import Block, Case
from tests.run.support.joined import join


def _transformer() -> nn.Sequential:
    return nn.Sequential(*(Block(64) for _ in range(4)))


TOY: Final = Case("toy", _transformer, (32, 64), num_microbatches=4, microbatch_size=2)


def steps(schedules: list[str], num_rounds: int, folder: str) -> list[dict[str, Any]]:
    """Rows of time."""
    world = join()
    field = Field(TOY, world, folder)
    for schedule in schedules:
        field.enter(schedule)
    rows = [*field.rows(in_turn(field.stretches, world, num_rounds))]
    field.close()
    return rows


def memory(schedules: list[str], folder: str) -> list[dict[str, Any]]:
    """Rows of bytes."""
    world = join()
    return [
        measure(world, TOY, schedule, TOY.num_microbatches, folder)
        for schedule in schedules
    ]
