"""Workers whose metrics fail, and that call different functions."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from tests.run.support.joined import reported
from tests.run.support.plainly import SGD
from tests.run.support.started import started

BATCH = torch.ones(4, 3), torch.zeros(4, 3)


def watch() -> dict[str, Any]:
    """Let what watches fail; return what was raised, and what still works."""
    logging.disable()
    missing: Any = None
    with made() as pipeline:
        raised = [
            reported(lambda: pipeline.evaluate([BATCH] * 2, broken_metrics), Exception),
            reported(lambda: pipeline.evaluate([]), Exception),
            reported(lambda: next(pipeline.train(missing)), Exception),
        ]
        return {
            "raised": raised,
            "step": pipeline.step(BATCH).step,
            "loss": pipeline.evaluate([BATCH]).loss,
            "names": sorted(pipeline.state_dict()),
        }


def call_differently(folder: str, first: str, second: str) -> list[Any]:
    """Rank 0 makes one call, rank 1 another; return what it raised, and how soon."""
    pipeline = made()
    pipeline.step(BATCH)
    calls = {
        "evaluate": lambda: pipeline.evaluate([BATCH]),
        "outputs": lambda: pipeline.outputs([BATCH]),
        "train": lambda: [*pipeline.train([BATCH])],
        "step": lambda: [pipeline.step(BATCH) for _ in range(3)],
        "state_dict": pipeline.state_dict,
        "save": lambda: pipeline.save(folder),
        "load": lambda: pipeline.load(folder),
        "measured": pipeline.measured,
        "close": pipeline.close,
        "nothing": lambda: None,
    }
    begin_s = monotonic()
    error = reported(calls[first if pipeline.is_main else second], Exception)
    return [*error, monotonic() - begin_s]


def made() -> hocket.Pipeline:
    """Of two stages."""
    torch.manual_seed(0)
    return started(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        nn.functional.mse_loss,
        SGD,
        BATCH,
        cut=["1"],
    )


def broken_metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Fail."""
    raise KeyError("accuracy")
