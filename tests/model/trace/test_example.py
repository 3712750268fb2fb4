"""Arguments become numbered leaves, and must keep the example's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.errors import ModelError
from hocket.model.trace.example import Example

X = torch.zeros(4, 3)
MASK = torch.ones(4, 2, dtype=torch.long)
TABLE = torch.zeros(5, 5)


def test_leaves_have_the_names_one_would_write() -> None:
    """Positional ones by number, the others by keyword, then indices."""
    example = Example.of((X, [MASK, 2.0]), {"b": {"k": X}, "a": None})

    assert example.names == ("args[0]", "args[1][0]", "args[1][1]", "b['k']", "a")
    assert example.call()[1]["b"]["k"] is X


def test_only_tensors_with_the_samples_are_batched() -> None:
    """A table and a scalar have no rows to cut."""
    example = Example.of((X, TABLE, torch.tensor(1.0)), {"n": 4})

    assert example.num_samples == 4
    assert example.batched == (True, False, False, False)


def test_resizing_repeats_rows() -> None:
    """Values stay of the kind that the model expects, such as ids in range."""
    ids = torch.arange(8).view(4, 2)

    more = Example.of((ids, TABLE), {}).resized(6)

    assert more.leaves[0].tolist() == ids.tolist() + ids[:2].tolist()
    assert more.leaves[1] is TABLE
    assert more.num_samples == 6


def test_keywords_may_come_in_another_order() -> None:
    """A dict is a dict, however it was filled."""
    example = Example.of((X,), {"a": 1, "b": MASK})

    assert example.flatten((X,), {"b": MASK, "a": 1})[1:] == [1, MASK]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {}, "another structure"),
        ((X,), {"mask": MASK, "n": 3, "more": 1}, "another structure"),
        (
            (X,),
            {"mask": MASK, "n": 4},
            "argument n is 4, but .* with 3, .* as a tensor",
        ),
        ((X,), {"mask": MASK, "n": 3.0}, "argument n is 3.0, but"),
        ((X,), {"mask": 1, "n": 3}, "argument mask is 1, but"),
        (
            (X[:, :2],),
            {"mask": MASK, "n": 3},
            r"args\[0\] is .* \(4, 2\), but",
        ),
        ((X.double(),), {"mask": MASK, "n": 3}, r"args\[0\] is torch.float64"),
    ],
)
def test_another_form_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    """What was fixed by the capture must not change without a word."""
    example = Example.of((X,), {"mask": MASK, "n": 3})

    with pytest.raises(ModelError, match=message):
        example.flatten(args, kwargs)


def test_an_example_needs_a_batch() -> None:
    """Without rows there is nothing to make microbatches of."""
    with pytest.raises(ModelError, match="got int, Tensor"):
        Example.of((3, torch.tensor(1.0)), {})
