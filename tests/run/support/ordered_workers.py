"""What workers do whose messages must keep the planned order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest

from hocket.run.cluster.world import World
from tests.run.support import exactness, program_workers
from tests.run.support.strict_wires import StrictWires

Cases = list[dict[str, Any]]


@contextmanager
def strict_wires(*, crosses: bool = True) -> Iterator[None]:
    """Let all messages of schedules go over wires that only know their order.

    Args:
        crosses: whether some of them must cross.
    """
    made: list[StrictWires] = []

    def pair_wires(
        world: World, pairs: Iterable[tuple[int, int]] | None
    ) -> StrictWires:
        pairs = combinations(range(world.world_size), 2) if pairs is None else pairs
        made.append(StrictWires(pairs, world.rank, world.timeout_s))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.run.comm.transports.pair_wires", pair_wires)
        yield
    assert all(wires.is_closed_cleanly for wires in made)
    num_messages = sum((wires.num_messages for wires in made), Counter[int]())
    assert num_messages[1] > 0
    assert num_messages[2] > 0 or not crosses


def train(cases: Cases, folder: str) -> Cases:
    """Train every case of `exactness`."""
    with strict_wires():
        return exactness.train_all(cases, folder)


def run_programs(orders: list[str], clip_norm: float | None) -> list[float]:
    """Run some programs; how far each is from the emulator."""
    with strict_wires(crosses=False):
        return program_workers.run_all(orders, clip_norm)
