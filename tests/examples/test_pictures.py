"""Images and classes as they were written; nothing runs, and errors name the file."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom
from tests.recipes.support import cifar_folder, stl10_folder
from tests.recipes.support.flowers_folder import flowers, write_labels
from tests.recipes.support.pickles_that_run import Runs
from tests.recipes.support.real_data import real

pictures: Any = pytest.importorskip("examples.zoo.pictures")
cifar: Any = pytest.importorskip("examples.zoo.cifar")
Image = pytest.importorskip("PIL.Image")

RED, BLUE = (255, 0, 0), (0, 0, 255)
Read = Callable[..., tuple[Any, Any]]


def raw(samples: Any, rows: torch.Tensor) -> torch.Tensor:
    """The bytes of some images."""
    return torch.stack([samples.image(row) for row in rows.tolist()])


def test_cifar10_is_what_the_files_hold(tmp_path: Path) -> None:
    """In their order, across files; normalised by the published numbers."""
    training, test = cifar.cifar10(str(cifar_folder.cifar10(tmp_path)))
    written = torch.cat(
        [torch.from_numpy(cifar_folder.pixels(4, seed)) for seed in range(5)]
    )
    assert (training.num_samples, test.num_samples) == (20, 4)
    assert (training.num_classes, training.num_channels, training.side) == (10, 3, 32)
    rows = torch.tensor([19, 0, 7, 7, 12])
    assert torch.equal(raw(training, rows).flatten(1), written[rows])
    labels = torch.tensor([(s + i) % 10 for s in range(5) for i in range(4)])
    assert torch.equal(training.targets(rows, None), labels[rows])
    images = training.inputs(rows, None)
    assert (images.shape, images.dtype) == ((5, 3, 32, 32), torch.float32)
    assert type(images) is torch.Tensor
    red = written[19, :1024].view(32, 32)
    assert torch.allclose(images[0, 0], (red / 255 - 0.4914) / 0.2470, atol=1e-6)


def test_cifar100_has_fine_and_coarse_labels(tmp_path: Path) -> None:
    """One hundred classes in twenty groups."""
    training, test = cifar.cifar100(str(cifar_folder.cifar100(tmp_path)))
    assert training.labels.tolist() == [0, 10, 20, 30, 40]
    assert (training.num_classes, test.num_samples) == (100, 5)
    coarse, _ = cifar.cifar100(str(tmp_path), coarse=True)
    assert (coarse.num_classes, coarse.labels.tolist()) == (20, [0, 1, 2, 3, 4])


def test_stl10_is_what_the_files_hold(tmp_path: Path) -> None:
    """Rows of an image are rows again; those without labels know some that have."""
    stl10_folder.write(tmp_path)
    training, test = pictures.stl10(str(tmp_path))
    assert (training.num_samples, test.num_samples) == (12, 8)
    rows = torch.tensor([11, 0, 3, 3])
    expected = torch.from_numpy(stl10_folder.pixels("train"))
    assert torch.equal(raw(training, rows), expected[rows])
    assert training.labels.tolist() == [x - 1 for x in stl10_folder.classes("train")]
    more, same = pictures.stl10(str(tmp_path), unlabeled=True)
    assert more.labels.tolist() == [-1] * 7
    assert more.labelled.fingerprint == training.fingerprint
    assert same.fingerprint == test.fingerprint


def read_cifar(folder: Path) -> Read:
    """A small CIFAR-10."""
    return lambda **how: cifar.cifar10(str(cifar_folder.cifar10(folder)), **how)


def stl10(folder: Path) -> Read:
    """A small STL-10."""
    stl10_folder.write(folder)
    return lambda **how: pictures.stl10(str(folder), **how)


@pytest.mark.parametrize("write", [read_cifar, stl10])
def test_training_images_vary_by_row_and_epoch(
    write: Callable[[Path], Read], tmp_path: Path
) -> None:
    """And test images do not, nor does a row differ with the others of its batch."""
    read = write(tmp_path)
    training, _ = read()
    rows, before = torch.arange(8), torch.get_rng_state()
    first, second = (training.inputs(rows, EpochRandom(0, epoch)) for epoch in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first[3:5], training.inputs(rows[3:5], EpochRandom(0, 0)))
    assert torch.equal(before, torch.get_rng_state())
    plain, _ = read(shift_pixels=0, flip=False, side=48)
    assert plain.inputs(rows, None).shape == (8, 3, 48, 48)
    assert torch.equal(plain.inputs(rows, EpochRandom(0, 0)), plain.inputs(rows, None))


def test_an_image_is_moved_and_maybe_mirrored(tmp_path: Path) -> None:
    """By at most so many pixels, black around it; each of the places occurs."""
    training, _ = cifar.cifar10(str(cifar_folder.cifar10(tmp_path)), shift_pixels=1)
    image = training.plain(training.image(0))
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    views = [padded[:, y : y + 32, x : x + 32] for y in range(3) for x in range(3)]
    views += [view.flip(-1) for view in views]
    found = set()
    for seed in range(150):
        varied = training._varied(training.image(0), seed)
        (place,) = [i for i, view in enumerate(views) if torch.equal(varied, view)]
        found.add(place)
    assert found == set(range(18))


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    """Equal for equal files, others for one other byte."""
    training, test = cifar.cifar10(str(cifar_folder.cifar10(tmp_path)))
    again, _ = cifar.cifar10(str(tmp_path))
    assert training.fingerprint == again.fingerprint != test.fingerprint
    content = cifar_folder.batch(4, 2)
    content[b"data"][0, 0] ^= 1
    cifar_folder.write(tmp_path / "data_batch_3", content)
    assert cifar.cifar10(str(tmp_path))[0].fingerprint != training.fingerprint


def batch(**changed: Any) -> dict[bytes, Any]:
    """A file with a fault."""
    return cifar_folder.batch(4, 1, **changed)


FAULTS: Final[dict[str, tuple[Any, str]]] = {
    "missing": (None, "FileNotFoundError"),
    "empty": (b"", "EOFError"),
    "cut off": (b"\x80\x02}q\x00", "Ran out of input"),
    "a command": (Runs(os.system, "true"), r"it names posix\.system, which could run"),
    "a function": (Runs(eval, "1 + 1"), "which could run code"),
    "a codec": (b"c_codecs\nencode\n(Vx\nVzlib\ntR.", "the encoding 'zlib'"),
    "another file": (b"Pelsewhere\n.", "persistent"),
    "a list": ([1, 2], "TypeError"),
    "no labels": ({b"data": cifar_folder.pixels(2, 0)}, "KeyError.*labels"),
    "too few labels": (batch(labels=[0, 1]), "2 labels for 4 images"),
    "label 10": (batch(labels=[0, 9, 10, 1]), "10 is not from 0 to 9"),
    "label -1": (batch(labels=[0, -1, 1, 1]), "-1 is not from 0 to 9"),
    "label of text": (batch(labels=[0, 1, 1, "1"]), "Cannot cast"),
    "smaller images": (batch(data=cifar_folder.pixels(4, 0)[:, :784].copy()), "shape"),
    "no images": (cifar_folder.batch(0, 1), "Cannot cast|0 images"),
    "floats": (
        batch(data=cifar_folder.pixels(4, 0).astype("float32")),
        "Cannot cast.*float32",
    ),
    "objects": (batch(data=np.array([{}], dtype=object)), "Cannot cast"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_cifar_names_the_file(tmp_path: Path, fault: str) -> None:
    """And where the official ones are; whatever a pickle names is not run."""
    content, message = FAULTS[fault]
    path = cifar_folder.cifar10(tmp_path) / "data_batch_2"
    match content:
        case None:
            path.unlink()
        case bytes():
            path.write_bytes(content)
        case _:
            cifar_folder.write(path, content)
    with pytest.raises(DataError, match=message) as caught:
        cifar.cifar10(str(tmp_path))
    assert str(path) in str(caught.value)
    assert "get it from https://www.cs.toronto.edu/~kriz/cifar.html" in str(
        caught.value
    )


@pytest.mark.parametrize("protocol", range(6))
def test_a_command_is_not_run(tmp_path: Path, protocol: int) -> None:
    """Whatever way a pickle has to say it."""
    mark = tmp_path / "mark"
    attack = {b"data": [Runs(os.system, f"touch {mark}")]}
    path = cifar_folder.cifar10(tmp_path) / "test_batch"
    path.write_bytes(pickle.dumps(attack, protocol=protocol))
    with pytest.raises(DataError, match=r"it names posix\.system"):
        cifar.cifar10(str(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_X.bin", None, r"train_X\.bin"),
        ("train_X.bin", bytes(27_649), "reshape"),
        ("test_X.bin", b"", "empty"),
        ("test_y.bin", bytes([1, 2]), "2 labels for 8 images"),
        ("test_y.bin", bytes([1, 2, 0, 1, 1, 1, 1, 1]), "-1 is not from 0 to 9"),
        ("test_y.bin", bytes([11] * 8), "10 is not from 0 to 9"),
    ],
)
def test_a_fault_of_stl10_names_the_file(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    """And where the official ones are."""
    stl10_folder.write(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        pictures.stl10(str(tmp_path))
    assert "https://cs.stanford.edu/~acoates/stl10" in str(caught.value)


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int]) -> None:
    """An image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Blue and red images of several sizes and formats."""
    paint(tmp_path / "train/red/a.png", RED, (20, 12))
    paint(tmp_path / "train/red/b.JPG", RED, (9, 31))
    paint(tmp_path / "train/blue/z.bmp", BLUE, (8, 8))
    (tmp_path / "train/blue/notes.txt").write_text("no image")
    paint(tmp_path / "val/red/c.png", RED, (20, 12))
    return tmp_path


def test_classes_are_those_of_the_training(folder: Path) -> None:
    """Blue before red in both parts; files of other kinds do not count."""
    training, validation = pictures.image_folder(str(folder), side=8)
    assert training.targets(torch.arange(3), None).tolist() == [0, 1, 1]
    assert validation.targets(torch.arange(1), None).tolist() == [1]
    assert training.num_classes == validation.num_classes == 2
    paint(folder / "train/red/d.png", RED, (20, 12))
    more, same = pictures.image_folder(str(folder), side=8)
    assert more.fingerprint != training.fingerprint
    assert same.fingerprint == validation.fingerprint


@pytest.mark.parametrize("draw", [None, EpochRandom(0, 0)])
def test_photographs_keep_their_colours(folder: Path, draw: EpochRandom | None) -> None:
    """Scaled and cut to one size, normalised with ImageNet's colours."""
    training, _ = pictures.image_folder(str(folder), side=8)
    images = training.inputs(torch.arange(3), draw)
    assert (images.shape, images.dtype) == ((3, 3, 8, 8), torch.float32)
    red = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert torch.allclose(images[1], red[:, None, None].expand(3, 8, 8), atol=1e-5)
    assert torch.allclose(images[2], images[1], atol=0.05)  # JPEG is near enough


