"""Write what `hocket bench ooo-data` shows: simulated hosts, and what was measured.

    python -m bench.ooo_data.publish

takes half a minute; the measurement is that of `python -m bench.ooo_data.run`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.ooo_data.experiments import simulated
from bench.ooo_data.experiments import table as simulated_rows
from bench.ooo_data.table import measured as measured_rows
from bench.published import Row, kept, write_published

MEASURED: Final = Path(__file__).parent / "results" / "cpu.json"
_SIMULATED: Final = (
    "Steps of ResNet-50 (128 samples) and ResNet-101 (96) on each of four V100s per "
    "host, float32; r: all reductions over all computing. DDP: buckets of 25 MB. best "
    "buckets: the fastest of the sizes that reverse first-k can choose from. k of "
    "buckets: found by hocket. artifact's k: in layers, each a bucket, and how many "
    "times as fast as DDP that is. The paper (Oh et al., EuroSys'22) says 1.10 to 1.27 "
    "times BytePS for all of them together, on 10 Gb/s and 25 Gb/s."
)
_MEASURED: Final = (
    "Two hosts in network namespaces with a limited rate, layers that sleep for their "
    "part of a step, gloo. k = 0: the usual order in the buckets that were found. "
    "simulated: the pipeline's own prediction over the median. See bench/ooo_data."
)


def main() -> None:
    """Simulate all hosts, and write them beside the measurement."""
    results = [*simulated()]
    found = kept(MEASURED)
    where = found["environment"]
    title = (
        f"Measured on two CPU workers, {where['date']}, {where['num_cores']} cores of "
        f"{where['processor']}, torch {where['torch']}; medians of rounds in turn:"
    )
    tables = [
        {
            "title": ["Reverse first-k on up to twelve hosts, simulated:"],
            "rows": _plain(simulated_rows(results)),
            "legend": _SIMULATED,
        },
        {
            "title": [title],
            "rows": _plain(measured_rows(found["rows"])),
            "legend": _MEASURED,
        },
    ]
    write_published("ooo-data", map(asdict, results), found, tables)


def _plain(rows: list[list[str]]) -> list[Row]:
    return [tuple(cell.replace("**", "") for cell in row) for row in rows]


if __name__ == "__main__":
    main()
