"""The runtime plays any sound order, not only those that have a name.

Ecosystem's R06: what the checker accepts comes to its end, with the plain loop's
weights. The orders are drawn at random, the same each time, for two and three workers.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from hocket.core.check import check
from hocket.core.dataflow import due_ops
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from tests.run.support.comparison import case, check_runs
from tests.strategies import taken_when_ready

NUM_ORDERS: Final = 5
NUM_STEPS: Final = 3
MODELS: Final = ("perceptron", "dropout")


def random_order(num_devices: int, random: Random) -> Schedule:
    """Ops in any order in which each finds what it needs; stages on any device."""
    more = random.choices(range(num_devices), k=random.randint(0, 2))
    devices = [*range(num_devices), *more]
    random.shuffle(devices)
    program = Program.chain(devices, random.randint(1, 6))
    due = list(due_ops(program))
    random.shuffle(due)
    lanes: list[list[Any]] = [[] for _ in range(num_devices)]
    for op in taken_when_ready(due, program):
        lanes[program.stages[op.stage].device].append(op)
    return Schedule(
        program, tuple(Lane(d, 0, tuple(ops)) for d, ops in enumerate(lanes))
    )


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.timeout(240)
def test_any_order_that_passes_the_check_runs(num_workers: int, tmp_path: Path) -> None:
    """Weights and losses after a few steps are those of the plain loop."""
    random = Random(num_workers)
    runs = []
    for i in range(NUM_ORDERS):
        order = random_order(num_workers, random)
        check(order)
        num_microbatches = order.program.num_microbatches_of(0)
        run = case(MODELS[i % 2], str(order), num_microbatches)
        runs.append({**run, "num_steps": NUM_STEPS})
    check_runs(runs, num_workers, tmp_path)
