"""The lengths of batches that a net's stages are right for, and what is said of others.

captured with 8 texts of 5 words    a batch of 7 words: captured again, for any
a batch of 6: runs at once
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from hocket.errors import HocketError, ModelError
from hocket.model.capture.captured import Captured
from hocket.model.trace.example import Example, Lengths, Place

log = logging.getLogger(__name__)

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

    def forget(self) -> None:
        """Note that the model was captured again."""
        self._known.clear()

    def covers(self, captured: Captured, lengths: Lengths) -> bool:
        """Whether a captured model is right for a batch of these lengths."""
        if lengths not in self._known:
            is_own = lengths == captured.example.lengths
            is_open = captured.training.trace.open.is_any  # to all that modules take
            if (is_open and not is_own) or _fault(captured, lengths):
                return False
            self._known.add(lengths)
        return True

    def follow(
        self,
        captured: Captured,
        lengths: Lengths,
        step: int,
        try_with: Callable[[Example], object],
        capture_again: Callable[[], Captured | None],
    ) -> Captured | None:
        """Find whether a model takes batches of lengths that are not covered.

        Args:
            captured: the model.
            lengths: those of a batch.
            step: its step, for errors.
            try_with: runs the model with an example, where modules run as they are.
            capture_again: returns the model with `open` dimensions; None if it differs.

        Returns:
            The model as it is captured now; None if it stays as it is.

        Raises:
            ModelError: it does not take them; nothing has changed.
        """
        before = dict(self.open)
        try:
            if captured.training.trace.open.is_any:
                try_with(captured.example.at(lengths))
                self._known.add(lengths)
                return None
            self._open_for(captured, lengths)
            log.info("capturing the model for lengths of %s, and others", lengths)
            found = capture_again()
            if fault := _fault(found, lengths):
                raise ModelError(fault)
        except (HocketError, TypeError, RuntimeError) as error:
            self.open = before
            text = _other_lengths(captured, lengths, step, str(error))
            raise ModelError(text) from error
        self._known = {lengths}
        return found

    def _open_for(self, captured: Captured, lengths: Lengths) -> None:
        """Open the dimensions in which a batch differs from the example."""
        if self._num_captures == _MOST_CAPTURES:
            raise ModelError(_fault(captured, lengths))
        self._num_captures += 1
        own = captured.example.sizes(captured.example.lengths)
        self.open |= {
            place: size
            for place, size in captured.example.sizes(lengths).items()
            if place in self.open or size != own.get(place)
        }


def _fault(captured: Captured | None, lengths: Lengths) -> str:
    """Return why a captured model is not right for some lengths."""
    if captured is None:
        return "with open lengths its code makes other calls, or of other shapes"
    example = captured.example
    if len(example.leaves) != len(lengths):
        return "it reads another net's outputs"
    sizes, own = (example.sizes(x) for x in (lengths, example.lengths))
    for flow in (captured.training, captured.evaluation):
        if fault := flow.trace.open.fault(sizes, own, example.names):
            return fault
    return ""


def _other_lengths(captured: Captured, lengths: Lengths, step: int, why: str) -> str:
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
        f"the model cannot take both: {why}. Pad all batches to one length, "
        "or give an nn.Sequential, whose modules run as they are"
    )