def test_faults_of_folders_are_named(folder: Path) -> None:
    """No such part, a class that is never trained or has no image, a broken image."""
    with pytest.raises(
        DataError, match=r"images are expected in train/CLASS/ and test"
    ):
        pictures.image_folder(str(folder), validation="test")
    (folder / "train/red/a.png").write_text("no image")
    training, _ = pictures.image_folder(str(folder), side=8)
    with pytest.raises(DataError, match=r"a\.png cannot be decoded.*mend it, or take"):
        training.inputs(torch.tensor([1]), None)
    paint(folder / "val/green/a.png", (0, 255, 0), (4, 4))
    with pytest.raises(DataError, match="val has classes that train has not: green"):
        pictures.image_folder(str(folder))
    (folder / "train/green").mkdir()
    with pytest.raises(DataError, match="Found no valid file for the classes green"):
        pictures.image_folder(str(folder))


def test_flowers_are_read_in_both_forms(tmp_path: Path) -> None:
    """Image n has label n of the row, from 0; torchvision's root has a folder more."""
    path = str(flowers(tmp_path / "flowers-102").parent)
    training, test = pictures.flowers102(path, side=8)
    assert (training.num_samples, test.num_samples) == (8, 4)
    assert training.num_classes == 102
    assert test.targets(torch.arange(4), None).tolist() == [99, 90, 81, 72]
    assert training.inputs(torch.arange(8), EpochRandom(0, 0)).shape == (8, 3, 8, 8)
    some, same = pictures.flowers102(path, side=8, with_validation=False)
    assert some.labels.tolist() == training.labels[:4].tolist()
    assert same.fingerprint == test.fingerprint


