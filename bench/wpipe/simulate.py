"""What the simulator makes of the experiments, kept as JSON.

    python -m bench.wpipe.simulate [--layouts 64x1 32x2]

takes a minute or two without pipelines of 32 and 64 devices, and about a minute for
each of those. Each experiment is kept as soon as it is simulated, here and in what
`hocket bench wpipe` shows. The picture and the documentation's table rest on it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from bench.measure import write_result
from bench.published import kept
from bench.wpipe.experiments import (
    EXPERIMENTS,
    ORDER,
    PUBLISHED_MEMORY,
    PUBLISHED_TIMES,
    TWO_BW,
    Result,
    results,
)
from bench.wpipe.report import publish_one

SIMULATED: Final = Path(__file__).parent / "results" / "simulated.json"


def row_of(result: Result) -> dict[str, Any]:
    """An experiment beside 2BW, in numbers of four decimals."""
    experiment, two_bw = result.experiment, result.best.get(TWO_BW)
    return {
        "experiment": experiment.name,
        "layout": experiment.layout,
        "is_published": experiment.is_published,
        "recomputes": None if two_bw is None else two_bw.recomputes,
        "num_samples": {name: best.num_samples for name, best in result.best.items()},
        "times_as_fast": {name: _short(result.times(name)) for name in result.best},
        "alike": {
            "times_as_fast": _short(result.times_alike),
            "memory": _short(result.memory_alike),
        },
    }


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def keep(result: Result) -> None:
    """Write an experiment's row in the place of an earlier one, in their order."""
    published = {"times_as_fast": PUBLISHED_TIMES, "memory": PUBLISHED_MEMORY}
    rows = [*kept(SIMULATED)["rows"], row_of(result)]
    by_place = {(row["experiment"], row["layout"]): row for row in rows}
    ordered = [by_place[key] for key in ORDER if key in by_place]
    write_result(SIMULATED, {"published": published, "rows": ordered})
    publish_one(result)


def main() -> None:
    """Simulate all, or some layouts, and keep them."""
    layouts = sorted({experiment.layout for experiment in EXPERIMENTS})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=layouts, choices=layouts)
    asked = parser.parse_args().layouts
    for result in results(tuple(x for x in EXPERIMENTS if x.layout in asked)):
        keep(result)
        print(row_of(result), flush=True)


if __name__ == "__main__":
    main()
