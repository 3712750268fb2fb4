"""What else happens at some points of a worker's lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hocket.core.op import Op
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import Work


def _nothing(work: Work) -> None:
    """What a hook does when nobody set it."""


def _nothing_of(stage: int, work: Work) -> None:
    """What hooks of one stage do where updates are looked at together."""


def _yes() -> bool:
    """What a hook says when nobody set it, and all is well."""
    return True


def _ignore(op: Op, step: int, error: Exception) -> None:
    """What `on_error` does when nobody knows a better error."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What else happens at some points of the lane.

    Args:
        after_losses: when the last stage's last forward of a batch has run.
        before_updates: when the lane comes to its first update; whether the step's
            updates are to be made.
        after_backwards: where updates are not looked at together: when a stage's last
            backward of a step has run.
        after_gradients: likewise, when a stage's gradients are complete, over all
            replicas; or not at all, where its update comes first.
        before_update: likewise, when the lane comes to
            that of a stage.
        on_output: evaluation: called with each microbatch and the model's output.
        on_error: when an op has failed, with its step; may raise a better error.
    """

    after_losses: Callable[[Work], None] = _nothing
    before_updates: Callable[[], bool] = _yes
    after_backwards: Callable[[int, Work], None] = _nothing_of
    after_gradients: Callable[[int, Work], None] = _nothing_of
    before_update: Callable[[int, Work], None] = _nothing_of
    on_output: Callable[[Microbatch, object], None] | None = None
    on_error: Callable[[Op, int, Exception], None] = _ignore
