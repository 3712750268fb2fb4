"""Orders without a flush beside those with one, in the same two processes.

    python -m bench.flush_free.run [--cases large bert] [--rounds 3] [--no-memory]

First the time: each round takes some steps of every schedule, and of the bounds, one
after the other. Then the memory by kind, with AdamW: with the microbatches of the model
and with as few as WPipe takes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

import hocket
from bench.flush_free.bert import BERT
from bench.flush_free.field import Field
from bench.flush_free.kinds import measure
from bench.flush_free.stretch import in_turn
from bench.flush_free.table import ONE_BLOCK
from bench.measure import environment, write_result
from bench.models import CASES
from hocket.run.cluster.world import join_world

RESULTS: Final = Path(__file__).parent / "results"
MODELS: Final = {
    **{name: CASES[name] for name in ("large", "middle", "small")},
    BERT.name: BERT,
}
FLUSH_FREE: Final = (
    "pipedream-2bw",
    "wpipe",
    f"wpipe{ONE_BLOCK}",
    "wpipe-overlapped",
    f"wpipe-overlapped{ONE_BLOCK}",
)

# That bench/pipeline_vs_torch found the fastest of those that split backwards.
ZERO_BUBBLE: Final = {"middle": "zb-auto"}
OTHER_ZERO_BUBBLE: Final = "zb-v"

NUM_ROUNDS: Final = {"large": 5, "middle": 8, "small": 12, "bert": 5}
FEWEST: Final = 2  # microbatches of two workers: the paper's, one for each


def main() -> None:
    """Measure what was asked for, and keep it as JSON after each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--schedules", nargs="+", help="in the place of all of them")
    parser.add_argument("--rounds", type=int, help="as many for every model")
    parser.add_argument("--no-memory", action="store_true", help="only the time")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[Any] = []
    for case in arguments.cases:
        own = ZERO_BUBBLE.get(case, OTHER_ZERO_BUBBLE)
        schedules = list(arguments.schedules or ("1f1b", own, *FLUSH_FREE))
        num_rounds = arguments.rounds or NUM_ROUNDS[case]
        with tempfile.TemporaryDirectory() as folder:
            found = _launched(folder, "steps", case, schedules, num_rounds)
            if not arguments.no_memory:  # with the same profile, and so the same cuts
                found += _launched(folder, "memory", case, schedules)
        for row in found:
            print(row, flush=True)
        rows += found
        write_result(arguments.output, {"environment": environment(), "rows": rows})


def _launched(folder: str, function: str, *args: Any) -> list[Any]:
    """The rows that two workers found."""
    results = hocket.launch(
        f"bench.flush_free.run:{function}",
        [*args, str(Path(folder, "profiles"))],
        num_workers=2,
        run_dir=Path(folder, function),
        timeout_s=300.0,
    )
    rows: list[Any] = results[0]
    return rows


def steps(
    case: str, schedules: list[str], num_rounds: int, folder: str
) -> list[dict[str, Any]]:
    """What each of the two processes does to measure time."""
    torch.set_num_threads(1)
    world = join_world()
    field = Field(MODELS[case], world, folder)
    for schedule in schedules:
        field.enter(schedule)
    rows = [*field.rows(in_turn(field.stretches, world, num_rounds))]
    field.close()
    return rows


def memory(case: str, schedules: list[str], folder: str) -> list[dict[str, Any]]:
    """What each of the two processes does to measure memory."""
    torch.set_num_threads(1)
    world, own = join_world(), MODELS[case]
    return [
        measure(world, own, schedule, num_microbatches, folder)
        for num_microbatches in sorted({own.num_microbatches, FEWEST}, reverse=True)
        for schedule in schedules
        if num_microbatches > FEWEST or not schedule.endswith(ONE_BLOCK)
    ]


if __name__ == "__main__":
    main()
