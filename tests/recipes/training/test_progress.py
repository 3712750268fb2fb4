"""What people see while a run trains says what happened, on every kind of console."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from hocket.recipes.config.resolve import resolve
from hocket.recipes.training import watchers
from hocket.recipes.training.watchers import (
    RunProgress,
    duration,
    metrics_text,
    plan_line,
    print_plain,
    summary_lines,
)
from hocket.run.pipeline import Pipeline
from hocket.schedules import SCHEDULES
from tests.recipes.support.run_records import (
    evaluation_record,
    step_record,
    summary_record,
)


def console(*, is_terminal: bool, width: int = 160) -> tuple[Console, StringIO]:
    """A console, and what it has shown."""
    shown = StringIO()
    return (
        Console(file=shown, force_terminal=is_terminal, width=width, no_color=True),
        shown,
    )


def test_plain_where_nothing_can_be_drawn_over() -> None:
    """A pipe and a dumb terminal get lines; a terminal gets a bar."""
    pipe, _ = console(is_terminal=False)
    terminal, _ = console(is_terminal=True)
    assert not RunProgress(4, 2, pipe).is_live
    live = RunProgress(4, 2, terminal)
    live.close()
    assert live.is_live


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """Steps, evaluations and the summary, whatever the console."""
    monkeypatch.setattr(watchers, "PLAIN_INTERVAL_S", 0.0)
    where, shown = console(is_terminal=is_terminal)
    watcher = RunProgress(4, 2, where)
    for step in range(4):
        watcher.step(step_record(step))
    watcher.evaluation(evaluation_record(4))
    watcher.summary(summary_record())
    watcher.close()

    text = shown.getvalue()
    assert "epoch 2/2" in text
    assert "4/4" in text
    assert "loss 1.0000  16 samples/s  rank 0: bubble 25%  peak 3 MiB" in text
    assert "epoch 2  evaluation: loss 0.7500  accuracy 50.00%" in text
    assert "accuracy 97.50%, bits_per_byte 2.5000, loss 0.7500, after 4 ste" in text
    assert "in 1 min 15 s; 16 samples/s while training" in text
    assert "bubble: 12.5 % predicted, 25.0 % measured" in text
    assert "step: 10 ms predicted, 12 ms measured" in text


def test_the_last_lines_fit_the_terminal() -> None:
    """They break between words, and not paths; a file gets whole lines."""
    advice = f"device 0 waits for device 1: {'balance the cut; ' * 8}".rstrip()
    record = replace(summary_record(), advice=(advice,))
    whole, folded = (console(is_terminal=x, width=80) for x in (False, True))
    for where, _ in (whole, folded):
        print_plain(where, summary_lines(record))
    lines = folded[1].getvalue().splitlines()
    assert max(map(len, lines)) <= 80 < max(map(len, whole[1].getvalue().splitlines()))
    assert folded[1].getvalue().split() == whole[1].getvalue().split()


def test_plain_lines_are_few() -> None:
    """A log of a long run stays short: the last step, and else a line now and then."""
    where, shown = console(is_terminal=False)
    watcher = RunProgress(100, 50, where)
    for step in range(100):
        watcher.step(step_record(step))
    (line,) = shown.getvalue().splitlines()
    assert "step 100/100" in line
    assert "0.0 s left" in line


def test_a_run_that_goes_on_counts_its_own_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left follows from the steps since then, not from those before."""
    monkeypatch.setattr(watchers, "PLAIN_INTERVAL_S", 0.0)
    clock = iter(range(100))
    monkeypatch.setattr(watchers, "monotonic", lambda: float(next(clock)))
    where, shown = console(is_terminal=False)
    watcher = RunProgress(100, 50, where, first_step=90)
    watcher.step(step_record(90))
    assert "step 91/100" in shown.getvalue()
    assert "9.0 s left" in shown.getvalue()


def test_a_run_with_nothing_left_says_so() -> None:
    """Nothing was measured, so nothing is compared."""
    where, shown = console(is_terminal=False)
    record = replace(
        summary_record(), measured_step_s=None, measured_bubble_fraction=None
    )
    RunProgress(4, 2, where).summary(record)
    assert "no step was measured" in shown.getvalue()
    assert "predicted" not in shown.getvalue()


def test_means_are_weighted() -> None:
    """Loss by samples, bubble by seconds, speed as samples over seconds."""
    where, _ = console(is_terminal=False)
    recent = RunProgress(2, 1, where)
    recent.step(
        step_record(0, loss=1.0, num_samples=1, seconds=3.0, bubble_fraction=0.0)
    )
    recent.step(
        step_record(1, loss=5.0, num_samples=3, seconds=1.0, bubble_fraction=1.0)
    )
    assert recent.numbers.startswith("loss 4.0000  1 samples/s  rank 0: bubble 25%")


def test_names_are_no_markup() -> None:
    """A metric's name in brackets is shown, not taken for a colour."""
    where, shown = console(is_terminal=False)
    watcher = RunProgress(4, 2, where)
    record = evaluation_record(4)
    renamed = type(record)(2, 0, 0.5, {"[red]": 1.0}, 10)
    watcher.evaluation(renamed)
    assert "[red] 1.0000" in shown.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (75.0, "1 min 15 s"),
        (3599.6, "1 h 00 min"),
        (2 * 3600 + 5 * 60, "2 h 05 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Rounded once: never 60 s, never 60 min."""
    assert duration(seconds) == text


def test_named_metrics() -> None:
    """Accuracy in percent, all else as it is."""
    assert metrics_text({"accuracy": 0.98765, "bits_per_byte": 2.5}) == (
        "accuracy 98.77%, bits_per_byte 2.5000"
    )


def test_the_first_line_names_the_schedule_that_was_chosen() -> None:
    """The word `auto` does not say what is about to run."""
    recipe = resolve(
        "digits-vit", ["pipeline.schedule=auto", "pipeline.num_workers=1"]
    ).recipe
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    batch = (torch.zeros(8, 4), torch.zeros(8, 4))
    with Pipeline(
        model,
        nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=batch,
        schedule=recipe.pipeline.schedule,
    ) as pipeline:
        line = plan_line(pipeline.plan, recipe)

    assert line.partition(" ")[0] in SCHEDULES
    assert line.partition(", ")[0].endswith(" (chosen)")
