"""The loop of a run: trains, evaluates and saves in turn, and calls the watchers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from time import monotonic
from typing import Any, Final

from hocket.core.costs import Costs
from hocket.core.gates import gates_of
from hocket.core.op import WHOLE_OR_SPLIT_BACKWARD, Kind
from hocket.core.simulate import simulate
from hocket.core.timelines.idle import Cause
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html import Table
from hocket.draw.where import Where, advice
from hocket.model.profile.precision import core_wait_s
from hocket.recipes.objectives import evaluation_loader
from hocket.recipes.training.records import EpochRecord, SummaryRecord
from hocket.recipes.training.saving import RecipeRun
from hocket.recipes.training.task import Task
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.plan import Plan
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.pipeline import Pipeline

# Adds up what each epoch's time went to.
#
#     epoch 3   ├ data ┤├ transition ┤├ forward, backward, all-reduce ... ┤├ data ┤ ...
#                                     └ per step: those of its last one, measured
#
# Seconds of forwards, backwards and reductions are means over the devices of the first
# replica; a device that waits has neither.

# What results say of a step; and what is measured of an epoch's last one.
_OF_RESULTS: Final = ("num_samples", "transition_s", "cache_s", "cache_hits")
_STEP_S: Final = ("forward_s", "backward_s", "reduce_s")
_STEP_COUNTS: Final = ("num_reductions", "reduced_bytes", "message_bytes")


class EpochSums:
    """What the steps of an epoch came to so far; of one that resumed, its own part.

    Attributes:
        num_steps: its steps.
        sums: the fields of its record that are sums over them.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.sums: dict[str, Any] = {}
        self._last: StepResult | None = None

    def add(self, result: StepResult, since_last_s: float) -> None:
        """Add a step.

        Args:
            result: the step's.
            since_last_s: from the end of the step before, without evaluations.
        """
        self.num_steps += 1
        waited_s = since_last_s - result.seconds - result.transition_s
        own = {name: getattr(result, name) for name in _OF_RESULTS}
        own |= {"seconds": max(since_last_s, result.seconds)}
        own |= {"data_s": max(0.0, waited_s)}
        self.sums = {name: x + self.sums.get(name, 0) for name, x in own.items()}
        self._last = result

    def record(
        self, epoch: int, pipeline: Pipeline, measured: Timeline | None
    ) -> EpochRecord:
        """Return the epoch's record.

        Args:
            epoch: its number, from 0.
            pipeline: as it is at the end of the epoch.
            measured: the epoch's last step; None if it was not measured.
        """
        assert self._last is not None, "an epoch has a step"
        num_active, num_frozen = pipeline.num_parameters
        costs = pipeline.plan.costs
        of_steps = {name: x * self.num_steps for name, x in _parts(measured).items()}
        return EpochRecord(
            epoch=epoch,
            num_steps=self._last.step + 1,
            layout=self._last.layout,
            num_frozen=self._last.num_frozen,
            num_active_parameters=num_active,
            num_frozen_parameters=num_frozen,
            link_bytes_per_s=_message_rate(costs),
            ring_bytes_per_s=costs.reduce_link.bytes_per_s,
            **self.sums,
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
    if program.num_pipelines == 1:
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
    "samples/s, waits included": ("samples_per_s", "{:,.1f}".format),
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

    What was zero, or not known, in all epochs has no column.

    Args:
        epochs: as `metrics.jsonl` has them, with null for what is not finite.
    """
    names = ("epoch", "devices x replicas", "frozen layers", *_COLUMNS)
    columns = zip(names, *map(_row, epochs), strict=True)
    kept = (x for x in columns if any(cell.strip("0.–") for cell in x[1:]))
    head, *rows = zip(*kept, strict=True)
    return Table("epochs", head, tuple(rows))


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


NUM_TIMED_STEPS: Final = 11  # the last ones; the report shows their median


class Loop(RecipeRun):
    """One run's training.

    Args:
        task: the samples and metrics.
        pipeline: the pipeline to train with.
        run_dir: the run's folder, for its checkpoints.

    Attributes:
        timelines: the measured timelines of the last few steps and of those before an
            evaluation; of overlapping steps, only where a few follow a drain.
    """

    def __init__(self, task: Task, pipeline: Pipeline, run_dir: Path) -> None:
        super().__init__(task, run_dir)
        self.timelines: deque[Timeline] = deque(maxlen=NUM_TIMED_STEPS)
        self._pipeline = pipeline
        self._evaluation_loader = evaluation_loader(task.recipe, task.evaluation)
        self._overlaps = bool(pipeline.plan.schedule.body)
        self._plan = pipeline.plan
        self._measured_step = -1  # whose timeline is the last one
        self._num_since_drain = 0
        self._unreported: deque[StepResult] = deque()
        self._sums = EpochSums()
        self._data_s = 0.0  # waited for batches, of all epochs that have ended
        self._num_steps = 0  # of those
        self._went_on_s = monotonic()  # after the last step, or its evaluation
        self._begun = monotonic(), core_wait_s()

    def run(self) -> SummaryRecord:
        """Train to the last step.

        Raises:
            DataError: the metric of early stopping does not exist.
            CheckpointError: a checkpoint could not be written.
            RunError: something went wrong; nothing hangs.
        """
        self._went_on_s = monotonic()
        self.start_clock()
        if self._pipeline.num_steps < self.task.num_steps:
            self._train()
        if self.last is None:  # a run that resumed after its last step
            self.report_evaluation(self._evaluate())
        return self._summary()

    def _train(self) -> None:
        """Train until the last step, or an evaluation that stops."""
        task = self.task
        for result in self._pipeline.train(self.loader, drain_every=self._drains_after):
            self._sums.add(result, monotonic() - self._went_on_s)
            is_due = task.evaluates_after(result.step)
            evaluation = self._evaluate() if is_due else None
            stops = self._after_step(result, evaluation)
            if stops or result.step + 1 == task.num_steps:
                break
            self._went_on_s = monotonic()

    def _evaluate(self) -> EvaluationResult:
        use_ema = self.recipe.training.ema_decay is not None
        if self.task.evaluate is not None:
            return self.task.evaluate(self._pipeline, use_ema=use_ema)
        return self._pipeline.evaluate(
            self._evaluation_loader, self.task.metrics, use_ema=use_ema
        )

    def _after_step(
        self, result: StepResult, evaluation: EvaluationResult | None
    ) -> bool:
        """Call the watchers, save if it is due, and return whether to stop."""
        self._unreported.append(result)
        if self._plan is not self._pipeline.plan:  # layers have frozen
            self._plan = self._pipeline.plan
            self.timelines.clear()  # what they show is not what was predicted
        saves = self.task.saves_after(result.step)
        self._report_steps(is_due=saves or evaluation is not None)
        training, stop = self.recipe.training, self.early_stop
        stops = evaluation is not None and stop.stops_after(evaluation, training)
        self._measure(result.step, is_evaluated=evaluation is not None)
        if stops or self._ends_epoch(result.step):
            self._report_epoch(result.step)
        if evaluation is not None:
            self.report_evaluation(evaluation)
        if self.saves_after(result.step, stops=stops):
            self.save(is_last=stops or result.step + 1 == self.task.num_steps)
        return stops

    def save(self, *, is_last: bool) -> None:
        """Save a checkpoint after the steps so far.

        Args:
            is_last: whether no step follows: nothing is written while others run.

        Raises:
            CheckpointError: it could not be written.
        """
        settings = self.recipe.checkpoint
        self._pipeline.save(
            self.checkpoints_dir,
            data=self.state_dict(),
            background=settings.background and not is_last,
            keep=settings.keep,
        )

    def _drains_after(self, step: int) -> bool:
        """Drain before evaluations and saves, and, to measure them, the last steps."""
        num_left = self.task.num_steps - (step + 1)
        is_due = self.task.evaluates_after(step) or self.task.saves_after(step)
        return is_due or num_left == NUM_TIMED_STEPS

    def _measure(self, step: int, *, is_evaluated: bool) -> None:
        """Record the step's timeline; of overlapping steps, of all since a drain."""
        self._num_since_drain += 1
        if self._overlaps and not self._drains_after(step):
            return
        num_steps, self._num_since_drain = self._num_since_drain, 0
        is_near_end = step >= self.task.num_steps - NUM_TIMED_STEPS
        is_due = is_near_end or is_evaluated or self._ends_epoch(step)
        if is_due and num_steps <= NUM_TIMED_STEPS:
            self.timelines.append(self._pipeline.measured())
            self._measured_step = step

    def _report_steps(self, *, is_due: bool) -> None:
        """Report steps; overlapping ones a step late, as waiting for a norm stalls."""
        num_kept = 0 if is_due or not self._overlaps else 1
        while len(self._unreported) > num_kept:
            result = self._unreported.popleft()
            is_gone = result.gradient_status.value.unknown  # the gradients are not kept
            self.report_step(
                result.step,
                num_samples=result.num_samples,
                seconds=result.seconds,
                loss=result.loss,
                losses=result.losses,
                bubble_fraction=result.bubble_fraction,
                grad_norm=nan if is_gone else result.grad_norm,
                peak_bytes=result.peak_bytes,
                is_skipped=result.skipped,
            )

    def _ends_epoch(self, step: int) -> bool:
        is_last = step + 1 == self.task.num_steps
        return is_last or self.task.epoch(step + 1) > self.task.epoch(step)

    def _report_epoch(self, step: int) -> None:
        """Report the epoch that ends with a step, and begin to count the next one."""
        sums, self._sums = self._sums, EpochSums()
        self._data_s += sums.sums["data_s"]
        self._num_steps += sums.num_steps
        measured = self.timelines[-1] if self._measured_step == step else None
        epoch = self.task.epoch(step)
        self.watchers.report(sums.record(epoch, self._pipeline, measured))

    def _summary(self) -> SummaryRecord:
        measured = self.typical
        predicted = predicted_beside(self._pipeline.plan, measured)
        known: dict[str, Any] = {} if measured is None else self._where(measured)
        for name, timeline in ("predicted", predicted), ("measured", measured):
            for number in ("step_s", "bubble_fraction", "steady_bubble_fraction"):
                if timeline is not None:
                    known[f"{name}_{number}"] = getattr(timeline, number)
        return self.report_summary(**known)

    def _where(self, measured: Timeline) -> dict[str, Any]:
        """Return where the time of a typical step went, for the summary."""
        where = Where.of(measured)
        num_steps = measured.schedule.program.num_steps
        idle_s = {
            cause.value: seconds / num_steps
            for cause, seconds in where.idle.seconds.items()
        }
        if self._num_steps:
            idle_s[Cause.DATA.value] = self._data_s / self._num_steps
        begin_s, begin_wait_s = self._begun  # the mean of all that was done since then
        part = (core_wait_s() - begin_wait_s) / (monotonic() - begin_s)
        lines = tuple(advice(where, part * measured.makespan_s))
        return {"idle_s": idle_s, "advice": lines}

    @property
    def typical(self) -> Timeline | None:
        """The measured timeline whose steps are of median length."""
        if not self.timelines:
            return None
        by_length = sorted(self.timelines, key=lambda timeline: timeline.step_s)
        return by_length[len(by_length) // 2]


def predicted_beside(plan: Plan, measured: Timeline | None) -> Timeline:
    """Predict as many steps as were measured, which may be more than the plan's."""
    if measured is None or measured.schedule == plan.schedule:
        return plan.predicted
    schedule = measured.schedule
    return simulate(schedule, plan.costs, gates_of(schedule, clips=False))
