"""The names of what a run leaves in its folder, for training and for later readers."""

from __future__ import annotations

from typing import Final

RECIPE_NAME: Final = "recipe.toml"
REPORT_NAME: Final = "report.html"
COSTS_NAME: Final = "costs.json"
TIMELINE_NAME: Final = "timeline.json"
METRICS_NAME: Final = "metrics.jsonl"
CHECKPOINTS_NAME: Final = "checkpoints"
CACHE_NAME: Final = "cache"
