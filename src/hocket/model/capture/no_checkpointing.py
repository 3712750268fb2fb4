"""Refuses activation checkpointing where it would be wrong or have no effect.

`torch.utils.checkpoint` runs a part of the forward again in the backward. Where
forwards read old weights, newer ones are in their place by then, and the gradient would
be silently wrong:

    forward of step 5     w4 in place     checkpoint(block, x)
    update 4              w5 in place
    backward of step 5                    block(x) once more, with w5

A captured graph would keep all activations, as if there were no checkpoint. A stage's
own recomputation is right in both cases.

Both kinds of checkpoint begin in a class of torch's, which is patched, at the first use
of this, to check whether this thread allows it. If torch has renamed one of them, its
kind is not detected here (stages are tried out, too:
`hocket.run.stage.stale_weight_check`).
"""

from __future__ import annotations

import traceback
from functools import cache
from threading import local
from typing import Any, Final

import torch.utils.checkpoint as torch_checkpoint

from hocket.errors import ModelError
from hocket.model.capture.source_line import source_line_of

CHECKPOINTING: Final = (
    "recomputation belongs to the stage: leave the checkpoint out (for Hugging Face's "
    'models: gradient_checkpointing_disable()), and say recompute="all" or "auto"'
)


class _ThreadState(local):
    """This thread's contexts that forbid checkpoints, innermost last."""

    def __init__(self) -> None:
        self.forbids: list[NoCheckpointing] = []


_here: Final = _ThreadState()


class NoCheckpointing:
    """A context in which a checkpoint that this thread begins is an error.

    Args:
        why: why none may begin; None allows them again.
        error: the error class to raise; its message names the line.
    """

    def __init__(self, why: str, error: type[ModelError] = ModelError) -> None:
        self.why = why
        self.error = error
        _watch()

    def __enter__(self) -> None:
        """Forbid checkpoints."""
        _here.forbids.append(self)

    def __exit__(self, *_: object) -> None:
        """Restore the state before."""
        _here.forbids.pop()


def around_old_weights(delay: int) -> NoCheckpointing:
    """Forbid checkpoints in forwards that read weights at least one update old."""
    updates = "1 update" if delay == 1 else f"{delay} updates"
    return NoCheckpointing(
        f"a stage reads weights that are {updates} old, and its forward calls torch."
        "utils.checkpoint, which would run a part of it again in the backward, with "
        "the newest weights"
    )


@cache
def _watch() -> None:
    """Patch both kinds of checkpoint; once per process."""
    reentrant: Any = getattr(torch_checkpoint, "CheckpointFunction", None)
    if reentrant is not None and "apply" not in vars(reentrant):

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            _ask()
            return super(reentrant, cls).apply(*args, **kwargs)

        reentrant.apply = classmethod(apply)
    other: Any = getattr(torch_checkpoint, "_checkpoint_hook", None)
    if other is not None:
        begin = other.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            _ask()
            begin(self, *args, **kwargs)

        other.__init__ = init


def _ask() -> None:
    if _here.forbids and _here.forbids[-1].why:
        forbids = _here.forbids[-1]
        source_line = source_line_of(traceback.extract_stack())
        raise forbids.error(f"{forbids.why}: {CHECKPOINTING}\n{source_line}")
