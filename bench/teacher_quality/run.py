"""Train students with teachers to the end, from three seeds.

    python -m bench.teacher_quality.run [--data FOLDER] [--seeds 0 1 2]

`hocket.emulate` trains in this one process exactly what every run would, on one core.
What has been measured is kept after each run, and not measured again unless its
settings have changed since.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from bench.measure import environment, write_result
from bench.teacher_quality import byol, distil
from bench.teacher_quality.variants import BYOL, DISTILLED

Runs = Callable[[int, Path, list[str]], Iterator[dict[str, Any]]]

RESULTS: Final = Path(__file__).parent / "results" / "cpu.json"
DATA: Final = Path(__file__).parents[3] / "shared" / "data"
_BYOL: Final = "BYOL, CIFAR-10"
_ALL: Final = "distillation, SST-2"
_FEW: Final = "distillation, 1,000 of SST-2"
_NETS: Final = ["teacher", *DISTILLED]
CASES: Final[dict[str, tuple[Runs, list[str]]]] = {
    _BYOL: (byol.runs, [*BYOL]),
    _ALL: (partial(distil.runs, distil.STUDENT), _NETS),
    _FEW: (partial(distil.runs, distil.FEW), _NETS),
}
_TAUGHT: Final = [distil.RECIPE, *distil.TEACHER, *map(str, DISTILLED.values())]
SETTINGS: Final = {
    _BYOL: [byol.RECIPE, *byol.SETTINGS, *map(str, BYOL.values())],
    _ALL: [*_TAUGHT, f"T={distil.TEMPERATURE}", *distil.STUDENT],
    _FEW: [*_TAUGHT, f"T={distil.TEMPERATURE}", *distil.FEW],
}
NUM_SEEDS: Final = 3


def main() -> None:
    """Train what is missing, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of all data")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(NUM_SEEDS)])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = kept(arguments.output)
    for seed in arguments.seeds:
        for case in arguments.only:
            runs, variants = CASES[case]
            done = {
                x["variant"] for x in rows if (x["case"], x["seed"]) == (case, seed)
            }
            missing = [name for name in variants if name not in done]
            if not missing:
                continue
            for row in runs(seed, arguments.data.resolve(), missing):
                rows.append({"case": case, **row})
                print({**rows[-1], "curve": "..."}, flush=True)
                _write(arguments.output, rows)


def kept(path: Path) -> list[dict[str, Any]]:
    """Return the runs of an earlier time whose settings are still the same."""
    if not path.exists():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    return [
        row
        for row in result["rows"]
        if result["settings"].get(row["case"]) == SETTINGS.get(row["case"])
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Keep all rows in the order of the tables, whichever came first."""
    order = [(case, name) for case, (_, names) in CASES.items() for name in names]
    rows.sort(key=lambda row: (order.index((row["case"], row["variant"])), row["seed"]))
    found = {"environment": environment(), "settings": SETTINGS, "rows": rows}
    write_result(path, found)


if __name__ == "__main__":
    main()
