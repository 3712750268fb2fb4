"""What optimizers and schedules keep comes back as it was; what cannot is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.errors import CheckpointError
from hocket.run.cluster.store.values import decode, encode, tensor_names

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=4)
        | st.dictionaries(st.integers(), st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    """Through the JSON of a file."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "x", tensors))
    assert set(tensor_names(json.loads(text))) == set(tensors)
    return decode(json.loads(text), lambda name, _: tensors[name])


@given(values)
def test_values_come_back_bit_for_bit(value: Any) -> None:
    """With their types: a tuple is no list, a counter no dict, 1 no True, -0.0 no 0."""
    found = there_and_back(value)
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_tensors_are_named_by_where_they_are() -> None:
    """Two of them, deep in a state."""
    a, b = torch.tensor(1.5), torch.ones(3, dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    encoded = encode({"step": a, "memory": [{"q": (b, 2)}]}, "w", tensors)
    assert tensors.keys() == {"w/step", "w/memory/0/q/0"}
    found = decode(encoded, lambda name, _: tensors[name])
    assert found["step"] is a
    assert found["memory"][0]["q"][0] is b


@pytest.mark.parametrize("value", [print, object(), {1, 2}, b"x", {(1, 2): 3}])
def test_what_a_checkpoint_cannot_hold_is_named(value: Any) -> None:
    """Nothing is pickled, and nothing left out without a word."""
    with pytest.raises(CheckpointError, match="a checkpoint cannot hold"):
        encode({"a": [value]}, "layer.weight", {})
