"""BERT fine-tuned on MRPC by two CPU workers: what `hocket bench ooo-pipeline` shows.

python -m bench.ooo_pipeline.run [--data FOLDER] [--rounds 20]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from bench.measure import write_result
from bench.ooo_pipeline.experiments import results
from bench.ooo_pipeline.measure import measure
from bench.ooo_pipeline.picture import KEPT, PICTURE, speedups_svg
from bench.ooo_pipeline.report import publish

MRPC: Final = Path(__file__).parents[3] / "shared" / "data" / "mrpc"


def main() -> None:
    """Measure, keep it as JSON, publish it for `hocket bench`, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=MRPC, help="MRPC's folder")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=KEPT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    measured = measure(arguments.data, num_rounds=arguments.rounds)
    write_result(arguments.output, measured)
    svg = speedups_svg(publish([*results()], measured))
    arguments.picture.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
