"""Writes a run's numbers: JSON lines for programs, and loggers for people.

    metrics.jsonl    {"kind": "step", "step": 0, ...}   one object per line
    tensorboard/     the same numbers, under train/, evaluation/ and epoch/
    run.loggers      the same

The lines are complete up to the last step at any moment. A run that resumes from a
checkpoint first removes what was written after it, so that no step occurs twice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from textwrap import fill
from time import monotonic
from typing import Any, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hocket.core.layout import WorkerLayout
from hocket.draw.quantity import byte_size, percent, seconds, short
from hocket.errors import MissingPackageError, RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.sections import RunSettings
from hocket.recipes.run_files import METRICS_NAME, read_metrics
from hocket.recipes.training.records import (
    EpochRecord,
    EvaluationRecord,
    Record,
    StepRecord,
    SummaryRecord,
    Watcher,
    numbers_of,
)
from hocket.recipes.user_functions import load_function
from hocket.run.engine.plan import Plan

TENSORBOARD_NAME: Final = "tensorboard"
# Not logged: they say where, and loggers take numbers.
_PLACES: Final = ("step", "epoch", "num_steps", "num_samples", "layout")
_FLUSH_S: Final = 10  # seconds between flushes


class Logger(Protocol):
    """Receives numbers, on rank 0; `wandb.init(...)` returns one."""

    def log(self, numbers: dict[str, Any], /, *, step: int) -> object:
        """Log numbers.

        Args:
            numbers: by names such as `train/loss` or `evaluation/accuracy`.
            step: the step's number; of an evaluation, the steps trained before it.
        """


class TensorBoardLogger:
    """Writes TensorBoard's events; close it at the end.

    Args:
        folder: where events go.
        first_step: the step at which a run resumes that has logged there before:
            what it logged from that step on is hidden.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                "run.loggers names TensorBoard, which is not installed: "
                "pip install 'hocket[recipes]'"
            ) from error
        self._board = SummaryWriter(
            str(folder.absolute()), purge_step=first_step, flush_secs=_FLUSH_S
        )
        self.close = self._board.close

    def log(self, numbers: Mapping[str, float], /, *, step: int) -> None:
        """Write each number as a scalar."""
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)


