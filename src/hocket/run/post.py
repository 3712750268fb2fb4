"""What a lane needs of whoever carries its values to other lanes and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hocket.plan.op import Kind
from hocket.run.same_batch import Step


class Post(Protocol):
    """The mail in training and evaluation; a stand-in while a lane rehearses."""

    def begin(self, step: Step) -> None:
        """Be told of a step before its first op."""

    def sends(self, kind: Kind, stage: int) -> bool:
        """Whether what an op of this kind makes on a stage goes to another device."""

    def receives(self, kind: Kind, stage: int) -> bool:
        """Whether a stage's inputs (F) or output gradients (B) come from elsewhere."""

    def send(
        self,
        kind: Kind,
        stage: int,
        step: Step,
        microbatch: int,
        values: Sequence[Tensor],
    ) -> None:
        """Take what an op made; the values must not be changed afterwards."""

    def receive(
        self, kind: Kind, stage: int, step: Step, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Wait for what an op of this stage needs; it stays valid until `release`."""

    def release(self, kind: Kind, stage: int, step: Step, microbatch: int) -> None:
        """Give back a message that is no longer needed."""

    def flush(self) -> None:
        """Wait until everything sent has left."""
