"""The loop of a run: trains, evaluates and saves in turn, and calls the watchers."""

from __future__ import annotations

from collections import deque
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any, Final

from hocket.core.timelines.idle import Cause
from hocket.core.timelines.timeline import Timeline
from hocket.draw.where import Where, advice
from hocket.recipes.run_files import CHECKPOINTS_NAME
from hocket.recipes.training.epochs import EpochSums
from hocket.recipes.training.records import (
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
    Watchers,
    evaluation_record,
)
from hocket.recipes.training.saving import Position
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import Task
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.pipeline import Pipeline

NUM_TIMED_STEPS: Final = 11  # the last ones; the report shows their median


class Loop:
    """One run's training.

    Args:
        task: the samples and metrics.
        layout: the steps.
        pipeline: the pipeline to train with.
        run_dir: the run's folder, for its checkpoints.

    Attributes:
        position: how far the run has come.
        checkpoints: the folder of the run's checkpoints.
        timelines: the measured timelines of the last few steps and of those before an
            evaluation; of overlapping steps, only where a few follow a drain.
        watchers: called with every record; empty on all ranks but 0.
    """

    def __init__(
        self,
        task: Task,
        layout: StepLayout,
        pipeline: Pipeline,
        run_dir: Path,
    ) -> None:
        self.timelines: deque[Timeline] = deque(maxlen=NUM_TIMED_STEPS)
        self.watchers = Watchers()
        self._task = task
        self._layout = layout
        self._pipeline = pipeline
        self.checkpoints = run_dir / CHECKPOINTS_NAME
        self.position = Position(layout)
        self._evaluation_loader = layout.evaluation_loader(task.evaluation)
        self._overlaps = bool(pipeline.plan.schedule.body)
        self._plan = pipeline.plan
        self._measured_step = -1  # whose timeline is the last one
        self._num_since_drain = 0
        self._unreported: deque[StepResult] = deque()
        self._sums = EpochSums()
        self._data_s = 0.0  # waited for batches, of all epochs that have ended
        self._num_steps = 0  # of those
        self._went_on_s = monotonic()  # after the last step, or its evaluation
        self._evaluation_s = 0.0
        self._last: EvaluationRecord | None = None

    def run(self) -> SummaryRecord:
        """Train to the end of the layout.

        Raises:
            DataError: the metric of early stopping does not exist.
            CheckpointError: a checkpoint could not be written.
            RunError: something went wrong; nothing hangs.
        """
        self._went_on_s = monotonic()
        self.position.start_clock()
        if self._pipeline.num_steps < self._layout.num_steps:
            self._train()
        if self._last is None:  # a run that resumed after its last step
            self._report_evaluation(self.num_done - 1, self._evaluate())
        return self._summary()

    def _train(self) -> None:
        """Train until the last step, or an evaluation that stops."""
        loader, layout = self.position.loader, self._layout
        for result in self._pipeline.train(loader, drain_every=self._drains_after):
            is_due = layout.evaluates_after(result.step)
            evaluation = self._evaluate() if is_due else None
            stops = self._after_step(result, evaluation)
            if stops or result.step + 1 == layout.num_steps:
                break

    def _evaluate(self) -> EvaluationResult:
        begin_s = monotonic()
        result = self._evaluated()
        self._evaluation_s = monotonic() - begin_s
        return result

    def _evaluated(self) -> EvaluationResult:
        use_ema = self._layout.recipe.training.ema_decay is not None
        if self._task.evaluate is not None:
            return self._task.evaluate(self._pipeline, use_ema=use_ema)
        return self._pipeline.evaluate(
            self._evaluation_loader, self._task.metrics, use_ema=use_ema
        )

    def _after_step(
        self, result: StepResult, evaluation: EvaluationResult | None
    ) -> bool:
        """Call the watchers, save if it is due, and return whether to stop."""
        saves = self._layout.saves_after(result.step)
        self._sums.add(result, monotonic() - self._went_on_s - self._evaluation_s)
        self._evaluation_s = 0.0
        self._unreported.append(result)
        if self._plan is not self._pipeline.plan:  # layers have frozen
            self._plan = self._pipeline.plan
            self.timelines.clear()  # what they show is not what was predicted
        self._report_steps(is_due=saves or evaluation is not None)
        training = self._layout.recipe.training
        stop = self.position.early_stop
        stops = evaluation is not None and stop.stops_after(evaluation, training)
        self._measure(result.step, is_evaluated=evaluation is not None)
        if stops or self._ends_epoch(result.step):
            self._report_epoch()
        if evaluation is not None:
            self._report_evaluation(result.step, evaluation)
        is_last = stops or result.step + 1 == self._layout.num_steps
        if saves or (stops and self._layout.recipe.checkpoint.final):
            self._save(background=not is_last)
        self._went_on_s = monotonic()
        return stops

    def _drains_after(self, step: int) -> bool:
        """Drain before evaluations and saves, and, to measure them, the last steps."""
        num_left = self._layout.num_steps - (step + 1)
        is_due = self._layout.evaluates_after(step) or self._layout.saves_after(step)
        return is_due or num_left == NUM_TIMED_STEPS

    def _measure(self, step: int, *, is_evaluated: bool) -> None:
        """Record the step's timeline; of overlapping steps, of all since a drain."""
        self._num_since_drain += 1
        if self._overlaps and not self._drains_after(step):
            return
        num_steps, self._num_since_drain = self._num_since_drain, 0
        is_near_end = step >= self._layout.num_steps - NUM_TIMED_STEPS
        is_due = is_near_end or is_evaluated or self._ends_epoch(step)
        if is_due and num_steps <= NUM_TIMED_STEPS:
            self.timelines.append(self._pipeline.measured())
            self._measured_step = step

    @property
    def num_done(self) -> int:
        """The steps trained so far, including those before a resume."""
        return self.position.totals.num_steps

    def _report_steps(self, *, is_due: bool) -> None:
        """Report steps; overlapping ones a step late, as waiting for a norm stalls."""
        num_kept = 0 if is_due or not self._overlaps else 1
        while len(self._unreported) > num_kept:
            self._report_step(self._unreported.popleft())

    def _report_step(self, result: StepResult) -> None:
        totals = self.position.totals
        totals.num_steps = result.step + 1
        totals.training_s += result.seconds
        totals.num_samples += result.num_samples
        record = StepRecord(
            step=result.step,
            epoch=self._layout.epoch(result.step),
            loss=result.loss,
            losses=result.losses,
            num_samples=result.num_samples,
            seconds=result.seconds,
            bubble_fraction=result.bubble_fraction,
            learning_rate=self._layout.learning_rate(result.step - totals.num_skipped),
            grad_norm=_grad_norm(result),
            peak_bytes=result.peak_bytes,
        )
        totals.num_skipped += result.skipped
        self.watchers.step(record)

    def _ends_epoch(self, step: int) -> bool:
        is_last = step + 1 == self._layout.num_steps
        return is_last or self._layout.epoch(step + 1) > self._layout.epoch(step)

    def _report_epoch(self) -> None:
        """Report the epoch that has ended, and begin to count the next one."""
        sums, self._sums = self._sums, EpochSums()
        self._data_s += sums.data_s
        self._num_steps += sums.num_steps
        assert sums.last is not None, "a step ends it"
        step = sums.last.step
        measured = self.timelines[-1] if self._measured_step == step else None
        record = sums.record(self._layout.epoch(step), self._pipeline, measured)
        self.watchers.epoch(record)

    def _report_evaluation(self, step: int, result: EvaluationResult) -> None:
        self._last = evaluation_record(self._layout.epoch(step), step + 1, result)
        self.watchers.evaluation(self._last)

    def _save(self, *, background: bool) -> None:
        settings = self._layout.recipe.checkpoint
        self._pipeline.save(
            self.checkpoints,
            data=self.position.state_dict(),
            background=background and settings.background,
            keep=settings.keep,
        )

    def _summary(self) -> SummaryRecord:
        assert self._last is not None, "training ends with an evaluation"
        predicted, measured = self._pipeline.predicted, self.typical
        record = SummaryRecord(
            num_steps=self.position.totals.num_steps,
            num_samples=self.position.totals.num_samples,
            seconds=self.position.seconds,
            training_s=self.position.totals.training_s,
            evaluation=self._last,
            predicted_step_s=predicted.step_s,
            measured_step_s=None if measured is None else measured.step_s,
            predicted_bubble_fraction=_bubble_fraction(predicted),
            measured_bubble_fraction=None
            if measured is None
            else _bubble_fraction(measured),
            **self._where(measured),
        )
        self.watchers.summary(record)
        return record

    def _where(self, measured: Timeline | None) -> dict[str, Any]:
        """Return where the time of a typical step went, for the summary."""
        if measured is None:
            return {}
        where = Where.of(measured)
        num_steps = measured.schedule.program.num_steps
        idle_s = {
            cause.value: seconds / num_steps
            for cause, seconds in where.idle.seconds.items()
        }
        if self._num_steps:
            idle_s[Cause.DATA.value] = self._data_s / self._num_steps
        return {"idle_s": idle_s, "advice": tuple(advice(where))}

    @property
    def typical(self) -> Timeline | None:
        """The measured timeline whose steps are of median length."""
        if not self.timelines:
            return None
        by_length = sorted(self.timelines, key=lambda timeline: timeline.step_s)
        return by_length[len(by_length) // 2]


def _grad_norm(result: StepResult) -> float:
    """Return the norm of a step's gradients; NaN where they are not kept."""
    return nan if result.gradient_status.value.unknown else result.grad_norm


def _bubble_fraction(timeline: Timeline) -> float:
    """Return a step's bubble; of overlapping steps, the steady one."""
    if timeline.schedule.body:
        return timeline.steady_bubble_fraction
    return timeline.bubble_fraction