def test_faults_of_flowers_are_named(tmp_path: Path) -> None:
    """With where the official ones are to be had."""
    flowers(tmp_path)
    for labels, message in (
        ([103] * 12, "102 is not from 0 to 101"),
        ([1] * 11, "11 is not from 0 to 10"),
    ):
        write_labels(tmp_path, labels)
        with pytest.raises(DataError, match=message):
            pictures.flowers102(str(tmp_path))
    (tmp_path / "imagelabels.mat").write_bytes(b"no table at all")
    with pytest.raises(DataError, match=r"is not Flowers-102.*robots\.ox\.ac\.uk"):
        pictures.flowers102(str(tmp_path))
    shutil.rmtree(tmp_path / "jpg")
    write_labels(tmp_path, [1] * 12)
    with pytest.raises(DataError, match=r"image_00002\.jpg"):
        pictures.flowers102(str(tmp_path))


def test_the_real_cifar_is_read() -> None:
    """Balanced classes, and pixels with the published mean colour."""
    training, test = cifar.cifar10(str(real("cifar-10-batches-py")))
    assert (training.num_samples, test.num_samples) == (5000, 1000)
    assert training.labels.bincount().tolist() == [500] * 10
    images = training.inputs(torch.arange(1000), None)
    assert images.mean((0, 2, 3)).abs().max() < 0.1
    assert (images.std((0, 2, 3)) - 1).abs().max() < 0.1
