"""Shows a run's progress: a live bar on a terminal, else plain lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from textwrap import fill
from time import monotonic
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hocket.recipes.config.recipe import Recipe
from hocket.recipes.training.records import (
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
    Watcher,
)
from hocket.run.engine.plan import Plan

RECENT_STEPS: Final = 20  # that the numbers shown are means of
PLAIN_INTERVAL_S: Final = 5.0  # between two plain lines
_MOST_ADVICE: Final = 2  # lines at the end of a run; the report has all
_SHARES: Final = ("accuracy", "f1", "exact_match")  # how names of such metrics end


def make_progress(
    num_steps: int,
    num_epochs: int,
    console: Console,
    *,
    first_step: int = 0,
    seconds_left: Callable[[int], float | None] | None = None,
) -> Watcher:
    """Return a live bar if the console is a terminal that can draw one, or plain lines.

    Args:
        num_steps: the steps of the whole run.
        num_epochs: the epochs of the whole run.
        console: the console to draw on.
        first_step: the step at which the run begins, or resumes.
        seconds_left: predicts the seconds of the steps until a number is trained; as
            many as those so far took, when not given.
    """
    left = TimeLeft(num_steps, first_step, seconds_left)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(num_steps, num_epochs, console, left)
    return PlainProgress(num_steps, num_epochs, console, left)


class PlainProgress(Watcher):
    """A line every few seconds: for a file, a pipe or a log."""

    def __init__(
        self, num_steps: int, num_epochs: int, console: Console, left: TimeLeft
    ) -> None:
        self._recent = RecentSteps(num_epochs)
        self._left = left
        self._num_steps = num_steps
        self._console = console
        self._printed_s = left.begin_s

    def step(self, record: StepRecord) -> None:
        """Print a line, if the last one is old enough."""
        self._recent.add(record)
        now_s = self._left.add(record)
        done = record.step + 1
        if now_s - self._printed_s < PLAIN_INTERVAL_S and done < self._num_steps:
            return
        self._printed_s = now_s
        print_plain(
            self._console,
            f"{self._recent.epoch}  step {done}/{self._num_steps}  "
            f"{self._recent.numbers}  {self._left.text}",
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Print a line."""
        print_plain(self._console, evaluation_line(record))

    def summary(self, record: SummaryRecord) -> None:
        """Print the last lines."""
        print_plain(self._console, summary_lines(record))


class LiveProgress(PlainProgress):
    """A bar that is redrawn in place; the other lines come above it."""

    def __init__(
        self, num_steps: int, num_epochs: int, console: Console, left: TimeLeft
    ) -> None:
        super().__init__(num_steps, num_epochs, console, left)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(
            "training", total=num_steps, completed=left.first_step, numbers="", left=""
        )
        self._bar.start()

    def step(self, record: StepRecord) -> None:
        """Update the bar, at the next refresh."""
        self._recent.add(record)
        self._left.add(record)
        self._bar.update(
            self._task,
            advance=1,
            description=self._recent.epoch,
            numbers=self._recent.numbers,
            left=self._left.text,
        )

    def summary(self, record: SummaryRecord) -> None:
        """Print the last lines, in place of the bar."""
        self.close()
        super().summary(record)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


