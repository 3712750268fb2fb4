"""What the simulator makes of the experiments, kept as JSON.

    python -m bench.wpipe.simulate

takes a minute or two. The picture and the documentation's table rest on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench.measure import write_result
from bench.wpipe.experiments import (
    PUBLISHED_MEMORY,
    PUBLISHED_TIMES,
    TWO_BW,
    Result,
    results,
)

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


def main() -> None:
    """Simulate all, and keep it."""
    published = {"times_as_fast": PUBLISHED_TIMES, "memory": PUBLISHED_MEMORY}
    rows = [row_of(result) for result in results()]
    write_result(SIMULATED, {"published": published, "rows": rows})


if __name__ == "__main__":
    main()
