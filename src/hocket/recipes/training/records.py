"""The records of a run's steps and evaluations, and the interface of watchers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import nan
from typing import Any, ClassVar, Final

from hocket.errors import CallbackError, HocketError

log = logging.getLogger(__name__)

_RATES: Final = ("samples_per_s", "message_bytes_per_s")  # that some records compute


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of training.

    Args:
        step: the step's number, from 0.
        epoch: the epoch's number, from 0.
        loss: the trained loss, over the whole batch.
        losses: every scalar that the loss function names.
        num_samples: the batch's samples.
        seconds: the step's seconds.
        bubble_fraction: the share of them in which rank 0 did not compute.
        learning_rate: the learning rate of the step's update.
        grad_norm: the norm of all gradients together, before clipping.
        peak_bytes: rank 0's peak memory so far.
    """

    kind: ClassVar = "step"

    step: int
    epoch: int
    loss: float
    losses: Mapping[str, float]
    num_samples: int
    seconds: float
    bubble_fraction: float
    learning_rate: float
    grad_norm: float
    peak_bytes: int

    @property
    def samples_per_s(self) -> float:
        """The speed of this step."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation, after as many steps of training.

    Args:
        num_steps: the steps trained before it.
        epoch: the epoch of the last of them.
        loss: the mean over all samples.
        metrics: the means of the metrics, the most important one first.
        num_samples: the samples that these are means of.
    """

    kind: ClassVar = "evaluation"

    num_steps: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    num_samples: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of training, and what its time went to.

    Args:
        epoch: the epoch's number, from 0.
        num_steps: the steps trained until its end, over the whole run.
        layout: devices x replicas at its end, x shards where there are any.
        num_frozen: the layers that were frozen at its end.
        num_active_parameters: the parameters that still trained.
        num_frozen_parameters: the others.
        num_samples: its samples.
        seconds: its seconds, without evaluations and checkpoints.
        data_s: the part of them in which rank 0 waited for batches, and cut them up.
        transition_s: the part that changes of the layout took.
        forward_s: the part that forwards took, the mean over devices.
        backward_s: the part that backwards took, the mean over devices.
        reduce_s: from the beginning of reductions over replicas to their ends, the mean
            over devices; others may compute meanwhile.
        cache_s: the part in which rank 0 read frozen layers' outputs and stored them;
            forwards contain most of it.
        cache_hits: the samples whose frozen layers' outputs were in the cache.
        num_reductions: reductions over replicas.
        reduced_bytes: the bytes that they reduced.
        message_bytes: the bytes sent between devices of the first replica.
        link_bytes_per_s: the bandwidth between two devices, their copies of a message
            included, measured before training; infinite where it was not to be seen.
        ring_bytes_per_s: the bandwidth of each worker in an all-reduce of all, between
            hosts where there are several; infinite where it was not measured.
    """

    kind: ClassVar = "epoch"

    epoch: int
    num_steps: int
    layout: str
    num_frozen: int
    num_active_parameters: int
    num_frozen_parameters: int
    num_samples: int
    seconds: float
    data_s: float
    transition_s: float
    forward_s: float
    backward_s: float
    reduce_s: float
    cache_s: float
    cache_hits: int
    num_reductions: int
    reduced_bytes: int
    message_bytes: int
    link_bytes_per_s: float
    ring_bytes_per_s: float

    @property
    def samples_per_s(self) -> float:
        """The speed of the epoch, data and transitions included."""
        return self.num_samples / self.seconds

    @property
    def message_bytes_per_s(self) -> float:
        """The traffic between devices."""
        return self.message_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class SummaryRecord:
    """The totals of a whole run, including those before interruptions.

    Args:
        num_steps: the steps trained.
        num_samples: the samples trained on, counted once per epoch.
        seconds: from the first step to the last evaluation.
        training_s: the part of these that the steps took.
        evaluation: the last evaluation.
        peak_bytes: rank 0's peak memory.
        predicted_bubble_fraction: the bubble of a step, over all lanes; NaN where
            nothing predicts it.
        measured_bubble_fraction: the same of a typical step; None if none was measured.
        predicted_steady_bubble_fraction: the steady bubble.
        measured_steady_bubble_fraction: the same of a typical step.
        predicted_step_s: the seconds of a step; where steps overlap, from the end of
            one to the end of the next.
        measured_step_s: the same of a typical step; None if none was measured.
        idle_s: the seconds per step in which a device does not work, by cause, the mean
            over devices of a typical step; and `data`: between steps, rank 0 waits for
            batches.
        advice: what would shorten a step, the largest saving first.
    """

    kind: ClassVar = "summary"

    num_steps: int
    num_samples: int
    seconds: float
    training_s: float
    evaluation: EvaluationRecord
    peak_bytes: int
    predicted_bubble_fraction: float = nan
    measured_bubble_fraction: float | None = None
    predicted_steady_bubble_fraction: float = nan
    measured_steady_bubble_fraction: float | None = None
    predicted_step_s: float = nan
    measured_step_s: float | None = None
    idle_s: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """The speed of training."""
        return self.num_samples / self.training_s


Record = StepRecord | EvaluationRecord | EpochRecord | SummaryRecord


def numbers_of(record: Record) -> dict[str, Any]:
    """Return a record's numbers, with those that the user names beside the others."""
    plain = {field.name: getattr(record, field.name) for field in fields(record)}
    plain |= {name: getattr(record, name) for name in _RATES if hasattr(record, name)}
    named = plain.pop("losses", None) or plain.pop("metrics", None) or {}
    if isinstance(record, SummaryRecord):
        last: EvaluationRecord = plain.pop("evaluation")
        named = {"loss": last.loss, **last.metrics}
    return {**named, **plain}


