"""A value that is read when it is first looked at, since to read it is to wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from hocket.errors import RunError

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Late(Generic[_T]):
    """A value that a device or another worker has, until it is looked at.

    Args:
        read: waits for the value and returns it; called once.
    """

    read: Callable[[], _T] | None
    _found: _T | None = field(init=False, default=None)
    _error: RunError | None = field(init=False, default=None)

    @property
    def value(self) -> _T:
        """The value.

        Raises:
            RunError: it could not be read, or not before `give_up`; the same each time.
        """
        if self._error is not None:
            raise self._error
        if self.read is not None:
            try:
                self._found = self.read()
            except RunError as error:
                self._error = error
                raise
            self.read = None
        return cast("_T", self._found)

    def give_up(self, why: RunError) -> None:
        """Raise an error from now on, unless the value was read before."""
        if self.read is not None and self._error is None:
            self._error = why