class MetricsLog(Watcher):
    """Writes every `log_every_steps`-th step, every evaluation and the summary.

    Args:
        run_dir: the run's folder.
        log_every_steps: the steps between two that are written.
        first_step: the step at which a run resumes in its own folder; None for a run
            with a new one.
    """

    def __init__(
        self, run_dir: Path, log_every_steps: int = 1, *, first_step: int | None = None
    ) -> None:
        self._every = log_every_steps
        path = run_dir / METRICS_NAME
        if first_step is not None and path.exists():
            _truncate(path, first_step)
        mode = "x" if first_step is None else "a"
        self._lines = path.open(mode, encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        """Write a step's numbers."""
        if record.step % self._every == 0:
            self._write(record)

    def _write(self, record: Record) -> None:
        """Write a record's numbers."""
        self._lines.write(_json_line({"kind": record.kind, **numbers_of(record)}))
        self._lines.flush()

    evaluation = epoch = summary = _write

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities become null."""
    finite = {
        name: None if isinstance(x, float) and not isfinite(x) else x
        for name, x in values.items()
    }
    return json.dumps(finite) + "\n"


def _truncate(path: Path, first_step: int) -> None:
    """Replace the file by one with only what was written before a step."""

    def is_before(line: Mapping[str, Any]) -> bool:
        place: int = line["step"] + 1 if line["kind"] == "step" else line["num_steps"]
        return line["kind"] != "summary" and place <= first_step

    kept = path.with_suffix(".kept")
    lines = map(_json_line, filter(is_before, read_metrics(path)))
    kept.write_text("".join(lines), encoding="utf-8")
    kept.replace(path)


class LoggerWatcher(Watcher):
    """Passes the same numbers on to a logger.

    Args:
        logger: the logger; closed at the end if it has a method `close`.
        log_every_steps: the steps between two that are logged.
    """

    def __init__(self, logger: Logger, log_every_steps: int = 1) -> None:
        self._logger = logger
        self._every = log_every_steps

    def step(self, record: StepRecord) -> None:
        """Log a step's numbers."""
        if record.step % self._every == 0:
            self._log("train", numbers_of(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Log an evaluation's numbers."""
        self._log("evaluation", numbers_of(record), record.num_steps)

    def epoch(self, record: EpochRecord) -> None:
        """Log an epoch's numbers."""
        layout = WorkerLayout.parse(record.layout)
        shape = {"num_stages": layout.num_devices, "num_replicas": layout.num_replicas}
        self._log("epoch", numbers_of(record) | shape, record.num_steps)

    def close(self) -> None:
        """Close the logger."""
        if callable(close := getattr(self._logger, "close", None)):
            close()

    def _log(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        drawn = {
            f"{group}/{name}": x for name, x in numbers.items() if name not in _PLACES
        }
        self._logger.log(drawn, step=step)


def recipe_watchers(
    settings: RunSettings, run_dir: Path, first_step: int | None
) -> Iterator[Watcher]:
    """Yield what a recipe wants called: the log, its loggers and its callbacks.

    Args:
        settings: which steps, by which loggers and callbacks.
        run_dir: the run's folder.
        first_step: the step at which a run resumes in its own folder; None for a run
            with a new one.

    Raises:
        MissingPackageError: TensorBoard is not installed.
        RecipeError: a function of the user's has returned no logger, or no watcher.
    """
    every = settings.log_every_steps
    yield MetricsLog(run_dir, every, first_step=first_step)
    for name in settings.loggers:
        yield LoggerWatcher(make_logger(name, run_dir, first_step), every)
    for name in settings.callbacks:
        methods = ("step", "evaluation", "summary", "close")
        yield _made(name, run_dir, methods, "a callback has the methods of Watcher")


def make_logger(name: str, run_dir: Path, first_step: int | None) -> Logger:
    """Make a logger that a recipe names.

    Args:
        name: "tensorboard", or a `module:function` that is called with the folder.
        run_dir: the run's folder.
        first_step: the step at which a run resumes in its own folder.

    Raises:
        MissingPackageError: TensorBoard is not installed.
        RecipeError: what the function returned has no method `log`.
    """
    if name == TENSORBOARD_NAME:
        return TensorBoardLogger(run_dir / TENSORBOARD_NAME, first_step)
    needs = "a logger has log(numbers, step=step), as a run of W&B has"
    logger: Logger = _made(name, run_dir, ("log",), needs)
    return logger


def _made(name: str, run_dir: Path, methods: tuple[str, ...], needs: str) -> Any:
    """Return what the user's function makes with a run's folder.

    Raises:
        RecipeError: it lacks a method.
    """
    made = load_function(name)(run_dir)
    missing = [x for x in methods if not callable(getattr(made, x, None))]
    if missing:
        raise RecipeError(
            f"{name} returned {type(made).__name__} without {', '.join(missing)}: "
            f"{needs}"
        )
    return made


# Shows a run's progress: a live bar on a terminal, else plain lines.
RECENT_STEPS: Final = 20  # that the numbers shown are means of
PLAIN_INTERVAL_S: Final = 5.0  # between two plain lines
_MOST_ADVICE: Final = 2  # lines at the end of a run; the report has all
_SHARES: Final = ("accuracy", "f1", "exact_match")  # how names of such metrics end


class RunProgress(Watcher):
    """A bar that is redrawn in place, on a terminal; else a line every few seconds.

    Args:
        num_steps: the steps of the whole run.
        num_epochs: the epochs of the whole run.
        console: the console to draw on.
        first_step: the step at which the run begins, or resumes.
        seconds_left: predicts the seconds of the steps until a number is trained; as
            many as those so far took, when not given.
    """

    def __init__(
        self,
        num_steps: int,
        num_epochs: int,
        console: Console,
        *,
        first_step: int = 0,
        seconds_left: Callable[[int], float | None] | None = None,
    ) -> None:
        self._num_steps, self._num_epochs = num_steps, num_epochs
        self._console, self._first_step = console, first_step
        self._seconds_left = seconds_left
        self._recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._steps_s = 0.0
        self._begin_s = self._printed_s = monotonic()
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            refresh_per_second=4,
            disable=not self.is_live,
        )
        self._task = self._bar.add_task(
            "training", total=num_steps, completed=first_step, numbers=""
        )
        self._bar.start()

    def step(self, record: StepRecord) -> None:
        """Update the bar, at its next refresh; or print a line if the last is old."""
        self._recent.append(record)
        self._steps_s += record.seconds
        done, now_s = record.step + 1, monotonic()
        epoch = f"epoch {record.epoch + 1}/{self._num_epochs}"
        is_late = now_s - self._printed_s >= PLAIN_INTERVAL_S
        if self.is_live:
            numbers = f"{self.numbers}  {self._time_left(done, now_s)}"
            self._bar.update(
                self._task, completed=done, description=epoch, numbers=numbers
            )
        elif is_late or done >= self._num_steps:
            self._printed_s = now_s
            print_plain(
                self._console,
                f"{epoch}  step {done}/{self._num_steps}  {self.numbers}  "
                f"{self._time_left(done, now_s)}",
            )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Print a line."""
        line = f"epoch {record.epoch + 1}  evaluation: loss {record.loss:.4f}  "
        print_plain(self._console, line + metrics_text(record.metrics))

    def summary(self, record: SummaryRecord) -> None:
        """Print the last lines, in place of the bar."""
        self.close()
        print_plain(self._console, summary_lines(record))

    def close(self) -> None:
        """End the bar."""
        self._bar.stop()

    @property
    def numbers(self) -> str:
        """Loss, speed, bubble and memory; means by samples or by seconds."""
        samples = sum(r.num_samples for r in self._recent)
        spent_s = sum(r.seconds for r in self._recent)
        loss = sum(r.loss * r.num_samples for r in self._recent) / samples
        bubble = sum(r.bubble_fraction * r.seconds for r in self._recent) / spent_s
        return (
            f"loss {loss:.4f}  {samples / spent_s:,.0f} samples/s  "
            f"rank 0: bubble {bubble:.0%}  "
            f"peak {byte_size(self._recent[-1].peak_bytes)}"
        )

    def _time_left(self, done: int, now_s: float) -> str:
        """Return how long the rest of the run takes, such as "12.0 s left".

        The seconds of its steps, as much longer as those so far took with all that is
        between them: data, evaluations, checkpoints.
        """
        known_s = self._seconds_left and self._seconds_left(self._num_steps)
        if known_s is None:
            num_left = self._num_steps - done
            known_s = self._steps_s * num_left / (done - self._first_step)
        share = (now_s - self._begin_s) / self._steps_s
        return f"{duration(known_s * share)} left"


def print_plain(console: Console, text: str) -> None:
    """Print text without colours or markup; on a terminal, broken between words."""
    if console.is_terminal:
        fit = partial(
            fill, width=console.width, break_long_words=False, break_on_hyphens=False
        )
        text = "\n".join(map(fit, text.split("\n")))
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def plan_line(plan: Plan, recipe: Recipe) -> str:
    """Describe the plan that is about to run."""
    settings = recipe.pipeline
    chosen = " (chosen)" if settings.schedule == "auto" else ""
    shards = f"shards: {settings.num_shards}, " if settings.num_shards > 1 else ""
    return (
        f"{plan.schedule_name}{chosen}, workers: {settings.num_workers}, "
        f"replicas: {settings.num_replicas}, {shards}"
        f"microbatches: {settings.num_microbatches}; "
        f"stages: {len(plan.stage_names)}, from {', '.join(plan.stage_names)}; "
        f"a step should take {seconds(plan.predicted.step_s)}"
    )


def summary_lines(record: SummaryRecord) -> str:
    """Describe a run's result, and its prediction beside the measurement."""
    if record.measured_step_s is None or record.measured_bubble_fraction is None:
        return f"{result_line(record)}\nno step was measured"
    return (
        f"{result_line(record)}\n"
        f"step: {seconds(record.predicted_step_s)} predicted, "
        f"{seconds(record.measured_step_s)} measured\n"
        f"bubble: {percent(record.predicted_bubble_fraction)} predicted, "
        f"{percent(record.measured_bubble_fraction)} measured; steady bubble: "
        f"{percent(record.predicted_steady_bubble_fraction)} predicted, "
        f"{percent(record.measured_steady_bubble_fraction or 0.0)} measured"
        f"{_where_lines(record)}"
    )


def _where_lines(record: SummaryRecord) -> str:
    """Describe where the time of a step went, and what would shorten it."""
    largest = sorted(record.idle_s.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds(idle_s)}" for name, idle_s in largest if idle_s]
    lines = [f"idle, per step: {', '.join(shown)}"] if shown else []
    lines += [f"  {line}" for line in record.advice[:_MOST_ADVICE]]
    return "".join(f"\n{line}" for line in lines)


def result_line(record: SummaryRecord) -> str:
    """Describe a run's last evaluation and its speed."""
    return (
        f"{metrics_text(record.evaluation.metrics)}, "
        f"loss {record.evaluation.loss:.4f}, after "
        f"{record.num_steps:,} steps in {duration(record.seconds)}; "
        f"{short(record.samples_per_s)} samples/s while training; rank 0's peak memory "
        f"{byte_size(record.peak_bytes)}"
    )


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format metrics: shares of right answers in percent, all else as numbers."""
    return ", ".join(
        f"{name} {value:.2%}" if name.endswith(_SHARES) else f"{name} {value:.4f}"
        for name, value in metrics.items()
    )


def duration(seconds: float) -> str:
    """Format seconds: 9.5 s, 1 min 15 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
