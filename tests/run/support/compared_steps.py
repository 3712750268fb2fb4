"""Has a check of losses compare steps, as the last stage does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor

from hocket.errors import ModelError
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import TOTAL, losses_of
from hocket.run.stage.loss_checks.step_loss_check import StepLossCheck
from tests.run.support.batch_losses import CLASSES, CPU, NUM, scores
from tests.run.support.batch_losses import words_of_uneven_sentences as uneven


def compare(
    loss: Any,
    parts: Sequence[tuple[Any, Any]],
    counts: Callable[[Any], Any] = len,
    **settings: Any,
) -> str:
    """Check a loss as the last stage does with the first step's microbatches."""
    check = StepLossCheck(loss, partial(losses_of, loss), CPU, **settings)
    return of_step(check, 0, parts, counts)


def of_step(
    check: StepLossCheck,
    step: int,
    parts: Sequence[tuple[Any, Any]],
    counts: Callable[[Any], Any] = len,
) -> str:
    """Let a step's microbatches come to a check; return its error."""
    rows = []
    try:
        for output, targets in parts:
            part = Microbatch((), targets, len(targets))
            total, weight = check.named(output, targets)[TOTAL], float(counts(targets))
            rows.append(check.keep(step, total, output, part, weight))
        check.compare(step, [row for row in rows if row is not None])
    except ModelError as error:
        return str(error)
    return ""


def cut(output: Tensor, targets: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Cut a batch into microbatches."""
    return list(zip(output.split(sizes), targets.split(sizes), strict=True))


UNEVEN: Final = cut(scores(NUM, NUM, CLASSES), uneven(), 2, 3, 1)
