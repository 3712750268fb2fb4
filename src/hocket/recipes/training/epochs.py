"""Adds up what each epoch's time went to.

    epoch 3   ├ data ┤├ transition ┤├ forward, backward, all-reduce ... ┤├ data ┤ ...
                                    └ per step: those of its last one, measured

Seconds of forwards, backwards and reductions are means over the devices of the first
replica; a device that waits has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, Final

from hocket.core.costs import Costs
from hocket.core.op import WHOLE_OR_SPLIT_BACKWARD, Kind
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html import Table
from hocket.recipes.training.records import EpochRecord
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.pipeline import Pipeline

# The fields of a record: sums of results, and a measured step's times their number.
_SUMS: Final = (
    "num_samples",
    "seconds",
    "data_s",
    "transition_s",
    "cache_s",
    "cache_hits",
)
_STEP_S: Final = ("forward_s", "backward_s", "reduce_s")
_STEP_COUNTS: Final = ("num_reductions", "reduced_bytes", "message_bytes")


@dataclass(slots=True)
class EpochSums:
    """What the steps of an epoch came to so far; of one that resumed, its own part."""

    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    data_s: float = 0.0
    transition_s: float = 0.0
    cache_hits: int = 0
    cache_s: float = 0.0
    last: StepResult | None = field(default=None, repr=False)

    def add(self, result: StepResult, since_last_s: float) -> None:
        """Add a step.

        Args:
            result: the step's.
            since_last_s: from the end of the step before, without evaluations.
        """
        self.num_steps += 1
        self.num_samples += result.num_samples
        self.seconds += max(since_last_s, result.seconds)
        self.transition_s += result.transition_s
        waited_s = since_last_s - result.seconds - result.transition_s
        self.data_s += max(0.0, waited_s)
        self.cache_hits += result.cache_hits
        self.cache_s += result.cache_s
        self.last = result

    def record(
        self, epoch: int, pipeline: Pipeline, measured: Timeline | None
    ) -> EpochRecord:
        """Return the epoch's record.

        Args:
            epoch: its number, from 0.
            pipeline: as it is at the end of the epoch.
            measured: the epoch's last step; None if it was not measured.
        """
        assert self.last is not None, "an epoch has a step"
        num_active, num_frozen = pipeline.num_parameters
        costs = pipeline.plan.costs
        of_steps = {name: x * self.num_steps for name, x in _parts(measured).items()}
        return EpochRecord(
            epoch=epoch,
            num_steps=self.last.step + 1,
            layout=self.last.layout,
            num_frozen=self.last.num_frozen,
            num_active_parameters=num_active,
            num_frozen_parameters=num_frozen,
            link_bytes_per_s=_message_rate(costs),
            ring_bytes_per_s=costs.reduce_link.bytes_per_s,
            **{name: getattr(self, name) for name in _SUMS},
            **of_steps,
        )


def _message_rate(costs: Costs) -> float:
    """Return the bytes per second of a message, copied at both of its ends."""
    seconds = 1 / costs.link.bytes_per_s + 2 / costs.handling.bytes_per_s
    return 1 / seconds if seconds else inf


def _parts(timeline: Timeline | None) -> dict[str, Any]:
    """Return what a measured step consists of; overlapping ones count as one step.

    Seconds are NaN where none was measured, and the rest is 0.
    """
    if timeline is None:
        return dict.fromkeys(_STEP_S, nan) | dict.fromkeys(_STEP_COUNTS, 0)
    program = timeline.schedule.program
    num_times = program.num_devices * program.num_steps

    def seconds(*kinds: Kind) -> float:
        spans = (x for x in timeline.spans if x.op.kind in kinds)
        return sum(x.end_s - x.start_s for x in spans) / num_times

    transfers = [*timeline.transfers]
    reduced = [x.num_bytes for x in transfers if x.op.kind is Kind.REDUCE]
    messages = [x.num_bytes for x in transfers if x.from_device != x.to_device]
    if program.num_replicas == 1:
        reduced = []
    parts_s = (
        seconds(Kind.FORWARD),
        seconds(*WHOLE_OR_SPLIT_BACKWARD),
        seconds(Kind.REDUCE),
    )
    counts = (len(reduced), sum(reduced), sum(messages))
    each = (count // program.num_steps for count in counts)
    return dict(zip((*_STEP_S, *_STEP_COUNTS), (*parts_s, *each), strict=True))


# The columns of a report: an epoch's number, and how it is written.
_COLUMNS: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "active parameters": ("num_active_parameters", "{:,}".format),
    "frozen parameters": ("num_frozen_parameters", "{:,}".format),
    "samples/s": ("samples_per_s", "{:,.1f}".format),
    "s": ("seconds", "{:.2f}".format),
    "data s": ("data_s", "{:.2f}".format),
    "forward s": ("forward_s", "{:.2f}".format),
    "backward s": ("backward_s", "{:.2f}".format),
    "all-reduce s": ("reduce_s", "{:.2f}".format),
    "cache s": ("cache_s", "{:.2f}".format),
    "transition s": ("transition_s", "{:.2f}".format),
    "reductions/s": ("reductions_per_s", "{:.1f}".format),
    "MB reduced/s": ("reduced_bytes_per_s", lambda x: f"{x / 1e6:.1f}"),
    "MB sent/s": ("message_bytes_per_s", lambda x: f"{x / 1e6:.1f}"),
    "link MB/s": ("link_bytes_per_s", lambda x: f"{x / 1e6:,.0f}"),
    "ring MB/s": ("ring_bytes_per_s", lambda x: f"{x / 1e6:,.0f}"),
    "cache hits": ("cache_hits", "{:,}".format),
}


def epoch_table(epochs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of a report; seconds and rates are those of an epoch.

    Args:
        epochs: as `metrics.jsonl` has them, with null for what is not finite.
    """
    head = ("epoch", "devices x replicas", "frozen layers", *_COLUMNS)
    return Table("epochs", head, tuple(map(_row, epochs)))


def _row(epoch: Mapping[str, Any]) -> tuple[str, ...]:
    rates = {
        "reductions_per_s": epoch["num_reductions"] / epoch["seconds"],
        "reduced_bytes_per_s": epoch["reduced_bytes"] / epoch["seconds"],
        **epoch,
    }
    cells = (
        "–" if rates[name] is None else text(rates[name])
        for name, text in _COLUMNS.values()
    )
    return str(epoch["epoch"] + 1), epoch["layout"], str(epoch["num_frozen"]), *cells
