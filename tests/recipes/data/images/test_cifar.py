"""CIFAR: every image and label as it was written; errors name the file."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.data.images.cifar import Cifar, load_cifar10, load_cifar100
from hocket.run.data.samples import EpochRandom
from tests.recipes.support import cifar_folder as folders
from tests.recipes.support.pickles_that_run import Runs
from tests.recipes.support.real_data import real

ADVICE = "get it from https://www.cs.toronto.edu/~kriz/cifar.html"


def raw(samples: Cifar, rows: torch.Tensor) -> torch.Tensor:
    """The bytes that a file holds of some images."""
    return samples.images(rows).flatten(1)


def test_images_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    """In the files' order, also when asked for across files and out of order."""
    training, test = load_cifar10(folders.cifar10(tmp_path))
    written = torch.cat(
        [torch.from_numpy(folders.pixels(4, seed)) for seed in range(5)]
    )

    assert (training.num_samples, test.num_samples) == (20, 4)
    assert training.class_names[3] == "3"
    assert training.num_classes == 10
    assert training.labels.tolist() == [
        (s + i) % 10 for s in range(5) for i in range(4)
    ]
    rows = torch.tensor([19, 0, 7, 7, 12])
    assert torch.equal(raw(training, rows), written[rows])
    assert torch.equal(training.targets(rows, None), training.labels[rows])
    assert torch.equal(
        raw(test, torch.arange(4)), torch.from_numpy(folders.pixels(4, 9))
    )


def test_images_are_normalised_channel_by_channel(tmp_path: Path) -> None:
    """Red, green and blue planes, from 0 to 255, by the published numbers."""
    training, _ = load_cifar10(folders.cifar10(tmp_path))
    images = training.inputs(torch.arange(20), None)
    assert images.shape == (20, 3, 32, 32)
    assert images.dtype == torch.float32
    red = torch.from_numpy(folders.pixels(4, 0))[0, :1024].view(32, 32)
    assert torch.allclose(images[0, 0], (red / 255 - 0.4914) / 0.2470, atol=1e-6)


def test_training_images_vary_by_row_and_epoch(tmp_path: Path) -> None:
    """And test images do not, nor does a row differ with who asks for it."""
    training, test = load_cifar10(folders.cifar10(tmp_path))
    rows = torch.arange(20)
    first, second = (training.inputs(rows, EpochRandom(0, epoch)) for epoch in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first[3:5], training.inputs(rows[3:5], EpochRandom(0, 0)))
    plain, _ = load_cifar10(tmp_path, shift_pixels=0, flip=False)
    assert torch.equal(plain.inputs(rows, EpochRandom(0, 0)), plain.inputs(rows, None))
    assert torch.equal(test.inputs(rows[:4], None), test.inputs(rows[:4], None))


def test_images_may_be_scaled_for_larger_models(tmp_path: Path) -> None:
    """Each pixel becomes several, and in the middle of an image keeps its colour."""
    folders.cifar10(tmp_path)
    plain, _ = load_cifar10(tmp_path, shift_pixels=0, flip=False)
    large, _ = load_cifar10(tmp_path, shift_pixels=0, flip=False, side=96)
    rows = torch.arange(3)

    assert large.inputs(rows, None).shape == (3, 3, 96, 96)
    centres = large.inputs(rows, EpochRandom(0, 0))[:, :, 1::3, 1::3]
    assert torch.allclose(centres, plain.inputs(rows, EpochRandom(0, 0)), atol=1e-5)


def test_a_copy_keeps_no_images(tmp_path: Path) -> None:
    """What only an example needed is let go with it."""
    training, _ = load_cifar10(folders.cifar10(tmp_path))
    other = copy(training)
    other.inputs(torch.arange(4), None)
    assert len(other._kept) == 1
    assert not training._kept
    assert other.fingerprint == training.fingerprint


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    """Equal for equal files, others for one other byte."""
    training, test = load_cifar10(folders.cifar10(tmp_path))
    again, _ = load_cifar10(tmp_path)
    assert training.fingerprint == again.fingerprint != test.fingerprint
    content = folders.batch(4, 2)
    content[b"data"][0, 0] ^= 1
    folders.write(tmp_path / "data_batch_3", content)
    assert load_cifar10(tmp_path)[0].fingerprint != training.fingerprint


