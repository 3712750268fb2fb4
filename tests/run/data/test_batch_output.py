"""What a loss reads of the whole batch, in trees of values."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from hocket.run.data.batch import BatchOutput, joined

KEYS = {"a": torch.arange(12.0).view(6, 2)}


def test_own_rows_are_those_of_the_samples() -> None:
    """In the order of the rows."""
    output = BatchOutput(KEYS, torch.tensor([4, 1]))
    assert output.own["a"].tolist() == [[8.0, 9.0], [2.0, 3.0]]


def test_some_samples_have_some_rows_and_all_outputs() -> None:
    """A function over a tree of values sees the rows, as it sees other values."""
    output = BatchOutput(KEYS, torch.arange(2, 5))
    part = pytree.tree_map(lambda leaf: leaf[1:], output)
    assert part.rows.tolist() == [3, 4]
    assert part.all is KEYS


def test_microbatches_of_one_batch_are_joined() -> None:
    """Their outputs are the same tensors; those of another batch are not."""
    first, second = (BatchOutput(dict(KEYS), torch.arange(i, i + 3)) for i in (0, 3))
    assert joined([first, second]).rows.tolist() == [0, 1, 2, 3, 4, 5]
    other = BatchOutput({"a": KEYS["a"].clone()}, torch.arange(3))
    specs = [pytree.tree_structure(x) for x in (first, second, other)]
    assert specs[0] == specs[1] != specs[2]
