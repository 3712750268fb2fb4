"""Detects changes of `requires_grad` after construction."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hocket.errors import ModelError


class TrainableCheck:
    """Detects parameters that are frozen or unfrozen after construction.

    A pipeline's construction fixes which gradients are sent, reduced and kept, and
    which weights have versions. The check takes tenths of a microsecond per parameter.

    Args:
        parameters: the parameters of this worker's stages, by the uncut model's names.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._trained = self._now()

    def check(self, step: int) -> None:
        """Check all parameters; called at each step.

        Args:
            step: the step's number, for the error.

        Raises:
            ModelError: `requires_grad` has changed for some; names the first.
        """
        now = self._now()
        if now == self._trained:
            return
        changed = [i for i, trained in enumerate(self._trained) if trained != now[i]]
        first = changed[0]
        more = f" (and of {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ModelError(
            f"requires_grad of {self._names[first]}{more} was {self._trained[first]} "
            f"when the pipeline was made, and is {now[first]} at step {step}: what "
            "is sent back, reduced and updated was fixed then. Restore it; or save and "
            "make another pipeline of the model as it is to be trained now"
        )

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]
