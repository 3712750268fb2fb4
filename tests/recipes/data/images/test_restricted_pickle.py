"""Pickles of data are read, and none runs anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.recipes.data.images.restricted_pickle import (
    PickledArray,
    PickleError,
    read_arrays,
)
from tests.recipes.support.pickles_that_run import Runs

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary()
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.binary(), inner),
    max_leaves=10,
)


@given(content=plain, protocol=st.integers(0, 5))
def test_plain_data_are_read(content: Any, protocol: int) -> None:
    """As pickle itself would, whatever the protocol."""
    assert read_arrays(pickle.dumps(content, protocol=protocol)) == content


@given(shape=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_arrays_of_bytes_are_read(shape: tuple[int, int]) -> None:
    """As numpy writes them in the protocol that CIFAR uses."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    content: Any = read_arrays(pickle.dumps({b"data": array}, protocol=2))
    read = content[b"data"]
    assert isinstance(read, PickledArray)
    assert np.array_equal(read.bytes_array(), array)


def test_strings_of_python_2_are_bytes() -> None:
    """What the official files hold: written by hand, as no Python 3 writes it."""
    assert read_arrays(b"\x80\x02}q\x00U\x04dataq\x01U\x02\xff\x00q\x02s.") == {
        b"data": b"\xff\x00"
    }


@pytest.mark.parametrize("protocol", range(6))
def test_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    """The error names what it would have called."""
    mark = tmp_path / "mark"
    attack = Runs(os.system, f"touch {mark}")
    data = pickle.dumps({b"data": [attack]}, protocol=protocol)
    with pytest.raises(PickleError, match=r"it names posix\.system, which could run"):
        read_arrays(data)
    assert not mark.exists()


@pytest.mark.parametrize(
    "attack",
    [
        Runs(eval, "1 + 1"),
        Runs(getattr, "text", "upper"),
        Runs(np.load, "file.npy"),
        Runs(bytearray, b"x"),
        Runs(np.frombuffer, b"x"),
        np.array([{}], dtype=object),
        np.zeros(2, dtype=[("a", "u1")]),
    ],
)
def test_whatever_is_not_data_is_refused(attack: Any) -> None:
    """Built-in functions, others of numpy's, and arrays that could hold objects."""
    data = pickle.dumps({b"data": attack}, protocol=2)
    with pytest.raises(PickleError):  # noqa: PT012 - one of the two refuses it
        content: Any = read_arrays(data)
        content[b"data"].bytes_array()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # BUILD on what stands for numpy.dtype, to change its attributes.
        (b"cnumpy\ndtype\n}b.", "an attempt to change"),
        # _codecs.encode with a codec that decompresses.
        (b"c_codecs\nencode\n(Vx\nVzlib\ntR.", "encoding 'zlib' where Latin-1 is due"),
        # _reconstruct of another class than ndarray.
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\ntR.", "unknown class"),
        # A reference to another file.
        (b"Pelsewhere\n.", "it refers to 'elsewhere' outside of itself"),
        (b"\x80\x02}q\x00", "it is mutilated"),
        (b"", "it is mutilated"),
        (b"no pickle at all", "it is mutilated"),
    ],
)
def test_crafted_and_cut_off_pickles_are_refused(data: bytes, message: str) -> None:
    """In words, whatever the unpickler stumbles over."""
    with pytest.raises(PickleError, match=message):
        read_arrays(data)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), dtype=np.float32),
        np.zeros((2, 3), dtype=np.int8),
        np.asfortranarray(np.zeros((2, 3), dtype=np.uint8)),
    ],
)
def test_other_arrays_are_reported(array: Any) -> None:
    """Their type or order, instead of their bytes taken for pixels."""
    read: Any = read_arrays(pickle.dumps(array, protocol=2))
    with pytest.raises(PickleError, match="where unsigned bytes in C order are due"):
        read.bytes_array()


@given(data=st.binary(max_size=40))
def test_random_bytes_never_do_more_than_fail(data: bytes) -> None:
    """Either data, of Python's or our own types, or a PickleError."""
    try:
        read = read_arrays(data)
    except PickleError:
        return
    assert type(read).__module__ in ("builtins", PickledArray.__module__)
