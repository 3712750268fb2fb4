"""Read a pickle without running anything that it names.

A pickle is a program: it names functions, and has them called. Here each name that
numpy's arrays need stands for a harmless object of ours, and no other is admitted:

    name in the file                     what it gets
    numpy...multiarray._reconstruct      _MakeArray: an empty PickledArray
    numpy.ndarray                        _Ndarray: nothing but a mark
    numpy.dtype                          _MakeType: a PickledType that knows its name
    _codecs.encode                       _Encode: text to bytes, Latin-1 only
    bytes                                _Empty: how protocol 2 writes no bytes at all
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from typing import Any, Final, Never

import numpy as np
from numpy.typing import NDArray

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


def read_arrays(data: bytes) -> object:
    """Read a pickle; strings of Python 2 as bytes, arrays as PickledArray.

    Raises:
        PickleError: it is mutilated, or names anything beside what arrays need.
    """
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except PickleError:
        raise
    except _MUTILATED as error:
        raise PickleError(f"it is mutilated ({error})") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> object:
        """Return our object for a name."""
        name = f"{module_name}.{global_name}"
        if name not in _REPLACEMENTS:
            raise PickleError(f"it names {name}, which could run code")
        return _REPLACEMENTS[name]

    def persistent_load(self, pid: object) -> Never:
        """Refuse what is not in the pickle itself."""
        raise PickleError(f"it refers to {pid!r} outside of itself")


class PickledType:
    """The type of an array's elements, as the file names it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which one byte per element does not have."""


class PickledArray:
    """An array as the file describes it, not yet validated."""

    __slots__ = ("data", "dtype", "fortran", "shape")

    shape: Any
    dtype: Any
    fortran: Any
    data: Any

    def __setstate__(self, state: Iterable[object]) -> None:
        _, self.shape, self.dtype, self.fortran, self.data = state

    def bytes_array(self) -> NDArray[np.uint8]:
        """The array, which must be one of unsigned bytes in C order; a view.

        Raises:
            PickleError: it is another one, or its size is not its shape's.
        """
        if not all(hasattr(self, name) for name in self.__slots__):
            raise PickleError("an array without content")
        name = getattr(self.dtype, "name", None)
        if name not in ("u1", "uint8") or self.fortran:
            raise PickleError(
                f"an array of type {name!r}{' in Fortran order' * bool(self.fortran)} "
                "where unsigned bytes in C order are due"
            )
        shape, data = self.shape, self.data
        if not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise PickleError("an array whose content is not bytes")
        sound = all(type(size) is int and size >= 0 for size in shape)
        if not sound or math.prod(shape) != len(data):
            raise PickleError(f"an array of shape {shape} with {len(data)} bytes")
        return np.frombuffer(data, np.uint8).reshape(shape)


class _Fixed:
    """What a file can name, but not change."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise PickleError("an attempt to change what is not the file's")


class _Ndarray(_Fixed):
    """Stands for numpy.ndarray, which is only named and never called."""

    __slots__ = ()


class _MakeArray(_Fixed):
    __slots__ = ()

    def __call__(self, kind: object, *_: object) -> PickledArray:
        if not isinstance(kind, _Ndarray):
            raise PickleError("an array of an unknown class")
        return PickledArray()


class _MakeType(_Fixed):
    __slots__ = ()

    def __call__(self, name: str | bytes, *_: object) -> PickledType:
        return PickledType(name.decode("ascii") if isinstance(name, bytes) else name)


class _Encode(_Fixed):
    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1" or type(text) is not str:
            raise PickleError(f"text in encoding {encoding!r} where Latin-1 is due")
        return text.encode("latin1")


class _Empty(_Fixed):
    __slots__ = ()

    def __call__(self) -> bytes:
        return b""


_REPLACEMENTS: Final[dict[str, object]] = {
    "numpy.core.multiarray._reconstruct": _MakeArray(),
    "numpy._core.multiarray._reconstruct": _MakeArray(),
    "numpy.ndarray": _Ndarray(),
    "numpy.dtype": _MakeType(),
    "_codecs.encode": _Encode(),
    "__builtin__.bytes": _Empty(),
}
