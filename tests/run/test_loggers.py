"""Numbers reach TensorBoard, JSON lines and any other logger.

On one worker an error in a logger ends training, and the pipeline can go on.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import Tensor, nn

import hocket
from hocket.errors import CallbackError

# TensorBoard's own warnings, about NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCH = torch.ones(4, 3), torch.zeros(4, 3)


class WandbRun:
    """Takes what `wandb.sdk.wandb_run.Run.log` takes, and refuses earlier steps."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """As W&B does."""
        assert step is not None
        assert commit is None
        assert all(isinstance(x, float | int) for x in data.values())
        assert not self.logged or step >= self.logged[-1][0]
        self.logged.append((step, data))


def made(schedule: str = "1f1b", loss: Any = nn.functional.mse_loss) -> hocket.Pipeline:
    """Of one device."""
    torch.manual_seed(0)
    return hocket.Pipeline(
        nn.Sequential(nn.Linear(3, 3)),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        example=BATCH,
        schedule=schedule,
        num_microbatches=2,
    )


def test_every_logger_gets_the_numbers_of_each_step(tmp_path: Path) -> None:
    """TensorBoard, a file, and a run of W&B as it is."""
    run = WandbRun()
    with (
        made() as pipeline,
        closing(hocket.TensorBoardLogger(tmp_path / "tb")) as board,
        closing(hocket.JsonLinesLogger(tmp_path / "log.jsonl")) as lines,
    ):
        loggers: list[hocket.Logger] = [board, lines, run]
        results = [*pipeline.train([BATCH] * 3, loggers=loggers)]

    losses = [result.loss for result in results]
    assert [step for step, _ in run.logged] == [0, 1, 2]
    assert [numbers["train/loss"] for _, numbers in run.logged] == losses
    assert {*run.logged[0][1]} == {
        "train/loss",
        "train/seconds",
        "train/samples_per_s",
        "train/bubble_fraction",
        "train/peak_bytes",
        "train/grad_norm",
    }
    text = (tmp_path / "log.jsonl").read_text()
    assert [json.loads(x) for x in text.splitlines()] == [
        {"step": step, **numbers} for step, numbers in run.logged
    ]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    drawn = [(x.step, x.value) for x in events.Scalars("train/loss")]
    assert drawn == [(i, pytest.approx(loss)) for i, loss in enumerate(losses)]


def test_names_of_the_user_replace_no_number(tmp_path: Path) -> None:
    """Where they are the same, a prefix keeps them apart; the folder is made."""

    def loss(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        error = nn.functional.mse_loss(output, targets)
        return {"loss": error, "seconds": error + 7.0, "grad_norm": error + 8.0}

    path = tmp_path / "runs" / "mine.jsonl"
    with made(loss=loss) as pipeline, closing(hocket.JsonLinesLogger(path)) as lines:
        [*pipeline.train([BATCH], loggers=[lines])]
    (step,) = (json.loads(x) for x in path.read_text().splitlines())
    assert step["train/losses/seconds"] == pytest.approx(step["train/loss"] + 7.0)
    assert step["train/losses/grad_norm"] == pytest.approx(step["train/loss"] + 8.0)
    assert step["train/seconds"] == pytest.approx(4 / step["train/samples_per_s"])


def test_a_logger_that_fails_ends_nothing() -> None:
    """A worker alone raises at once; several: tests/run/test_mistakes.py."""

    class Full:
        def log(self, numbers: dict[str, Any], /, *, step: int) -> None:
            del numbers
            if step == 1:
                raise OSError("no space left on device")

    run = WandbRun()
    with made() as pipeline:
        expected = r"Full\.log failed after step 1: OSError: no space left on device"
        with pytest.raises(CallbackError, match=expected):
            [*pipeline.train([BATCH] * 3, loggers=[Full(), run])]
        assert pipeline.step(BATCH).step == 2
        assert pipeline.state_dict()
    assert run.logged[0][0] == 0


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    """A reader that is strict about JSON must be able to go on."""
    with closing(hocket.JsonLinesLogger(tmp_path / "log.jsonl")) as logger:
        logger.log({"train/loss": float("nan"), "train/seconds": 0.5}, step=3)
    line = (tmp_path / "log.jsonl").read_text()
    assert line == '{"step": 3, "train/loss": null, "train/seconds": 0.5}\n'


def test_no_file_is_made_where_nothing_is_logged(tmp_path: Path) -> None:
    """Every worker makes the logger, and only rank 0 logs."""
    hocket.TensorBoardLogger(tmp_path / "tb").close()
    hocket.JsonLinesLogger(tmp_path / "log.jsonl").close()
    assert not [*tmp_path.iterdir()]
