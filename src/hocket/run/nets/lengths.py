"""The lengths of batches that a net's stages are right for, and what is said of others.

captured with 8 texts of 5 words    a batch of 7 words: captured again, for any
a batch of 6: runs at once
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import nn

from hocket.errors import ModelError
from hocket.model.capture.captured import Captured
from hocket.model.trace.example import Lengths, Place
from hocket.model.trace.observe import in_mode

_MOST_CAPTURES: Final = 8  # of code that decides by lengths


class KnownLengths:
    """The lengths that a captured model is right for.

    Attributes:
        open: the dimensions that may be of any size, each with a size to export with.
    """

    def __init__(self) -> None:
        self.open: dict[Place, int] = {}
        self._known: set[Lengths] = set()
        self._num_captures = 0
        self._modes: list[tuple[nn.Module, bool]] = []  # while it evaluates

    @contextmanager
    def evaluating(self, model: nn.Module | None) -> Iterator[None]:
        """Put a model into evaluation mode while the block runs."""
        if model is None:
            yield
            return
        self._modes = [(module, module.training) for module in model.modules()]
        try:
            with in_mode(model, training=False):
                yield
        finally:
            self._modes.clear()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Give it the modes that its user has set, also within `evaluating`."""
        now = [(module, module.training) for module, _ in self._modes]
        try:
            for module, mode in self._modes:
                module.training = mode
            yield
        finally:
            for module, mode in now:
                module.training = mode

    def forget(self) -> None:
        """Note that the model was captured again."""
        self._known.clear()

    def covers(self, captured: Captured, lengths: Lengths) -> bool:
        """Whether a captured model is right for a batch of these lengths."""
        if lengths not in self._known:
            if _fault(captured, lengths):
                return False
            self._known.add(lengths)
        return True

    def open_for(self, captured: Captured, lengths: Lengths) -> None:
        """Open the dimensions in which a batch differs from the example.

        Raises:
            ModelError: that does not help.
        """
        example, fault = captured.example, _fault(captured, lengths)
        if len(example.leaves) != len(lengths):
            raise ModelError("it reads another net's outputs")
        if self._num_captures == _MOST_CAPTURES:
            raise ModelError(fault)
        self._num_captures += 1
        own = example.sizes(example.lengths)
        self.open |= {
            place: size
            for place, size in example.sizes(lengths).items()
            if place in self.open or size != own[place]
        }

    def check(self, found: Captured | None, lengths: Lengths) -> Captured:
        """Return what was captured for a batch of these lengths.

        Raises:
            ModelError: it is not right for that.
        """
        if found is None:
            raise ModelError(
                "with open lengths its code makes other calls, or they return other "
                "shapes"
            )
        if fault := _fault(found, lengths):
            raise ModelError(fault)
        self._known = {lengths}
        return found


def _fault(captured: Captured, lengths: Lengths) -> str:
    example = captured.example
    if len(example.leaves) != len(lengths):
        return "it reads another net's outputs"
    sizes, own = (example.sizes(x) for x in (lengths, example.lengths))
    for flow in (captured.training, captured.evaluation):
        known = flow.trace.open
        if known is None:
            is_own = lengths == example.lengths
            return "" if is_own else "it was captured for its example's lengths"
        if fault := known.fault(sizes, own, example.names):
            return fault
    return ""


def other_lengths(captured: Captured, lengths: Lengths, step: int, why: str) -> str:
    """Return the text of an error: a batch cannot be followed."""
    example = captured.example
    differ = ", ".join(
        f"{name} has {shape} behind its samples, and the example {own}"
        for name, shape, own in zip(
            example.names, lengths, example.lengths, strict=False
        )
        if shape != own
    )
    return (
        f"at step {step} a batch has other lengths than the example ({differ}), and "
        f"the model cannot be captured for both: {why}. Pad all batches to one length, "
        "or give an nn.Sequential, whose modules run as they are"
    )
