"""A measured step begins with the wait for its batch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hocket.core.timelines.idle import Cause, idle_by_cause
from tests.run.support.started import started

LATE_S = 0.05


def late_batches(num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that take their time."""
    for _ in range(num):
        time.sleep(LATE_S)
        yield torch.ones(4, 3), torch.zeros(4, 3)


def test_a_late_batch_is_why_the_device_is_idle() -> None:
    """In the timeline and in the step's result; a batch that is given is never late."""
    batch = torch.ones(4, 3), torch.zeros(4, 3)
    with started(
        nn.Sequential(nn.Linear(3, 3)), nn.functional.mse_loss, torch.optim.SGD, batch
    ) as pipeline:
        for result in pipeline.train(late_batches(2)):
            timeline = pipeline.measured()
            (wait,) = timeline.data_waits
            assert wait.start_s == timeline.begin_s == 0.0
            assert wait.end_s >= LATE_S
            assert idle_by_cause(timeline).seconds[Cause.DATA] == wait.end_s
            assert result.idle_s is not None
            assert result.idle_s["data"] == wait.end_s
        pipeline.step(batch)
        assert not pipeline.measured().data_waits
