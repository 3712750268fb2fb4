"""A teacher and its student on two workers: samples per second, bubble and memory.

    python -m bench.teacher.run [--cases "large 2"] [--rounds 8]

All contestants of a case run in the same two processes with one thread each, in turn,
and in the other order every other round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

import hocket
from bench.flush_free.stretch import NUM_STEPS, Stretch, in_turn, stretch_of
from bench.measure import environment, paired_ratio, spread, write_result
from bench.teacher.models import CASES, Case, distill, sgd
from bench.teacher.orders import as_published, filled, teacher_first
from bench.teacher.plain import bound_step, ddp_step
from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.model.profile.allocations import allocations
from hocket.run.cluster.world import World, join_world
from hocket.run.engine.program_run import ProgramRun
from hocket.run.engine.sync.step_result import StepResult

RESULTS: Final = Path(__file__).parent / "results" / "cpu.json"
NUM_ROUNDS: Final = 8
NUM_WORKERS: Final = 2
FILLED: Final = ("gpipe", "1f1b", "zb-h1")
BOUND: Final = "bound"
DDP: Final = "data parallel"
NAIVE: Final = "one device at a time"
PUBLISHED: Final = "tspipe"
_TOLERANCE: Final = 1e-4  # of a weight's change in float32


def main() -> None:
    """Measure what was asked for, and keep it as JSON after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: list[Any] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.teacher.run:worker",
                [case, arguments.rounds],
                num_workers=NUM_WORKERS,
                run_dir=Path(folder),
                timeout_s=300.0,
            )
        for row in results[0]:
            print(row, flush=True)
        rows += results[0]
        write_result(arguments.output, {"environment": environment(), "rows": rows})


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the contestants.

    Args:
        name: in tables.
        stretch: takes some steps on this worker.
        run: what plays an order; None for the others.
        peak_bytes: the most that this worker's steps add.
    """

    name: str
    stretch: Callable[[], Stretch]
    run: ProgramRun | None = None
    peak_bytes: int | None = None


def worker(name: str, num_rounds: int) -> list[dict[str, Any]]:
    """Measure a case in one of the processes; return a row for each contestant."""
    torch.set_num_threads(1)
    world, case = join_world(), CASES[name]
    costs = _costs(case)
    entries = [
        *(
            _entry(label, order, case, costs, world)
            for label, order in _orders(case, costs)
        ),
        Entry(DDP, _plain(ddp_step(case, world.rank, NUM_WORKERS))),
        Entry(BOUND, _plain(bound_step(case, world.rank, NUM_WORKERS))),
    ]
    _refuse_other_weights(entries, world)
    stretches = in_turn({x.name: x.stretch for x in entries}, world, num_rounds)
    peaks = world.gather_json({x.name: x.peak_bytes for x in entries}, "peaks")
    for entry in reversed(entries):
        if entry.run is not None:
            entry.run.close()
    return [_row(case, entry, stretches, peaks) for entry in entries]


def _orders(case: Case, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    m = case.num_microbatches
    yield NAIVE, teacher_first("gpipe", NUM_WORKERS, 1)
    for schedule in ("gpipe", "1f1b"):
        yield f"{schedule}, teacher first", teacher_first(schedule, NUM_WORKERS, m)
    yield PUBLISHED, as_published(NUM_WORKERS, m // 2)
    for schedule in FILLED:
        yield f"{schedule}, filled", filled(schedule, NUM_WORKERS, m, m, costs)
    finer = _costs(case, num_parts=2 * m)
    yield "1f1b, filled finer", filled("1f1b", NUM_WORKERS, m, 2 * m, finer)


def _costs(case: Case, num_parts: int | None = None) -> Costs:
    """Seconds in forwards of a microbatch of a student's stage."""
    m = case.num_microbatches
    teacher_s = case.forward_ratio * m / (num_parts or m)
    teacher = StageCost(teacher_s, 0.0, 0.0)
    return Costs((*[teacher] * NUM_WORKERS, *[StageCost(1.0, 1.0, 1.0)] * NUM_WORKERS))


def _entry(name: str, order: Schedule, case: Case, costs: Costs, world: World) -> Entry:
    """Make a run, and take steps until all of its memory is there."""
    is_published = name == PUBLISHED
    batch = case.batch()
    run = ProgramRun(
        order,
        case.twin_nets() if is_published else case.nets(),
        {"student": distill},
        {"student": sgd} | ({"teacher": hocket.Momentum(0.99)} if is_published else {}),
        batch,
        cut_at=case.cut_at(twins=is_published),
        world=world,
    )
    batches = [batch] * NUM_STEPS

    def train() -> list[StepResult]:
        return [*run.train(batches)]

    train()
    with allocations(torch.device("cpu")) as log:
        train()
        with log.span():
            train()
    return Entry(name, lambda: stretch_of(run.train(batches)), run, log.peaks[0])


def _plain(step: Callable[[], None]) -> Callable[[], Stretch]:
    def repeated() -> Iterator[None]:
        for _ in range(NUM_STEPS):
            step()
            yield

    return lambda: stretch_of(repeated())


def _refuse_other_weights(entries: list[Entry], world: World) -> None:
    """See that all runs but the published one have trained the same.

    Raises:
        RuntimeError: one has other weights.
    """
    expected: dict[str, torch.Tensor] | None = None
    for entry in entries:
        if entry.run is None or entry.name == PUBLISHED:
            continue
        found = entry.run.state_dict()["student"]
        if expected is None:
            expected = found
        for key, value in found.items():
            if not torch.allclose(value, expected[key], rtol=_TOLERANCE, atol=1e-6):
                off = (value - expected[key]).abs().max()
                raise RuntimeError(f"{entry.name}: {key} is off by {off:.2e}")


def _row(
    case: Case,
    entry: Entry,
    stretches: dict[str, list[Stretch]],
    peaks: list[dict[str, int | None]],
) -> dict[str, Any]:
    own = {name: [x.step_s for x in found] for name, found in stretches.items()}
    step_s = own[entry.name]
    bubbles = [x.bubble for x in stretches[entry.name] if x.bubble is not None]
    row = {
        "case": case.name,
        "contestant": entry.name,
        "num_microbatches": case.num_microbatches,
        "num_rounds": len(step_s),
        "samples_per_s": round(case.num_samples / median(step_s), 3),
        "step": spread(step_s),
        "step_over_bound": paired_ratio(step_s, own[BOUND]),
        "over_naive": paired_ratio(own[NAIVE], step_s),
        "over_gpipe": paired_ratio(own["gpipe, teacher first"], step_s),
    }
    if bubbles:
        row["bubble"] = round(median(bubbles), 4)
    if entry.peak_bytes is not None:
        row["peak_bytes"] = [part[entry.name] for part in peaks]
    return row


if __name__ == "__main__":
    main()