def test_files_that_change_while_training_are_noticed(tmp_path: Path) -> None:
    """Their labels have been read before; the images would be of others."""
    training, _ = load_cifar10(folders.cifar10(tmp_path))
    folders.write(tmp_path / "data_batch_1", folders.batch(4, 7))
    with pytest.raises(
        DataError, match="data_batch_1 has changed since it was checked"
    ):
        training.inputs(torch.arange(1), None)


def test_cifar100_has_fine_and_coarse_labels(tmp_path: Path) -> None:
    """One hundred classes in twenty groups."""
    training, test = load_cifar100(folders.cifar100(tmp_path))
    assert training.labels.tolist() == [0, 10, 20, 30, 40]
    assert training.class_names[10] == "fine 10"
    assert test.num_samples == 5
    coarse, _ = load_cifar100(tmp_path, coarse=True)
    assert coarse.labels.tolist() == [0, 1, 2, 3, 4]
    assert coarse.num_classes == len(coarse.class_names) == 20


FAULTS: dict[str, tuple[Any, str]] = {
    "missing": (None, r"has no file data_batch_2: CIFAR-10 is expected as the folder"),
    "empty": (b"", "data_batch_2 is empty"),
    "cut off": (
        b"\x80\x02}q\x00",
        "data_batch_2 is no pickle of plain data: it is mut",
    ),
    "a command": (Runs(os.system, "true"), r"it names posix\.system, which could run"),
    "a list": ([1, 2], "data_batch_2 holds a list, not a dict"),
    "no labels": ({b"data": folders.pixels(2, 0)}, "has no 'labels', only 'data'"),
    "too few labels": (folders.batch(4, 1, labels=[0, 1]), "has 4 images and 2 labels"),
    "label 10": (
        folders.batch(4, 1, labels=[0, 9, 10, 1]),
        "data_batch_2, record 2: label 10 is not from 0 to 9",
    ),
    "label -1": (
        folders.batch(4, 1, labels=[0, -1, 1, 1]),
        "record 1: label -1 is not",
    ),
    "label of text": (
        folders.batch(4, 1, labels=[0, 1, 1, "1"]),
        "record 3: label '1' is not",
    ),
    "images of 28 x 28": (
        folders.batch(4, 1, data=folders.pixels(4, 0)[:, :784].copy()),
        r"'data' has the shape \(4, 784\) where \(N, 3072\) is due",
    ),
    "no images": (
        folders.batch(0, 1),
        r"'data' has the shape \(0, 3072\) where \(N, 3072\) is due, N at least 1",
    ),
    "floats": (
        folders.batch(4, 1, data=folders.pixels(4, 0).astype("float32")),
        "'data' is an array of type 'f4' where unsigned bytes in C order are due",
    ),
    "data of text": (
        folders.batch(4, 1, data=b"x"),
        "'data' is of type bytes, where an ar",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_names_file_record_and_way_out(tmp_path: Path, fault: str) -> None:
    """What is wrong, where, what is due, and where the official files are."""
    content, message = FAULTS[fault]
    path = folders.cifar10(tmp_path) / "data_batch_2"
    match content:
        case None:
            path.unlink()
        case bytes():
            path.write_bytes(content)
        case _:
            folders.write(path, content)
    with pytest.raises(DataError, match=message) as caught:
        load_cifar10(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert ADVICE in str(caught.value)


def test_too_few_class_names_are_refused(tmp_path: Path) -> None:
    """They are counted against the labels that there can be."""
    folders.write(
        folders.cifar10(tmp_path) / "batches.meta", {b"label_names": [b"cat"]}
    )
    with pytest.raises(DataError, match="names 1 classes where 10 are due"):
        load_cifar10(tmp_path)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    """And a file in its place too."""
    with pytest.raises(DataError, match=f"nowhere does not exist: .*{ADVICE}"):
        load_cifar10(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        load_cifar10(tmp_path / "file")


def test_the_real_files_are_read() -> None:
    """Balanced classes, and pixels with the published mean colour."""
    training, test = load_cifar10(real("cifar-10-batches-py"))
    assert (training.num_samples, test.num_samples) == (5000, 1000)
    assert training.class_names[:2] == ("airplane", "automobile")
    assert training.labels.bincount().tolist() == [500] * 10
    images = training.inputs(torch.arange(1000), None)
    assert images.mean((0, 2, 3)).abs().max() < 0.1
    assert (images.std((0, 2, 3)) - 1).abs().max() < 0.1
