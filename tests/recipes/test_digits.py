"""The digits: a fixed split, the same share of each class, and honest shifts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import datasets

from hocket.recipes.data import BLANK, load_digits, shift, split_rows
from hocket.run.data.samples import EpochRandom


def test_the_split_is_fixed_and_complete() -> None:
    """1797 images, none in both parts, the same parts each time, normalised."""
    train, test = load_digits(0.25, 0.0)
    again, _ = load_digits(0.25, 0.0)

    assert train.num_samples + test.num_samples == 1797
    assert train.images.shape == (1347, 1, 8, 8)
    assert torch.equal(train.images, again.images)
    assert train.images.min() == -1
    assert train.images.max() == 1
    assert train.images.dtype == torch.float32
    assert train.labels.dtype == torch.int64


def test_they_are_those_of_scikit_learn() -> None:
    """Past speed: its file is read without importing it."""
    pixels, classes = datasets.load_digits(return_X_y=True)
    train, test = load_digits(0.25, 0.0)
    rows = split_rows(torch.tensor(classes), 0.25)

    for part, own in zip((test, train), rows, strict=True):
        images = torch.tensor(pixels[own], dtype=torch.float32).view(-1, 1, 8, 8)
        assert torch.equal(part.images, images / 8 - 1)
        assert part.labels.tolist() == classes[own].tolist()


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60).map(torch.tensor),
    test_fraction=st.floats(0.05, 0.95),
)
def test_each_class_is_split_by_the_fraction(
    labels: torch.Tensor, test_fraction: float
) -> None:
    """Every row is in one part, and of each class the rounded share is for test."""
    test, train = split_rows(labels, test_fraction)

    rows = torch.cat([test, train]).sort().values
    assert torch.equal(rows, torch.arange(len(labels)))
    for label in labels.unique():
        num_rows = int((labels == label).sum())
        assert int((labels[test] == label).sum()) == round(test_fraction * num_rows)


def test_shifts_move_whole_images_by_a_pixel() -> None:
    """Each result is the image moved by -1, 0 or 1 in each direction, blank around."""
    images = torch.rand(200, 2, 5, 5)
    moved = shift(images, 1.0, EpochRandom(0, 0).uniform(torch.arange(200), 3))

    padded = torch.full((200, 2, 7, 7), BLANK)
    padded[:, :, 1:-1, 1:-1] = images
    views = [padded[:, :, y : y + 5, x : x + 5] for y in range(3) for x in range(3)]
    equal = torch.stack([(moved == view).flatten(1).all(1) for view in views])
    assert equal.any(0).all()
    assert equal.any(1).all()  # and each of the nine ways occurs


def test_the_probability_decides_who_moves() -> None:
    """None at 0; at one half about half of them, of which a ninth stays in place."""
    images = torch.rand(2000, 1, 4, 4)
    uniform = EpochRandom(0, 0).uniform(torch.arange(2000), 3)

    assert torch.equal(shift(images, 0.0, uniform), images)
    moved = (shift(images, 0.5, uniform) != images).flatten(1).any(1)
    assert abs(moved.float().mean() - 0.5 * 8 / 9) < 0.05


def test_only_training_images_move() -> None:
    """Evaluation sees the data as they are."""
    train, test = load_digits(0.25, 1.0)
    rows = torch.arange(50)
    draw = EpochRandom(seed=0, epoch=0)

    assert not torch.equal(train.inputs(rows, draw), train.inputs(rows, None))
    assert torch.equal(train.targets(rows, draw), train.targets(rows, None))
    assert torch.equal(test.inputs(rows, draw), test.inputs(rows, None))