class TimeLeft:
    """How long the rest of a run takes.

    The seconds of its steps, as much longer as those so far took with all that is
    between them: data, evaluations, checkpoints.

    Args:
        num_steps: the steps of the whole run.
        first_step: the step at which the run begins, or resumes.
        seconds_left: see `make_progress`.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        seconds_left: Callable[[int], float | None] | None,
    ) -> None:
        self.first_step = first_step
        self.begin_s = self._now_s = monotonic()
        self._num_steps = num_steps
        self._seconds_left = seconds_left
        self._done, self._steps_s = first_step, 0.0

    def add(self, record: StepRecord) -> float:
        """Add a step; return the time."""
        self._done, self._now_s = record.step + 1, monotonic()
        self._steps_s += record.seconds
        return self._now_s

    @property
    def text(self) -> str:
        """What is left, such as "12.0 s left"."""
        known_s = self._seconds_left and self._seconds_left(self._num_steps)
        if known_s is None:
            num_left = self._num_steps - self._done
            known_s = self._steps_s * num_left / (self._done - self.first_step)
        share = (self._now_s - self.begin_s) / self._steps_s
        return f"{duration(known_s * share)} left"


class RecentSteps:
    """The last steps, and the numbers to show of them.

    Args:
        num_epochs: the epochs of the whole run.
    """

    def __init__(self, num_epochs: int) -> None:
        self._num_epochs = num_epochs
        self._records: deque[StepRecord] = deque(maxlen=RECENT_STEPS)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self._records.append(record)

    @property
    def epoch(self) -> str:
        """The current epoch."""
        return f"epoch {self._records[-1].epoch + 1}/{self._num_epochs}"

    @property
    def numbers(self) -> str:
        """Loss, speed, bubble and memory; means by samples or by seconds."""
        samples = sum(r.num_samples for r in self._records)
        seconds = sum(r.seconds for r in self._records)
        loss = sum(r.loss * r.num_samples for r in self._records) / samples
        bubble = sum(r.bubble_fraction * r.seconds for r in self._records) / seconds
        return (
            f"loss {loss:.4f}  {samples / seconds:,.0f} samples/s  "
            f"bubble {bubble:.0%}  memory {megabytes(self._records[-1].peak_bytes)}"
        )


def print_plain(console: Console, text: str) -> None:
    """Print text without colours or markup; on a terminal, broken between words."""
    if console.is_terminal:
        text = "\n".join(map(partial(_broken, width=console.width), text.split("\n")))
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _broken(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,  # paths
        break_on_hyphens=False,
    )


def plan_line(plan: Plan, recipe: Recipe) -> str:
    """Describe the plan that is about to run."""
    settings = recipe.pipeline
    chosen = " (chosen)" if settings.schedule == "auto" else ""
    return (
        f"{plan.schedule_name}{chosen}, workers: {settings.num_workers}, "
        f"replicas: {settings.num_replicas}, "
        f"microbatches: {settings.num_microbatches}; "
        f"stages begin with {', '.join(plan.stage_names)}; "
        f"a step should take {plan.predicted.step_s * 1e3:.1f} ms"
    )


def evaluation_line(record: EvaluationRecord) -> str:
    """Describe an evaluation."""
    return (
        f"epoch {record.epoch + 1}  evaluation: loss {record.loss:.4f}  "
        f"{metrics_text(record.metrics)}"
    )


def summary_lines(record: SummaryRecord) -> str:
    """Describe a run's result, and its prediction beside the measurement."""
    if record.measured_step_s is None or record.measured_bubble_fraction is None:
        return f"{result_line(record)}\nno step was measured"
    return (
        f"{result_line(record)}\n"
        f"step: {record.predicted_step_s * 1e3:.1f} ms predicted, "
        f"{record.measured_step_s * 1e3:.1f} ms measured\n"
        f"bubble: {record.predicted_bubble_fraction:.1%} predicted, "
        f"{record.measured_bubble_fraction:.1%} measured"
        f"{_where_lines(record)}"
    )


def _where_lines(record: SummaryRecord) -> str:
    """Describe where the time of a step went, and what would shorten it."""
    largest = sorted(record.idle_s.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in largest if seconds]
    lines = [f"idle, per step: {', '.join(shown)}"] if shown else []
    lines += [f"  {line}" for line in record.advice[:_MOST_ADVICE]]
    return "".join(f"\n{line}" for line in lines)


def result_line(record: SummaryRecord) -> str:
    """Describe a run's last evaluation and its speed."""
    return (
        f"{metrics_text(record.evaluation.metrics)}, "
        f"loss {record.evaluation.loss:.4f}, after "
        f"{record.num_steps:,} steps in {duration(record.seconds)}; "
        f"{record.samples_per_s:,.0f} samples/s while training"
    )


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format metrics: shares of right answers in percent, all else as numbers."""
    return ", ".join(
        f"{name} {value:.2%}" if name.endswith(_SHARES) else f"{name} {value:.4f}"
        for name, value in metrics.items()
    )


def megabytes(num_bytes: int) -> str:
    """Format bytes as MiB."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def duration(seconds: float) -> str:
    """Format seconds: 9.5 s, 1 min 15 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
