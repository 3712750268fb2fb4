"""STL-10: every pixel and label as it was written, every fault with its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.data.images.stl10 import COLOURS, UNLABELED, load_stl10
from hocket.run.data.samples import EpochRandom
from tests.recipes.support.stl10_folder import classes, pixels, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in STL-10's format."""
    write(tmp_path)
    return tmp_path


def test_images_and_labels_are_those_of_the_files(folder: Path) -> None:
    """Rows of an image are rows again, also when asked for out of order."""
    training, test = load_stl10(folder)
    assert (training.num_samples, test.num_samples) == (12, 8)
    assert (training.num_classes, training.class_names[3]) == (10, "cat")
    assert training.labels.tolist() == [label - 1 for label in classes("train")]
    rows = torch.tensor([11, 0, 3, 3])
    expected = torch.from_numpy(pixels("train"))[rows]
    assert torch.equal(training.images(rows), expected)
    assert torch.equal(training.inputs(rows, None), COLOURS.normalised(expected))
    assert torch.equal(training.targets(rows, None), training.labels[rows])
    every = torch.arange(8)
    assert torch.equal(test.images(every), torch.from_numpy(pixels("test")))


def test_images_without_labels_may_be_trained_on(folder: Path) -> None:
    """Their label is -1; the test images keep theirs."""
    training, test = load_stl10(folder, unlabeled=True)
    assert training.labels.tolist() == [UNLABELED] * 7
    assert torch.equal(
        training.images(torch.tensor([6])), torch.from_numpy(pixels("unlabeled"))[6:]
    )
    assert test.labels.min() >= 0


def test_training_images_vary_by_row_and_epoch(folder: Path) -> None:
    """And test images do not, nor does a row differ with the others of its batch."""
    training, _ = load_stl10(folder)
    rows = torch.arange(12)
    first, second = (training.inputs(rows, EpochRandom(0, epoch)) for epoch in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first[3:5], training.inputs(rows[3:5], EpochRandom(0, 0)))
    plain, _ = load_stl10(folder, shift_pixels=0, flip=False, side=48)
    assert plain.inputs(rows, EpochRandom(0, 0)).shape == (12, 3, 48, 48)
    assert torch.equal(plain.inputs(rows, EpochRandom(0, 0)), plain.inputs(rows, None))


def test_fingerprints_follow_the_content(folder: Path) -> None:
    """Equal for equal files, others for one other label or one other pixel."""
    first = load_stl10(folder)[0].fingerprint
    assert load_stl10(folder)[0].fingerprint == first
    (folder / "train_y.bin").write_bytes(bytes([2, *classes("train")[1:]]))
    second = load_stl10(folder)[0].fingerprint
    content = (folder / "train_X.bin").read_bytes()
    (folder / "train_X.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert len({first, second, load_stl10(folder)[0].fingerprint}) == 3


FAULTS: dict[str, tuple[str, Any, str]] = {
    "missing": ("train_X.bin", None, "has no file train_X.bin: STL-10 is expected as"),
    "cut off": ("train_X.bin", bytes(27_649), "has 27649 bytes, which is no multiple"),
    "empty": ("test_X.bin", b"", "has 0 bytes"),
    "too few labels": ("test_y.bin", bytes([1, 2]), "has 2 labels for 8 images"),
    "label 0": (
        "test_y.bin",
        bytes([1, 2, 0, 1, 1, 1, 1, 1]),
        "record 2: label 0 is not from 1",
    ),
    "label 11": (
        "test_y.bin",
        bytes([11] * 8),
        "record 0: label 11 is not from 1 to 10",
    ),
    "names": ("class_names.txt", b"cat\ndog\n", "names 2 classes where 10 are due"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_names_the_file_and_the_way_out(folder: Path, fault: str) -> None:
    """What is wrong, where, what is due, and where the official files are."""
    name, content, message = FAULTS[fault]
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_stl10(folder)
    assert name in str(caught.value)
    assert "get it from https://cs.stanford.edu/~acoates/stl10" in str(caught.value)
