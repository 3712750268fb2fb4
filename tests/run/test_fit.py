"""The usual loop: evaluates when due, calls all callbacks, stops when asked to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import DataError
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.fit import fit

BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def made(schedule: str = "1f1b") -> hocket.Pipeline:
    """Of one device."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets)

    torch.manual_seed(0)
    return hocket.Pipeline(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        example=BATCH,
        schedule=schedule,
        num_microbatches=2,
    )


@pytest.fixture
def pipeline() -> Iterator[hocket.Pipeline]:
    """That ends each step before the next begins."""
    with made() as found:
        yield found


class Reported:
    """Records its calls, and stops after a step."""

    def __init__(self, last_step: int | None = None) -> None:
        self.steps: list[int] = []
        self.evaluated: list[int] = []
        self._last_step = last_step

    def __call__(self, result: StepResult, evaluation: EvaluationResult | None) -> bool:
        """One more step."""
        self.steps.append(result.step)
        if evaluation is not None:
            assert evaluation.num_samples == 4
            self.evaluated.append(result.step)
        return result.step == self._last_step


def test_evaluates_every_so_many_steps_and_at_the_end(
    pipeline: hocket.Pipeline,
) -> None:
    """Each callback hears of every step, and of an evaluation with its step."""
    reported = (Reported(), Reported())
    last = fit(
        pipeline,
        [BATCH] * 20,
        evaluate=lambda: pipeline.evaluate([BATCH]),
        evaluate_every_steps=3,
        num_steps=8,
        callbacks=reported,
    )
    assert last is not None
    assert last.step == 7
    for each in reported:
        assert each.steps == list(range(8))
        assert each.evaluated == [2, 5, 7]


def test_steps_are_counted_over_the_pipelines_life(pipeline: hocket.Pipeline) -> None:
    """A second epoch goes on counting."""
    reported = Reported()
    for _ in range(2):
        fit(
            pipeline,
            [BATCH] * 2,
            evaluate=lambda: pipeline.evaluate([BATCH]),
            evaluate_every_steps=3,
            callbacks=[reported],
        )
    assert reported.steps == [0, 1, 2, 3]
    assert reported.evaluated == [2]


def test_no_other_step_is_under_way_during_callbacks() -> None:
    """At evaluations, where asked for, and at the end; elsewhere steps overlap."""
    begun: dict[int, int] = {}
    with made("wpipe") as pipeline:
        fit(
            pipeline,
            [BATCH] * 20,
            evaluate=lambda: pipeline.evaluate([BATCH]),
            evaluate_every_steps=5,
            num_steps=14,
            drain_after=lambda step: step == 7,
            callbacks=[
                lambda result, _: begun.setdefault(result.step, pipeline.num_steps)
            ],
        )
        assert pipeline.num_steps == 14
    assert list(begun) == list(range(14))
    assert {step: begun[step] for step in (4, 7, 9, 13)} == {4: 5, 7: 8, 9: 10, 13: 14}
    assert begun[0] > 1


def test_a_callback_that_says_true_ends_it(pipeline: hocket.Pipeline) -> None:
    """When all of the others have heard of the step too."""
    first, second = Reported(last_step=1), Reported()
    last = fit(pipeline, [BATCH] * 5, callbacks=[first, second])
    assert last is not None
    assert first.steps == second.steps == [0, 1]


def test_what_would_have_no_effect_is_refused(pipeline: hocket.Pipeline) -> None:
    """To evaluate without saying how, or without saying when."""
    with pytest.raises(DataError, match="has no effect without evaluate"):
        fit(pipeline, [BATCH], evaluate_every_steps=2)
    with pytest.raises(DataError, match="never called"):
        fit(pipeline, [BATCH], evaluate=lambda: pipeline.evaluate([BATCH]))


def test_an_empty_loader_trains_nothing(pipeline: hocket.Pipeline) -> None:
    """And there is no result."""
    assert fit(pipeline, []) is None


def test_nothing_is_trained_behind_the_last_step(pipeline: hocket.Pipeline) -> None:
    """As after a resume of a run that had ended."""
    for _ in range(2):
        last = fit(pipeline, [BATCH] * 5, num_steps=3)
    assert last is None
    assert pipeline.num_steps == 3
