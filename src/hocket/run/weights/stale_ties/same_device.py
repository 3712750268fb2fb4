"""A stale tied weight whose versions another stage of the same device keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SameDeviceSource:
    """Reads the leaves of another stage; gradients accumulate in them.

    Args:
        delay: how many updates behind the newest it is read.
        leaf: returns the leaf that a step reads.
    """

    delay: int
    leaf: Callable[[int], Tensor]

    def read(self, step: int) -> Tensor:
        """Return the leaf that both stages read."""
        return self.leaf(step)

    def set_old(self, old: Sequence[Tensor]) -> None:
        """Do nothing: the other stage loads them, too."""

    @property
    def num_bytes(self) -> int:
        """0: the other stage counts them."""
        return 0
