"""Ten epochs of training, layers freezing or not, on two workers: seconds and quality.

    python -m bench.freezing.run [--cases "ViT, CIFAR-10"] [--rounds 0 1 2] [--again]

All contestants train in turn in the same two processes with one thread each, and in the
other order every other round. Each round has a seed of its own for the order of the
samples, and begins with its pretraining. A round takes some four minutes, and is kept
when it is over: a later call goes on with the rounds that are not there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, Final

import hocket
from bench.freezing.cases import (
    ALL,
    BASE,
    CASES,
    CONTESTANTS,
    EVALUATED,
    LOCAL,
    NUM_WORKERS,
    PRETRAINING,
    UNFROZEN,
    Case,
    Contestant,
)
from bench.freezing.parts import is_measured, joined, rows_of
from bench.freezing.table import measured
from bench.freezing.training import (
    Known,
    base,
    pretrain,
    ready,
    train,
    use_one_thread,
)
from bench.measure import environment, write_result
from hocket.cli.shared.output import aligned
from hocket.run.cluster.world import World, join_world

RESULTS: Final = Path(__file__).parent / "results" / "cpu.json"
NUM_ROUNDS: Final = 3
TARGET: Final = {"+ replicas": 1.4, ALL: 2.0, "transition_s": 2.0, "prediction": 0.1}
_RUNS: Final = "contestants"


def main() -> None:
    """Measure what was asked for, and keep it as JSON after each case."""
    names = [x.name for x in CONTESTANTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--contestants", nargs="+", default=names, choices=names)
    numbers = range(NUM_ROUNDS)
    parser.add_argument("--rounds", nargs="+", type=int, default=numbers)
    parser.add_argument(
        "--again", action="store_true", help="also rounds that are kept"
    )
    parser.add_argument("--data", type=Path, default=LOCAL)
    parser.add_argument("--set", nargs="+", default=[], help="settings of all recipes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = rows_of(arguments.output)  # cases that were measured before stay
    for name, number in product(arguments.cases, arguments.rounds):
        asked, before = arguments.contestants, rows.get(name)
        if not arguments.again and is_measured(before, _RUNS, asked, number):
            continue
        with tempfile.TemporaryDirectory() as place:
            results = hocket.launch(
                "bench.freezing.run:worker",
                [
                    *(name, asked, number),
                    *(str(arguments.data.resolve()), arguments.set, place),
                ],
                num_workers=NUM_WORKERS,
                run_dir=Path(place),
                timeout_s=300.0,
            )
        rows[name] = joined(results[0], before, _RUNS, number)
        found = {"environment": environment(), "target": TARGET}
        write_result(arguments.output, {**found, "rows": [*rows.values()]})
    for line in aligned(map(tuple, measured([*rows.values()]))):
        print(line)


def worker(
    name: str,
    contestants: Sequence[str],
    number: int,
    data: str,
    more: Sequence[str],
    place: str,
) -> dict[str, Any]:
    """Measure a round of a case in one of the processes."""
    use_one_thread()
    with closing(join_world()) as world:
        return _measured(CASES[name], contestants, number, data, more, place, world)


def _measured(
    case: Case,
    contestants: Sequence[str],
    number: int,
    data: str,
    more: Sequence[str],
    place: str,
    world: World,
) -> dict[str, Any]:
    folder = Path(place)
    common = [*case.settings, f"data.path={Path(data) / case.data}", *more]
    whole = {
        x.name: base(*ready(case.recipe, [*common, *x.settings]), world, folder)
        for x in CONTESTANTS
        if x.name in (BASE, UNFROZEN)
    }
    memory_bytes = (whole[BASE].bytes + whole[UNFROZEN].bytes) // 2
    begun, known = pretrain(
        *ready(case.recipe, [*common, *PRETRAINING]), world, folder / "begun"
    )
    common.append(f"model.pretrained={begun}")
    ran: dict[str, Any] = dict.fromkeys(contestants)
    for contestant in CONTESTANTS[:: -1 if number % 2 else 1]:
        if contestant.name in contestants:
            settings = [*common, f"training.seed={number}"]
            own = known
            if not contestant.freezes:  # its own costs, measured before the first step
                pace = known.pace._replace(share=1.0)
                own = Known(pace, whole[contestant.name].probe_s)
            found = _one(case, contestant, settings, memory_bytes, own, world, folder)
            ran[contestant.name] = found
            _say(world, case, contestant.name, found)
    return {
        "case": case.name,
        "num_parameters": whole[BASE].num_parameters,
        "bytes_2x1": whole[BASE].bytes,
        "bytes_1x2": whole[UNFROZEN].bytes,
        "memory_bytes": memory_bytes,
        "pace": [round(x, 5) for x in known.pace],
        _RUNS: ran,
    }


def _one(
    case: Case,
    contestant: Contestant,
    settings: list[str],
    memory_bytes: int,
    known: Known,
    world: World,
    folder: Path,
) -> dict[str, Any]:
    """Train one contestant in one round."""
    own = [*settings, *contestant.settings]
    if contestant.is_limited:
        own.append(f"pipeline.memory_bytes={memory_bytes}")
    if contestant.is_cached:  # a new one for each training
        number = len([*folder.glob("cache*")]) if world.rank == 0 else 0
        number = world.broadcast_json(number, name="caches")
        own.append(f"cache.folder={folder / f'cache{number}'}")
    _, evaluated = ready(case.recipe, [*own, EVALUATED])
    task = ready(case.recipe, own)
    return train(*task, evaluated.evaluation, world, folder, known)


def _say(world: World, case: Case, name: str, found: dict[str, Any]) -> None:
    if world.rank == 0:
        shapes = " ".join(f"{shape}:{frozen}" for shape, frozen in found["epochs"])
        print(f"{case.name} | {name} | {found['seconds']:.1f} s | {shapes}", flush=True)


if __name__ == "__main__":
    main()
