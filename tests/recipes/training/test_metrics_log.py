"""A run's numbers can be read back, from JSON lines and by TensorBoard."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from hocket.errors import ParseError
from hocket.recipes.run_files import METRICS_NAME, read_metrics
from hocket.recipes.training.watchers import (
    TENSORBOARD_NAME,
    LoggerWatcher,
    MetricsLog,
    make_logger,
)
from tests.recipes.support.run_records import (
    epoch_record,
    evaluation_record,
    step_record,
    summary_record,
)

# The package's own warnings, about NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def lines(run_dir: Path) -> list[dict[str, object]]:
    """What the file of JSON lines holds."""
    text = (run_dir / METRICS_NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_record_becomes_one_line(tmp_path: Path) -> None:
    """With its kind, its place and its numbers; complete before the run has ended."""
    log = MetricsLog(tmp_path)
    log.step(step_record(0))
    log.evaluation(evaluation_record(2))
    log.summary(summary_record())
    step, evaluation, summary = lines(tmp_path)
    log.close()

    assert step == {
        "kind": "step",
        "step": 0,
        "epoch": 0,
        "num_samples": 8,
        "extra": 3.0,
        "loss": 1.0,
        "samples_per_s": 16.0,
        "seconds": 0.5,
        "bubble_fraction": 0.25,
        "learning_rate": 0.1,
        "grad_norm": 2.0,
        "peak_bytes": 3 * 2**20,
    }
    assert evaluation == {
        "kind": "evaluation",
        "num_steps": 2,
        "epoch": 0,
        "num_samples": 10,
        "loss": 0.75,
        "accuracy": 0.5,
        "bits_per_byte": 2.5,
    }
    assert summary["kind"] == "summary"
    assert summary["accuracy"] == 0.975
    assert summary["samples_per_s"] == 16.0


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    """Training and evaluation in two groups, over steps."""
    log = LoggerWatcher(make_logger("tensorboard", tmp_path, None))
    for step in range(3):
        log.step(step_record(step, loss=1.0 - step / 4))
    log.evaluation(evaluation_record(2))
    log.epoch(epoch_record(2))
    log.summary(summary_record())
    log.close()

    board = EventAccumulator(str(tmp_path / TENSORBOARD_NAME))
    board.Reload()
    losses = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert losses == [(0, 1.0), (1, 0.75), (2, 0.5)]
    (accuracy,) = board.Scalars("evaluation/accuracy")
    assert (accuracy.step, accuracy.value) == (2, 0.5)


def test_only_every_nth_step_is_written(tmp_path: Path) -> None:
    """As the recipe says."""
    log = MetricsLog(tmp_path, log_every_steps=3)
    for step in range(7):
        log.step(step_record(step))
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 3, 6]


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    """JSON has no NaN; a reader that is strict about it must be able to go on."""
    log = MetricsLog(tmp_path)
    log.step(step_record(0, loss=nan))
    log.close()
    assert lines(tmp_path)[0]["loss"] is None


def test_no_log_is_written_over(tmp_path: Path) -> None:
    """The file of another run stays as it is."""
    (tmp_path / METRICS_NAME).write_text("precious")
    with pytest.raises(FileExistsError):
        MetricsLog(tmp_path)
    assert (tmp_path / METRICS_NAME).read_text() == "precious"


def test_what_was_written_can_be_read(tmp_path: Path) -> None:
    """Up to a torn last line; a torn line before others is named."""
    log = MetricsLog(tmp_path)
    log.step(step_record(0))
    log.epoch(epoch_record(2))
    log.close()
    path = tmp_path / METRICS_NAME
    whole = lines(tmp_path)
    assert [line["kind"] for line in whole] == ["step", "epoch"]
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    assert [*read_metrics(path)] == whole
    with path.open("a") as file:
        file.write("\n{}\n")
    with pytest.raises(ParseError, match=r"metrics\.jsonl:3: not JSON"):
        [*read_metrics(path)]


def test_a_run_that_goes_on_takes_back_what_it_will_do_again(tmp_path: Path) -> None:
    """Each step is there once, evaluations of the steps kept too, a torn line not."""
    first = MetricsLog(tmp_path)
    for step in range(5):
        first.step(step_record(step))
        first.evaluation(evaluation_record(step + 1))
    first.close()
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('{"kind": "step", "st')
    second = MetricsLog(tmp_path, first_step=3)
    second.step(step_record(3))
    second.close()

    kept = lines(tmp_path)
    assert [line["step"] for line in kept if line["kind"] == "step"] == [0, 1, 2, 3]
    evaluated = [line["num_steps"] for line in kept if line["kind"] == "evaluation"]
    assert evaluated == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("*.kept")] == []
