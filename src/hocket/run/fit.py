"""The usual loop around a pipeline: train, evaluate now and then, tell who listens.

    step, step, ... step ─▶ evaluation ─▶ step, ...
      │     │         └────────┴─▶ callbacks(result, evaluation)
      └─────┴─▶ callbacks(result, None)

Whoever wants another loop writes it: it is `for result in pipeline.train(loader)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hocket.errors import DataError
from hocket.run.evaluate import EvaluationResult
from hocket.run.pipeline import Pipeline
from hocket.run.step_result import StepResult

Callback = Callable[[StepResult, EvaluationResult | None], object]


def fit(
    pipeline: Pipeline,
    loader: Iterable[Any],
    *,
    evaluate: Callable[[], EvaluationResult] | None = None,
    evaluate_every_steps: int | None = None,
    num_steps: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> StepResult | None:
    """Train on a loader, and evaluate every so many steps. Every worker must call this.

    Args:
        pipeline: that trains.
        loader: as for `Pipeline.train`; its end ends the training.
        evaluate: evaluates, such as `lambda: pipeline.evaluate(loader, metrics)`.
        evaluate_every_steps: of the pipeline's steps, counted over its whole life.
        num_steps: after so many of them training ends, with an evaluation.
        callbacks: each is called after every step, on every worker, with the step's
            result and with that of the evaluation where one has followed the step. One
            that returns True ends the training: it must do so on all workers, as it
            does when it looks at nothing but these results, which all workers share.

    Returns:
        The last step's result; None where no step was trained.

    Raises:
        DataError: it is told to evaluate, but not how, or how often.
        RunError: as `Pipeline.train`.
    """
    if evaluate is None and evaluate_every_steps is not None:
        raise DataError(
            f"evaluate_every_steps={evaluate_every_steps} has no effect without "
            "evaluate: give a function that evaluates"
        )
    if evaluate is not None and evaluate_every_steps is None and num_steps is None:
        raise DataError(
            "evaluate is never called without evaluate_every_steps or num_steps: say "
            "after which steps"
        )
    result = None
    for result in pipeline.train(loader):
        num_done = result.step + 1
        is_last = num_done == num_steps
        is_due = evaluate_every_steps and num_done % evaluate_every_steps == 0
        evaluation = evaluate() if evaluate and (is_due or is_last) else None
        answers = [callback(result, evaluation) for callback in callbacks]
        if is_last or any(answer is True for answer in answers):
            break
    return result
