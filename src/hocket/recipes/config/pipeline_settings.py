"""The section [pipeline]: how many workers, and their order of work."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from hocket.core.formats.given import is_path
from hocket.nearest import nearest
from hocket.options import CAPTURED_STEP, ScheduleOptions
from hocket.recipes.config.settings import Count, Settings, layout_of
from hocket.schedules import SCHEDULES


class PipelineSettings(Settings, ScheduleOptions):
    """How many workers, and their order of work; beside them, a pipeline's options.

    Args:
        num_workers: processes, one per device; a multiple of `num_replicas`.
        layout: both numbers in one word, as published experiments have it: "4x2" is 4
            devices per pipeline x 2 replicas, 8 workers in all.
        schedule: a name from `hocket.SCHEDULES`; or "auto": the planner's choice; or
            "ooo-single": one worker, which captures its whole step; or the path of a
            file with an order of one step (PyTorch's CSV, *.csv, or text, *.txt),
            relative to the current folder.
        timeout_s: how long a worker waits for another before both give up.
    """

    num_workers: Count = 2
    layout: str | None = None
    schedule: str = "1f1b"
    timeout_s: float = 60.0

    @model_validator(mode="before")
    @classmethod
    def _layout_says_both(cls, given: Any) -> Any:
        """Workers and replicas follow from the layout where they are not said."""
        if not isinstance(given, dict) or not isinstance(given.get("layout"), str):
            return given
        layout = layout_of(given["layout"])
        both = {
            "num_workers": layout.num_workers,
            "num_replicas": layout.num_replicas,
        }
        said = {**both, **given}
        if any(said[name] != number for name, number in both.items()):
            raise ValueError(
                f"layout {layout} is {layout.num_workers} workers in "
                f"{layout.num_replicas} replicas, but num_workers is "
                f"{said['num_workers']} and num_replicas {said['num_replicas']}: say "
                "one or the other (--layout replaces both numbers; "
                "--set pipeline.layout= takes the layout away)"
            )
        return said

    @field_validator("schedule")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        known = (name for name in SCHEDULES if name != "forward-only")
        names = [*known, "auto", CAPTURED_STEP]
        if name not in names and not is_path(name):
            raise ValueError(f"no schedule {name!r}; {nearest(name, names)}")
        return name

    @model_validator(mode="after")
    def _replicas_share_the_workers(self) -> PipelineSettings:
        if self.num_workers % self.num_replicas:
            raise ValueError(
                f"num_workers {self.num_workers} is not a multiple of "
                f"num_replicas {self.num_replicas}"
            )
        return self
