"""Adds up what each epoch's time went to.

    epoch 3   ├ data ┤├ transition ┤├ forward, backward, all-reduce ... ┤├ data ┤ ...
                                    └ per step: those of its last one, measured

Seconds of forwards, backwards and reductions are means over the devices of the first
replica; a device that waits has neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan

from hocket.core.costs import Costs
from hocket.core.op import WHOLE_OR_SPLIT_BACKWARD, Kind
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html import Table
from hocket.recipes.training.records import EpochRecord
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.pipeline import Pipeline


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
        step = _Step.of(measured)
        return EpochRecord(
            epoch=epoch,
            num_steps=self.last.step + 1,
            layout=self.last.layout,
            num_frozen=self.last.num_frozen,
            num_active_parameters=num_active,
            num_frozen_parameters=num_frozen,
            num_samples=self.num_samples,
            seconds=self.seconds,
            data_s=self.data_s,
            transition_s=self.transition_s,
            forward_s=step.forward_s * self.num_steps,
            backward_s=step.backward_s * self.num_steps,
            reduce_s=step.reduce_s * self.num_steps,
            cache_s=self.cache_s,
            cache_hits=self.cache_hits,
            num_reductions=step.num_reductions * self.num_steps,
            reduced_bytes=step.reduced_bytes * self.num_steps,
            message_bytes=step.message_bytes * self.num_steps,
            link_bytes_per_s=_message_rate(pipeline.plan.costs),
            ring_bytes_per_s=pipeline.plan.costs.reduce_link.bytes_per_s,
        )


def _message_rate(costs: Costs) -> float:
    """Return the bytes per second of a message, copied at both of its ends."""
    seconds = 1 / costs.link.bytes_per_s + 2 / costs.handling.bytes_per_s
    return 1 / seconds if seconds else inf


@dataclass(frozen=True, slots=True)
class _Step:
    """What a measured step consists of."""

    forward_s: float = nan
    backward_s: float = nan
    reduce_s: float = nan
    num_reductions: int = 0
    reduced_bytes: int = 0
    message_bytes: int = 0

    @classmethod
    def of(cls, timeline: Timeline | None) -> _Step:
        """Return the parts of a timeline; overlapping steps are counted as one step."""
        if timeline is None:
            return cls()
        program = timeline.schedule.program
        num_times = program.num_devices * program.num_steps

        def seconds(*kinds: Kind) -> float:
            spans = (x for x in timeline.spans if x.op.kind in kinds)
            return sum(x.end_s - x.start_s for x in spans) / num_times

        transfers = [*timeline.transfers]
        reduced = [x.num_bytes for x in transfers if x.op.kind is Kind.REDUCE]
        messages = [x.num_bytes for x in transfers if x.from_device != x.to_device]
        is_reduced = program.num_replicas > 1
        return cls(
            seconds(Kind.FORWARD),
            seconds(*WHOLE_OR_SPLIT_BACKWARD),
            seconds(Kind.REDUCE),
            len(reduced) * is_reduced // program.num_steps,
            sum(reduced) * is_reduced // program.num_steps,
            sum(messages) // program.num_steps,
        )


HEAD = (
    *("epoch", "devices x replicas", "frozen layers", "active parameters"),
    *("frozen parameters", "samples/s", "s", "data s", "forward s", "backward s"),
    *("all-reduce s", "cache s", "transition s", "reductions/s", "MB reduced/s"),
    *("MB sent/s", "link MB/s", "ring MB/s", "cache hits"),
)


def epoch_table(epochs: Sequence[EpochRecord]) -> Table:
    """Return the table of a report; seconds and rates are those of an epoch."""
    rows = tuple(
        (
            str(x.epoch + 1),
            x.layout,
            str(x.num_frozen),
            f"{x.num_active_parameters:,}",
            f"{x.num_frozen_parameters:,}",
            f"{x.samples_per_s:,.1f}",
            *map(_seconds, (x.seconds, x.data_s, x.forward_s, x.backward_s)),
            *map(_seconds, (x.reduce_s, x.cache_s, x.transition_s)),
            f"{x.num_reductions / x.seconds:.1f}",
            f"{x.reduced_bytes / x.seconds / 1e6:.1f}",
            f"{x.message_bytes_per_s / 1e6:.1f}",
            *map(_bandwidth, (x.link_bytes_per_s, x.ring_bytes_per_s)),
            f"{x.cache_hits:,}",
        )
        for x in epochs
    )
    return Table("epochs", HEAD, rows)


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f}" if isfinite(bytes_per_s) else "–"


def _seconds(value: float) -> str:
    return f"{value:.2f}"