class Watcher:
    """Receives the records of a run, on rank 0; its methods do nothing here."""

    def step(self, record: StepRecord) -> None:
        """Called when a step has ended."""

    def epoch(self, record: EpochRecord) -> None:
        """Called when an epoch has ended, before its evaluation; need not be there."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Called when an evaluation has ended."""

    def summary(self, record: SummaryRecord) -> None:
        """Called when the run has ended."""

    def close(self) -> None:
        """Called last, whether the run succeeded or failed."""


class Watchers:
    """All watchers of a run; one that fails is logged, and not called again.

    Attributes:
        failures: what failed, one sentence each.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._watchers: list[Watcher] = []
        self._failed: set[int] = set()  # by their places

    def append(self, watcher: Watcher) -> None:
        """Add a watcher; it is called after those before it."""
        self._watchers.append(watcher)

    def report(self, record: Record) -> None:
        """Call the method of each watcher that takes such a record."""
        for place, watcher in enumerate(self._watchers):
            call = getattr(watcher, record.kind, None)  # not all of users' have epochs
            if call is None or place in self._failed:
                continue
            num_before = len(self.failures)
            step = record.step if isinstance(record, StepRecord) else record.num_steps
            with self.guard(f"{type(watcher).__name__}.{record.kind} at step {step}"):
                call(record)
            if len(self.failures) > num_before:
                self._failed.add(place)

    def close(self) -> None:
        """Close all, those that failed among them."""
        for watcher in self._watchers:
            with self.guard(f"{type(watcher).__name__}.close"):
                watcher.close()

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Note an error of the block as a failure, and go on behind it.

        Raises:
            HocketError: the block raised it on purpose; it ends the run.
        """
        try:
            yield
        except HocketError:
            raise
        except Exception as error:
            failure = f"{what} failed: {type(error).__name__}: {error}"
            self.failures.append(failure)
            traced = not isinstance(error, OSError)  # a full disk is no fault of code
            log.exception("%s; training goes on without it", failure, exc_info=traced)


def refuse_failures(failures: Sequence[str]) -> None:
    """Raise what failed while it watched a run, now that all is kept.

    Raises:
        CallbackError: something failed.
    """
    if failures:
        raise CallbackError(
            "training has ended well, and its weights are kept, but: "
            + "; ".join(failures)
        )
