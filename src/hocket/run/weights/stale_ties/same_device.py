"""A weight whose versions another stage of the same device keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SameDeviceSource:
    """Reads the leaves of another stage; gradients add up in them.

    Args:
        delay: how many updates behind the newest it is read.
        leaf: that a step reads.
    """

    delay: int
    leaf: Callable[[int], Tensor]

    def read(self, step: int) -> Tensor:
        """The leaf that both stages read."""
        return self.leaf(step)

    def set_old(self, old: Sequence[Tensor]) -> None:
        """The other stage is told, too."""

    @property
    def num_bytes(self) -> int:
        """None of its own."""
        return 0
