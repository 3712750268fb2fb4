"""A mode in which each of torch's operators is seen when it is called."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A base for modes that leaves torch's compiler alone.

    To keep its compiler from tracing a mode, torch imports it, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not import torch's compiler."""
        return False
