"""BERT fine-tuned on MRPC by two CPU workers: what `hocket bench wpipe` shows.

python -m bench.wpipe.run [--data FOLDER] [--rounds 20]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from bench.measure import write_result
from bench.wpipe.experiments import results
from bench.wpipe.measure import measure
from bench.wpipe.picture import KEPT
from bench.wpipe.report import publish

MRPC: Final = Path(__file__).parents[3] / "shared" / "data" / "mrpc"


def main() -> None:
    """Measure, keep it as JSON, and publish it for `hocket bench`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=MRPC, help="MRPC's folder")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=KEPT)
    arguments = parser.parse_args()
    measured = measure(arguments.data, num_rounds=arguments.rounds)
    write_result(arguments.output, measured)
    publish([*results()], measured)


if __name__ == "__main__":
    main()
