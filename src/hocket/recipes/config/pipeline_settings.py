"""The section [pipeline]: how many workers, and their order of work."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from hocket.core.formats.given import is_path
from hocket.core.layout import WorkerLayout
from hocket.errors import PlanError
from hocket.nearest import nearest
from hocket.recipes.config.settings import Count, NaturalNumber, Positive, Settings
from hocket.schedules import SCHEDULES


class PipelineSettings(Settings):
    """How many workers, and their order of work.

    Args:
        num_workers: processes, one per device; a multiple of `num_replicas`.
        num_replicas: copies of the pipeline, each on its own part of the batch.
        layout: both in one word, as published experiments have it: "4x2" is 4 devices
            per pipeline x 2 replicas, 8 workers in all.
        schedule: a name from `hocket.SCHEDULES`; or "auto": the planner's choice; or
            the path of a file with an order of one step (PyTorch's CSV, *.csv, or text,
            *.txt), relative to the current folder.
        max_delay: by how many updates the weights may be old that stages read where
            the planner chooses: 1 lets "auto" take orders that never flush.
        correction: what updates do about gradients of old weights, where the schedule
            has such (`hocket.run.weights.correction`).
        num_discounted_updates: over which a correction "lr-discount" fades; a quarter
            of the training where it is not said.
        num_microbatches: the microbatches of each replica's part of the batch.
        stages_per_device: for schedules that give a device several stages; their own
            choice where it is not said.
        cut: names of the modules that a stage begins with, all but the first stage's;
            balanced by a profile where it is not said.
        recompute: which stages compute their forward again in the backward, instead of
            keeping its activations: none, all, or as many as the memory asks for.
        memory_bytes: the memory of each worker, for "auto".
        compile: compile the stages before the first step.
        timeout_s: how long a worker waits for another before both give up.
    """

    num_workers: Count = 2
    num_replicas: Count = 1
    layout: str | None = None
    schedule: str = "1f1b"
    max_delay: NaturalNumber = 0
    correction: Literal[
        "none", "error-feedback", "weight-prediction", "lr-discount"
    ] = "none"
    num_discounted_updates: Count | None = None
    num_microbatches: Count = 8
    stages_per_device: Count | None = None
    cut: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    recompute: Literal["none", "all", "auto"] = "none"
    memory_bytes: Count | None = None
    compile: bool = False
    timeout_s: Positive = 60.0

    @model_validator(mode="before")
    @classmethod
    def _layout_says_both(cls, given: Any) -> Any:
        """Workers and replicas follow from the layout where they are not said."""
        if not isinstance(given, dict) or not isinstance(given.get("layout"), str):
            return given
        layout = _layout(given["layout"])
        return {
            "num_workers": layout.num_workers,
            "num_replicas": layout.num_replicas,
            **given,
        }

    @field_validator("schedule")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        names = [*(known for known in SCHEDULES if known != "forward-only"), "auto"]
        if name not in names and not is_path(name):
            raise ValueError(f"no schedule {name!r}; {nearest(name, names)}")
        return name

    @model_validator(mode="after")
    def _layout_agrees(self) -> PipelineSettings:
        if self.layout is None:
            return self
        layout = _layout(self.layout)
        said = self.num_workers, self.num_replicas
        if said != (layout.num_workers, layout.num_replicas):
            raise ValueError(
                f"layout {layout} is {layout.num_workers} workers in "
                f"{layout.num_replicas} replicas, but num_workers is "
                f"{self.num_workers} and num_replicas {self.num_replicas}: say one or "
                "the other (--layout replaces both numbers; --set pipeline.layout= "
                "takes the layout away)"
            )
        return self

    @model_validator(mode="after")
    def _replicas_share_the_workers(self) -> PipelineSettings:
        if self.num_workers % self.num_replicas:
            raise ValueError(
                f"num_workers {self.num_workers} is not a multiple of "
                f"num_replicas {self.num_replicas}"
            )
        return self

    @model_validator(mode="after")
    def _delay_is_asked_for(self) -> PipelineSettings:
        if self.max_delay and self.schedule != "auto":
            raise ValueError(
                f"max_delay {self.max_delay} has no effect unless schedule is 'auto': "
                f"{self.schedule!r} says itself how old its weights are"
            )
        if self.schedule == "auto" and not self.max_delay and self.correction != "none":
            raise ValueError(
                f"correction {self.correction!r} has no effect while max_delay is 0: "
                "no order with old weights is chosen"
            )
        return self

    @model_validator(mode="after")
    def _discount_is_asked_for(self) -> PipelineSettings:
        if self.num_discounted_updates and self.correction != "lr-discount":
            raise ValueError(
                f"num_discounted_updates {self.num_discounted_updates} has no effect "
                "unless correction is 'lr-discount'"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_asked_for(self) -> PipelineSettings:
        if self.memory_bytes and "auto" not in (self.recompute, self.schedule):
            raise ValueError(
                f"memory_bytes {self.memory_bytes} has no effect unless recompute or "
                "schedule is 'auto'"
            )
        return self


def discounted_updates(settings: PipelineSettings, num_steps: int) -> int | None:
    """Return over how many updates a discount of the learning rate fades, if any.

    Args:
        settings: the recipe's section.
        num_steps: the steps of the whole training.
    """
    if settings.correction != "lr-discount":
        return None
    return settings.num_discounted_updates or max(1, num_steps // _PART_DISCOUNTED)


# Rates are high in the first part of a training, with or without a warm-up, and this is
# what a delay takes its toll of; what comes later should be learned at the full rate.
_PART_DISCOUNTED: Final = 4


def _layout(text: str) -> WorkerLayout:
    try:
        return WorkerLayout.parse(text)
    except PlanError as error:  # pydantic takes only a ValueError for a fault
        raise ValueError(str(error)) from None
