"""The usual training loop: train, evaluate now and then, and call callbacks.

    step, step, ... step ─▶ evaluation ─▶ step, ...
      │     │         └────────┴─▶ callbacks(result, evaluation)
      └─────┴─▶ callbacks(result, None)

If steps overlap (a flush-free order), those in flight are finished first, so that an
evaluation, or a save in a callback, belongs to the step that it follows:

    step, step, ... step ─▶ drained ─▶ evaluation, callbacks ─▶ step, ...

A callback that fails is logged, no worker calls it again, and training goes on: one
that left at once would let the others wait. Behind the next evaluation, or at the end,
every worker raises CallbackError; a worker alone raises it at once.

Any other loop is easily written: `for result in pipeline.train(loader)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hocket.errors import DataError
from hocket.run.callbacks.callbacks import (
    Callback,
    Callbacks,
    refuse_different_numbers,
)
from hocket.run.callbacks.loggers import Logger, log_callbacks
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.sync.step_result import StepResult
from hocket.run.pipeline import Pipeline


def fit(
    pipeline: Pipeline,
    loader: Iterable[Any],
    *,
    evaluate: Callable[[], EvaluationResult] | None = None,
    evaluate_every_steps: int | None = None,
    num_steps: int | None = None,
    drain_after: Callable[[int], bool] | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] | None = None,
) -> StepResult | None:
    """Train on a loader, and evaluate every so many steps. Every worker must call this.

    Args:
        pipeline: the pipeline to train.
        loader: as for `Pipeline.train`; its end ends the training.
        evaluate: evaluates, such as `lambda: pipeline.evaluate(loader, metrics)`.
        evaluate_every_steps: the number of the pipeline's steps between evaluations,
            counted over its whole life.
        num_steps: training ends after so many of the pipeline's steps, with an
            evaluation.
        drain_after: returns True after the steps at which a callback saves, the same on
            every worker; all other steps are finished first. Evaluations always drain.
        callbacks: each is called after every step, on every worker, with the step's
            result and with that of the evaluation where one has followed the step. One
            that returns True, on any worker, ends the training on all of them: after
            this step; or, where steps overlap and nothing drains them, after the next.
            Steps that are in flight then are finished without further calls.
        loggers: get the numbers of steps, as for `Pipeline.train`, and those of
            evaluations as `evaluation/...`, on rank 0.

    Returns:
        The last step's result; None if no step was trained.

    Raises:
        DataError: `evaluate` is given without a number of steps, or the other way
            round; or workers have different numbers of callbacks.
        CallbackError: a callback failed with an error that is not hocket's; the
            pipeline can be used as before.
        RunError: see `Pipeline.train`.
    """
    _check_evaluation(evaluate, evaluate_every_steps, num_steps)

    def is_due(step: int) -> bool:
        is_last = step + 1 == num_steps
        return is_last or bool(
            evaluate_every_steps and (step + 1) % evaluate_every_steps == 0
        )

    def drains(step: int) -> bool:
        return is_due(step) or bool(drain_after and drain_after(step))

    if num_steps is not None and pipeline.num_steps >= num_steps:
        return None  # resumed where it had ended
    overlaps = bool(pipeline.plan.schedule.body)
    refuse_different_numbers(callbacks, pipeline.world)
    called = Callbacks(
        callbacks,
        log_callbacks(loggers, pipeline.world, overlaps=overlaps),
        pipeline.world,
        is_watched=bool(callbacks) or loggers is not None,
    )
    result = None
    for result in pipeline.train(loader, drain_every=drains):
        evaluation = evaluate() if evaluate and is_due(result.step) else None
        waits = not overlaps or drains(result.step)
        stops = called.call(result, evaluation, waits=waits)
        if evaluation is not None:
            called.raise_failures()
        if stops or result.step + 1 == num_steps:
            break
    called.raise_failures()
    return result


def _check_evaluation(
    evaluate: object, evaluate_every_steps: int | None, num_steps: int | None
) -> None:
    """Refuse arguments without effect.

    Raises:
        DataError: one of them needs another.
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
