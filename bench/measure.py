"""Medians and spread of things measured in turn, and where results are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.in_turn import (
    alternate,
    environment,
    paired_ratio,
    spread,
)

__all__ = ["alternate", "environment", "paired_ratio", "spread", "write_result"]


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Keep a result as JSON, with its environment; replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
