"""Data parallelism on two hosts with a limited link: DDP and reverse first-k, in turn.

    python -m bench.ooo_data.run [--ratios 0.5 0.75 0.9 1.0 1.25] [--rounds 5]
    python -m bench.ooo_data.run --model resnet      # computes: needs two idle cores

Needs root and iproute2: hosts are network namespaces (hosts.py). Each ratio takes one
to two minutes to make its pipelines, and each of its rounds, of which one warms up,
about 60 steps: with five rounds 3 minutes at 0.5, and 6 at 1.25. What is measured is
kept after each ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Final

from bench.measure import environment, write_result
from bench.ooo_data.hosts import run_workers, two_hosts

RESULTS: Final = Path(__file__).parent / "results"
RATIOS: Final = (0.5, 0.75, 0.9, 1.0, 1.25)
TARGET: Final = {"at_0.9": 1.15, "least": 0.98, "prediction": 0.05}
_FILES: Final = {"sleeping": "cpu.json", "resnet": "computed.json"}


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=_FILES, default="sleeping")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: quartiles need 2 or more")
    output = arguments.output or RESULTS / _FILES[arguments.model]
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        rows = Path(folder) / "rows.json"
        ratios = ",".join(map(str, arguments.ratios))
        try:
            run_workers(
                hosts,
                "bench.ooo_data.worker",
                [arguments.model, ratios, str(arguments.rounds), str(rows)],
            )
        finally:  # the ratios that were measured, where it is cut off
            if rows.exists():
                found = json.loads(rows.read_text(encoding="utf-8"))
                result = {"environment": environment(), "target": TARGET, "rows": found}
                write_result(output, result)


if __name__ == "__main__":
    main()
