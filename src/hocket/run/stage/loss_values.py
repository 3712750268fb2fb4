"""Reads the losses of a step's microbatches, and checks that they are finite.

On a CPU a loss is there when its forward has returned, and is read at once. Reading one
from an accelerator waits for all queued work and leaves the device idle meanwhile:
there the losses are kept, and read together when the step's last forward is queued.

    CPU            F0 read  B0   F1 read  B1   F2 read
    accelerator    F0       B0   F1       B1   F2 read all
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.run.data.loss import TOTAL

_EMPTY: Final = (
    ". If all targets of it are ignored, their mean is nan: hocket.TokenMean(loss) "
    "leaves such microbatches out"
)


class LossValues:
    """Keeps the named losses of each microbatch, and reads their values.

    Args:
        stage: the stage that computes them, for errors.
        at_once: whether to read each loss when it is taken.
    """

    def __init__(self, stage: int, *, at_once: bool) -> None:
        self._stage = stage
        self._at_once = at_once
        self._unread: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._values: dict[int, dict[int, dict[str, float]]] = {}  # by step

    def take(self, step: int, index: int, named: Mapping[str, Tensor]) -> None:
        """Keep the losses of one microbatch.

        Raises:
            NonFiniteError: the loss to train is not finite, and is read at once.
        """
        if self._at_once:
            values = {name: value.item() for name, value in named.items()}
            self._keep(step, index, values)
            return
        # Copies, for some losses lie in the memory of what they are the mean of; in one
        # type, to be read together.
        self._unread[step, index] = {
            name: value.detach().to(torch.float64, copy=True)
            for name, value in named.items()
        }

    def read(self, step: int | None = None) -> dict[int, dict[str, float]]:
        """Return what was taken by microbatch and name, and forget it.

        Args:
            step: the step to read; all steps when not given.

        Raises:
            NonFiniteError: the loss to train is not finite for a microbatch; names the
                first.
        """
        self._read_together()
        if step is not None:
            return self._values.pop(step, {})
        values, self._values = self._values, {}
        return {i: named for of_step in values.values() for i, named in of_step.items()}

    def clear(self) -> None:
        """Drop the losses that were kept."""
        self._unread.clear()
        self._values.clear()

    def _read_together(self) -> None:
        if not self._unread:
            return
        unread, self._unread = self._unread, {}
        scalars = [value for named in unread.values() for value in named.values()]
        numbers = iter(torch.stack(scalars).tolist())
        for (step, index), named in unread.items():
            self._keep(step, index, {name: next(numbers) for name in named})

    def _keep(self, step: int, index: int, values: dict[str, float]) -> None:
        total = values[TOTAL]
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss is {total} at step {step}, stage {self._stage}, "
                f"microbatch {index}; no weights were updated from it"
                f"{_EMPTY if math.isnan(total) else ''}"
            )
        self._values.setdefault(step, {})[index] = values
