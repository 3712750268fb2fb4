"""The loop of a run: train and evaluate by turns, and tell who watches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Final

from hocket.plan.timeline import Timeline
from hocket.recipes.course import Course
from hocket.recipes.records import (
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
    Watcher,
)
from hocket.recipes.samples import evaluation_batches
from hocket.recipes.task import Task
from hocket.run.pipeline import Pipeline, StepResult

NUM_TIMED_STEPS: Final = 11  # the last ones: their middle one stands for all


class Loop:
    """One run's training.

    Args:
        task: what to train and evaluate on.
        course: in which steps.
        pipeline: by what.
        watchers: who hears of it; nobody, on all workers but the main one.

    Attributes:
        timelines: measured, of the last few steps.
    """

    def __init__(
        self,
        task: Task,
        course: Course,
        pipeline: Pipeline,
        watchers: Sequence[Watcher],
    ) -> None:
        self.timelines: deque[Timeline] = deque(maxlen=NUM_TIMED_STEPS)
        self._task = task
        self._course = course
        self._pipeline = pipeline
        self._watchers = watchers
        self._training_s = 0.0
        self._num_samples = 0

    def run(self) -> SummaryRecord:
        """Train to the end of the course.

        Raises:
            RunError: something went wrong; nothing hangs.
        """
        begin_s = monotonic()
        for result in self._pipeline.train(self._course.batches()):
            self._tell(result)
            if result.step >= self._course.num_steps - NUM_TIMED_STEPS:
                self.timelines.append(self._pipeline.measured())
            if self._course.evaluates_after(result.step):
                last = self._evaluate(result.step)
        return self._summary(last, monotonic() - begin_s)

    def _tell(self, result: StepResult) -> None:
        self._training_s += result.seconds
        self._num_samples += result.num_samples
        record = StepRecord(
            step=result.step,
            epoch=self._course.epoch(result.step),
            loss=result.loss,
            losses=result.losses,
            num_samples=result.num_samples,
            seconds=result.seconds,
            bubble_fraction=result.bubble_fraction,
            learning_rate=self._course.learning_rate(result.step),
            peak_bytes=result.peak_bytes,
        )
        for watcher in self._watchers:
            watcher.step(record)

    def _evaluate(self, step: int) -> EvaluationRecord:
        batch_size = self._course.recipe.training.batch_size
        result = self._pipeline.evaluate(
            evaluation_batches(self._task.evaluation, batch_size), self._task.metrics
        )
        record = EvaluationRecord(
            num_steps=step + 1,
            epoch=self._course.epoch(step),
            loss=result.loss,
            metrics=result.metrics,
            num_samples=result.num_samples,
        )
        for watcher in self._watchers:
            watcher.evaluation(record)
        return record

    def _summary(self, last: EvaluationRecord, seconds: float) -> SummaryRecord:
        predicted, measured = self._pipeline.predicted, self.typical
        record = SummaryRecord(
            num_steps=self._course.num_steps,
            num_samples=self._num_samples,
            seconds=seconds,
            training_s=self._training_s,
            evaluation=last,
            predicted_step_s=predicted.makespan_s,
            measured_step_s=measured.makespan_s,
            predicted_bubble_fraction=predicted.bubble_fraction,
            measured_bubble_fraction=measured.bubble_fraction,
        )
        for watcher in self._watchers:
            watcher.summary(record)
        return record

    @property
    def typical(self) -> Timeline:
        """Of the measured timelines, the one with the median makespan."""
        by_length = sorted(self.timelines, key=lambda timeline: timeline.makespan_s)
        return by_length[len(by_length) // 2]
