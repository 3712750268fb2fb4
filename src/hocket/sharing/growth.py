"""Tracks the bytes that a job holds between iterations, while they grow.

    bytes that               ┌─┘ ...     a leak, or a buffer that is being filled:
    stay       ┌─┐         ┌─┘           watched for as long as it grows
           ────┘ └─────────┘             accumulated gradients come and go
            watched     watched

Zico (Lim et al., ATC 2021) replaces what was forecast of an iteration by what was
observed. What stays between iterations is replaced here in the same way. Only what is
seen counts: to assume growth of iterations that were not watched could end a job that
empties a buffer now and then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

_WINDOW: Final = 5  # iterations that show whether a job grows steadily
_LEAST_BYTES: Final = 1024  # per iteration; losses that are kept are less
_LEAST_SHARE: Final = 1e-4  # of all that the job holds


@dataclass(slots=True)
class Growth:
    """The bytes that one job holds between iterations.

    Args:
        first_bytes: when it was first watched. Less never counts: what another job has
            left may be freed while this one is watched.

    Attributes:
        static_bytes: the bytes as of the last iteration that was watched.
    """

    first_bytes: float
    static_bytes: float = field(init=False)
    _lasting_bytes: float = field(init=False)  # without what may come and go
    _window: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __post_init__(self) -> None:
        """Begin with what was seen first."""
        self.static_bytes = self._lasting_bytes = self.first_bytes

    @property
    def rate(self) -> float:
        """Return the bytes by which each of the last watched iterations grew.

        The median, rounded down: growth that the next iteration frees does not count.
        """
        return max(0.0, median_low(self._window)) if self._window else 0.0

    def see(self, grown_bytes: float, num_unseen: int = 0) -> None:
        """Count an iteration that was watched.

        Args:
            grown_bytes: by how much more the job held at its end than at that of the
                iteration before.
            num_unseen: how many iterations since then were not watched. If any, growth
                that did not last for five watched iterations is dropped.
        """
        if num_unseen:
            self.static_bytes = self._lasting_bytes
            self._window.clear()
        self._window.append(grown_bytes)
        self.static_bytes = max(self.static_bytes + grown_bytes, self.first_bytes)
        is_steady = len(self._window) == _WINDOW and self.rate > 0
        if is_steady or self.static_bytes < self._lasting_bytes:
            self._lasting_bytes = self.static_bytes

    def must_watch(self, peak_bytes: float) -> bool:
        """Return whether the job still grows, so that the next iteration is watched.

        Args:
            peak_bytes: what an iteration needs beyond the bytes between iterations.
        """
        least = max(_LEAST_BYTES, _LEAST_SHARE * (self.static_bytes + peak_bytes))
        if len(self._window) < _WINDOW:
            return sum(self._window) > least * len(self._window)
        return self.rate > least
