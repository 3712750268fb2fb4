"""One entry per sample is cut, resized and compared like rows of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.model.trace.example import Example
from hocket.model.trace.per_sample import PerSample, num_rows, split_rows, take_rows
from hocket.run.data.batch import count_samples, digest, split_batch


def images(*sizes: int) -> PerSample:
    """Images of different sizes."""
    return PerSample(torch.full((3, size, size), float(size)) for size in sizes)


class Means(nn.Module):
    """Makes rows of a list."""

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([image.mean((1, 2)) for image in images])


class Pixels(nn.Module):
    """As many rows as all images have pixels."""

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.cat([image.flatten(1).T for image in images])


class Positive(nn.Module):
    """As many rows as the data say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


class Mean(nn.Module):
    """One row, whatever there is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True)


class OneAfterTheOther(nn.Module):
    """Opened as calls of its submodules, where it takes a list."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def test_has_rows() -> None:
    """As many as entries, whatever these are."""
    found = images(4, 5, 6)

    assert num_rows(found) == 3
    assert num_rows(PerSample(["a", "b"])) == 2
    assert num_rows([torch.zeros(3)]) is None
    assert [x.shape[1] for x in take_rows(found, torch.tensor([2, 0, 2]))] == [6, 4, 6]
    assert [len(part) for part in split_rows(found, (2, 1))] == [2, 1]


def test_a_batch_is_cut_between_entries() -> None:
    """Together with tensors; each part is a PerSample again."""
    batch = ({"images": images(4, 5, 6), "x": torch.arange(3)}, None)

    first, second = split_batch(batch, 2)

    assert count_samples(batch) == 3
    assert [len(part.leaves[0]) for part in (first, second)] == [2, 1]
    assert second.leaves[1].tolist() == [2]
    assert isinstance(first.leaves[0], PerSample)


def test_alone_it_is_one_argument() -> None:
    """Though a list of arguments is several."""
    (part,) = split_batch((images(4, 5), torch.zeros(2)), 1)

    assert len(part.leaves) == 1


def test_workers_notice_other_entries() -> None:
    """The digest of a batch looks inside."""
    targets = torch.zeros(2)
    digests = {digest((images(a, b), targets)) for a, b in ((4, 5), (5, 4), (4, 4))}

    assert len(digests) == 3


def test_a_model_takes_it_as_a_list() -> None:
    """In as many entries as the microbatch has samples."""
    model = nn.Sequential(Means(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    captured = capture(model, (images(4, 5, 6),))
    stages = cut(captured, (1,))

    for batch in (images(4, 5, 6), images(7, 8)):
        expected = model(batch)
        first = stages[0](batch)

        assert torch.equal(stages[1](*first), expected)
    assert captured.any_batch
    assert Example.of((images(4, 5),), {}).flatten((images(6),), {})


@pytest.mark.parametrize("kind", [nn.Sequential, OneAfterTheOther])
def test_no_cut_where_the_number_of_rows_depends_on_the_entries(
    kind: Callable[..., nn.Module],
) -> None:
    """It was cut anywhere, and the first batch with other entries ended training."""
    parts = (Pixels(), nn.Linear(3, 3), Mean(), nn.Linear(3, 2), nn.Linear(2, 2))
    captured = capture(kind(*parts), (images(4, 5, 6),))

    received = [value for layer in captured.layers for value in layer.received]
    assert {value.shape for value in received} == {(1, 3), (1, 2)}


def test_no_cut_behind_a_module_that_selects_rows() -> None:
    """In a Sequential, which runs on the data where a module looks at them."""
    torch.manual_seed(0)
    parts = (nn.Linear(3, 3), Positive(), nn.Linear(3, 3), Mean(), nn.Linear(3, 2))
    captured = capture(nn.Sequential(*parts), (torch.randn(7, 3),))

    received = [value for layer in captured.layers for value in layer.received]
    assert {value.shape for value in received} == {(7, 3), (1, 3)}
