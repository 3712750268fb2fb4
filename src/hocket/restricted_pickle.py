"""Read a pickle without running anything that it names.

A pickle is a program: it names functions, and has them called. Here the caller gives
what each name stands for, a harmless stand-in of ours, and no other name is admitted.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Final, Never

# What a mutilated pickle makes the unpickler raise.
_MUTILATED: Final = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class PickleError(ValueError):
    """A pickle that is mutilated, or that holds more than data."""


def read_pickle(
    data: bytes, stand_ins: Mapping[str, object], *, encoding: str = "ASCII"
) -> object:
    """Unpickle plain values, and names that the caller admits.

    Args:
        data: the pickle.
        stand_ins: what the file gets for a name, by "module.name".
        encoding: of strings that Python 2 wrote; "bytes" leaves them as bytes.

    Raises:
        PickleError: it is mutilated, or names anything else.
    """
    try:
        return _Unpickler(data, stand_ins, encoding).load()
    except PickleError:
        raise
    except _MUTILATED as error:
        raise PickleError(f"it is mutilated ({error})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, stand_ins: Mapping[str, object], encoding: str
    ) -> None:
        super().__init__(io.BytesIO(data), encoding=encoding)
        self._stand_ins = stand_ins

    def find_class(self, module_name: str, global_name: str) -> object:
        """What the caller has for a name."""
        name = f"{module_name}.{global_name}"
        if name not in self._stand_ins:
            raise PickleError(f"it names {name}, which could run code")
        return self._stand_ins[name]

    def persistent_load(self, pid: object) -> Never:
        """Refuse what is not in the pickle itself."""
        raise PickleError(f"it refers to {pid!r} outside of itself")
