"""The files in a run's folder: their names, and a reader of its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hocket.errors import ParseError

RECIPE_NAME: Final = "recipe.toml"
REPORT_NAME: Final = "report.html"
COSTS_NAME: Final = "costs.json"
TIMELINE_NAME: Final = "timeline.json"
METRICS_NAME: Final = "metrics.jsonl"
CHECKPOINTS_NAME: Final = "checkpoints"
CACHE_NAME: Final = "cache"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what each line of a run's metrics says; the last one may be cut short.

    Raises:
        ParseError: a line is no record of a run.
    """
    lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # of a run that was killed
                return
            raise ParseError(f"{path}:{number}: not JSON") from None
        if not isinstance(record, dict) or "kind" not in record:
            raise ParseError(f"{path}:{number}: no record of a run")
        yield record
