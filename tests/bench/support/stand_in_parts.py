"""Parts of `bench.gpu.all` on the stand-in for a GPU: a row of each check, as JSON."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from tests.run.support.stand_in_device import register


def main(folder: Path) -> None:
    """Run them in this process, which has run no backward before."""
    device = register()
    from bench.gpu import checks, one_worker, variants
    from bench.gpu.checked import Checks, Setting, run_check

    setting = Setting(device, quick=True, folder=folder)
    chosen: Checks = {
        **one_worker.CHECKS,
        "perceptron, 1f1b": checks.CHECKS["perceptron, 1f1b"],
        "same_seed": variants.CHECKS["same_seed"],
    }
    rows = [run_check(name, partial(x, setting)) for name, x in chosen.items()]
    (folder / "rows.json").write_text(json.dumps(rows, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
