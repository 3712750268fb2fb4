"""What is cut belongs to samples, without a doubt; anything else is refused by name.

Lists went to every microbatch whole, and the weights were 5 to 12 % off; a mask over as
many positions as there were samples was cut, 3.5 % off.
"""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hocket.errors import DataError, ModelError
from hocket.model.trace.example import Example
from hocket.model.trace.per_sample import PerSample, Shared, unshared
from hocket.run.data.batch import count_samples, digest, split_batch, whole
from hocket.run.data.cut_checks import refuse_shared

X = torch.arange(12.0).view(4, 3)
LABELS = torch.arange(4)
RAGGED = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (X, [1, 2, 3, 4], "targets is a list of 4 entries"),
        (X, ("a", "b", "c", "d"), "targets is a tuple of 4 entries"),
        (X, X.tolist(), "targets is a list of 4 entries"),
        (X, {"y": LABELS, "texts": [*"abcd"]}, r"targets\['texts'\] is a list of 4"),
        (X, [X.T.tolist(), 1], r"targets\[0\]\[0\] is a list of 4 entries"),
        (X, [X[0], X[1], X[2], X[3]], "targets is a list of 4 entries"),
        (X, [{"boxes": X} for _ in range(4)], "targets is a list of 4 entries"),
        (X, range(4), "targets is a range of 4 entries"),
        ({"x": X, "sizes": [3, 3, 3, 3]}, LABELS, "sizes is a list of 4 entries"),
        ((X, {"k": [3, 3, 3, 3]}), LABELS, r"args\[1\]\['k'\] is a list of 4"),
        (X, SimpleNamespace(y=LABELS), "targets is a SimpleNamespace, which holds"),
        (X, [{"boxes": X[:1]}, {"boxes": X[:2]}], "args.0. has 4, targets.0..'boxes'."),
        ((X, torch.zeros(1, 3)), LABELS, r"args\[0\] has 4, args\[1\] has 1, targets "),
        ((X, X.to_sparse()), LABELS, r"args\[1\] is a sparse_coo tensor"),
        ((X, Shared(X.to_sparse())), LABELS, r"args\[1\] is a sparse_coo tensor"),
        (RAGGED, LABELS, r"args\[0\] is a nested"),
    ],
)
def test_what_may_be_cut_in_two_ways_is_refused(
    inputs: Any, targets: Any, message: str
) -> None:
    """By its name, with both ways out."""
    with pytest.raises(DataError, match=message) as caught:
        split_batch((inputs, targets), 2)

    assert "hocket.PerSample" in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (PerSample([1, 2, 3, 4]), ([1, 2], [3, 4])),
        (np.arange(4), ([0, 1], [2, 3])),
        (np.array(["a", "b", "c", "d"]), (["a", "b"], ["c", "d"])),
        ([0.5, 0.25], ([0.5, 0.25], [0.5, 0.25])),
        (Shared([1, 2, 3, 4]), ([1, 2, 3, 4], [1, 2, 3, 4])),
        (Shared(np.arange(4)), ([0, 1, 2, 3], [0, 1, 2, 3])),
        (None, (None, None)),
        (np.float64(2), (2, 2)),
        (0.5, (0.5, 0.5)),
    ],
)
def test_what_is_clear_is_cut_or_shared(targets: Any, parts: tuple[Any, Any]) -> None:
    """An array is cut as a tensor is; numbers and lists of another length are not."""
    found = [unshared(part.targets) for part in split_batch((X, targets), 2)]

    assert [x.tolist() if hasattr(x, "tolist") else x for x in found] == list(parts)


def test_a_structure_of_as_many_arguments_as_samples() -> None:
    """Its entries have rows of their own, and differ in form."""
    x, labels, scores = X[:2], LABELS[:2], X[:2] / 2

    first, second = split_batch((x, (labels, scores)), 2)
    _, last = split_batch((x, [labels, 0.5]), 2)

    assert first.targets[0].tolist() == [0]
    assert second.targets[1].tolist() == scores[1:].tolist()
    assert last.targets[1] == 0.5


def test_one_microbatch_is_no_cut() -> None:
    """Its samples are all there, whatever they are in."""
    (part,) = split_batch((X, [1, 2, 3, 4]), 1)

    assert part.targets == [1, 2, 3, 4]


def test_a_mapping_is_a_dict() -> None:
    """As `BatchEncoding` of transformers is one by its methods alone."""
    batch = UserDict({"x": X, "inner": UserDict({"y": X + 1})}), UserDict(y=LABELS)

    first, second = split_batch(batch, 2)

    assert count_samples(batch) == 4
    assert [x.shape[0] for x in first.leaves] == [2, 2]
    assert second.targets["y"].tolist() == [2, 3]
    assert digest(batch) != digest((UserDict({"x": X}), UserDict(y=LABELS + 1)))


def test_what_is_shared_is_given_as_it_is() -> None:
    """Also of a structure, and in the digest that workers compare."""
    batch = ((X, Shared({"mask": X, "n": [1, 2]})), Shared(X))

    first, second = split_batch(batch, 2)

    assert first.leaves[1] is X
    assert first.leaves[2:] == second.leaves[2:] == (1, 2)
    assert first.shared == {1, 2, 3}
    assert whole(batch)[0][1]["n"] == [1, 2]
    assert digest(batch) != digest(((X, Shared({"mask": X + 1, "n": [1, 2]})), X))


def test_the_example_says_what_is_shared() -> None:
    """In each batch alike, with one shape."""
    example = Example.of((X, Shared(X)), {})

    assert example.batched == (True, False)
    assert example.resized(6).leaves[1] is X
    for given, message in (
        ((X, X), r"args\[1\] is torch.float32 of shape \(4, 3\), and in the example"),
        ((Shared(X), Shared(X)), r"args\[0\] is Shared\(.*\), and in the example"),
        ((X, Shared(X[:2])), "what is Shared keeps its shape"),
    ):
        with pytest.raises(ModelError, match=message):
            example.flatten(given, {})


class Mixes(nn.Module):
    """Mixes four positions by a mask, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(4)
        self.num_calls = 0

    def forward(self, x: Tensor, mask: Tensor, more: Any = None) -> Tensor:
        self.num_calls += 1
        out = self.norm(mask @ self.a(x))
        return out if more is None else out + more[:, None]


class Attends(nn.Module):
    """Leaves out words of each sample by its own row of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.a(x) * mask[..., None]


BATCH = torch.arange(48.0).view(4, 4, 3).sin()
LOWER = torch.ones(4, 4).tril()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ((BATCH, LOWER), r"args\[1\]"),
        ((BATCH, LOWER, LOWER[1]), r"args\[1\] and args\[2\]"),
    ],
)
def test_a_mask_over_as_many_positions_is_refused(args: Any, names: str) -> None:
    """The model tells that its rows are no samples, and stays as it is."""
    model = Mixes().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}

    with pytest.raises(DataError, match=f"first dimension of {names} is the batch's"):
        refuse_shared(model, args, {})

    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert model.training
    assert not model.num_calls


@pytest.mark.parametrize("mask", [LOWER, torch.ones(4, 4), LOWER.bool()])
def test_a_row_for_each_sample_passes(mask: Tensor) -> None:
    """A padding mask of texts with as many words as there are samples."""
    refuse_shared(Attends(), (BATCH, mask), {})


def test_what_is_shared_by_name_passes() -> None:
    """It is not cut."""
    refuse_shared(Mixes(), (BATCH, Shared(LOWER)), {})
