"""The usual loop around a pipeline: train, evaluate now and then, tell who listens.

    step, step, ... step ─▶ evaluation ─▶ step, ...
      │     │         └────────┴─▶ callbacks(result, evaluation)
      └─────┴─▶ callbacks(result, None)

Where steps overlap (an order without flushes), those under way are finished first, so
that an evaluation, or what a callback saves, is of the step that it follows:

    step, step, ... step ─▶ drained ─▶ evaluation, callbacks ─▶ step, ...

Whoever wants another loop writes it: it is `for result in pipeline.train(loader)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hocket.errors import DataError
from hocket.run.engine.evaluate import EvaluationResult
from hocket.run.engine.step_result import StepResult
from hocket.run.pipeline import Pipeline

Callback = Callable[[StepResult, EvaluationResult | None], object]


def fit(
    pipeline: Pipeline,
    loader: Iterable[Any],
    *,
    evaluate: Callable[[], EvaluationResult] | None = None,
    evaluate_every_steps: int | None = None,
    num_steps: int | None = None,
    drain_after: Callable[[int], bool] | None = None,
    callbacks: Sequence[Callback] = (),
) -> StepResult | None:
    """Train on a loader, and evaluate every so many steps. Every worker must call this.

    Args:
        pipeline: that trains.
        loader: as for `Pipeline.train`; its end ends the training.
        evaluate: evaluates, such as `lambda: pipeline.evaluate(loader, metrics)`.
        evaluate_every_steps: of the pipeline's steps, counted over its whole life.
        num_steps: after so many of them training ends, with an evaluation.
        drain_after: whether no other step may be under way after a step, because a
            callback saves then; the same on every worker. Before an evaluation none is.
        callbacks: each is called after every step, on every worker, with the step's
            result and with that of the evaluation where one has followed the step. One
            that returns True ends the training: it must do so on all workers, as it
            does when it looks at nothing but these results, which all workers share.
            Steps that are under way then are finished, and nobody is told.

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

    def is_due(step: int) -> bool:
        is_last = step + 1 == num_steps
        return is_last or bool(
            evaluate_every_steps and (step + 1) % evaluate_every_steps == 0
        )

    def drains(step: int) -> bool:
        return is_due(step) or bool(drain_after and drain_after(step))

    result = None
    for result in pipeline.train(loader, drain_every=drains):
        evaluation = evaluate() if evaluate and is_due(result.step) else None
        answers = [callback(result, evaluation) for callback in callbacks]
        if result.step + 1 == num_steps or any(answer is True for answer in answers):
            break
    return result
