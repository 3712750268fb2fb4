"""Image folders: classes by names, any size and format; errors name broken ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.data.images.image_folder import ImageFolder, load_image_folder
from hocket.run.data.samples import EpochRandom

Image = pytest.importorskip("PIL.Image")

RED, BLUE = (255, 0, 0), (0, 0, 255)


def paint(
    path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 12)
) -> None:
    """An image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Blue and red images of several sizes and formats."""
    paint(tmp_path / "train/red/a.png", RED)
    paint(tmp_path / "train/red/b.JPG", RED, (9, 31))
    paint(tmp_path / "train/blue/z.bmp", BLUE, (8, 8))
    (tmp_path / "train/blue/notes.txt").write_text("no image")
    paint(tmp_path / "val/red/c.png", RED)
    return tmp_path


def test_classes_are_folders_in_the_alphabet(folder: Path) -> None:
    """Blue before red, in both parts; files of other kinds do not count."""
    training, validation = load_image_folder(folder, side=8)
    assert training.class_names == validation.class_names == ("blue", "red")
    assert [path.name for path in training.paths] == ["z.bmp", "a.png", "b.JPG"]
    assert training.targets(torch.arange(3), None).tolist() == [0, 1, 1]
    assert validation.targets(torch.arange(1), None).tolist() == [1]
    assert (training.num_samples, training.num_classes) == (3, 2)


@pytest.mark.parametrize("draw", [None, EpochRandom(0, 0)])
def test_images_keep_their_colours(folder: Path, draw: EpochRandom | None) -> None:
    """Scaled and cut to one size, normalised with ImageNet's colours."""
    training, _ = load_image_folder(folder, side=8)
    images = training.inputs(torch.arange(3), draw)
    assert images.shape == (3, 3, 8, 8)
    assert images.dtype == torch.float32
    red = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert torch.allclose(images[1], red[:, None, None].expand(3, 8, 8), atol=1e-5)
    assert torch.allclose(images[2], images[1], atol=0.05)  # JPEG is near enough


def gradient(path: Path) -> None:
    """Red grows from left to right, green from top to bottom."""
    rows, columns = np.mgrid[0:40, 0:80]
    pixels = np.stack([columns * 3, rows * 6, rows * 0], axis=-1).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def pixels_of(samples: ImageFolder, draw: EpochRandom | None) -> torch.Tensor:
    """The first image, from 0 to 255."""
    mean, std = (
        torch.tensor(each).view(3, 1, 1)
        for each in (samples.colours.mean, samples.colours.std)
    )
    return (samples.inputs(torch.tensor([0]), draw)[0] * std + mean) * 255


def test_evaluation_takes_the_middle(tmp_path: Path) -> None:
    """224 of 256 parts of the shorter side, as is usual for ImageNet."""
    gradient(tmp_path / "train/x/a.png")
    gradient(tmp_path / "val/x/a.png")
    _, validation = load_image_folder(tmp_path, side=7)
    image = pixels_of(validation, None)
    edge = 40 * 7 / 8  # 8 = ceil(7 * 256 / 224)
    middles = (torch.arange(7) + 0.5) * edge / 7
    assert torch.allclose(image[0, 3], ((80 - edge) / 2 + middles - 0.5) * 3, atol=1.5)
    assert torch.allclose(image[1, :, 3], ((40 - edge) / 2 + middles - 0.5) * 6, atol=2)


def test_training_takes_any_part_and_mirrors_some(tmp_path: Path) -> None:
    """Each epoch another, of 8 to 100 % of the area, about half of them mirrored."""
    gradient(tmp_path / "train/x/a.png")
    gradient(tmp_path / "val/x/a.png")
    training, _ = load_image_folder(tmp_path, side=16)
    mirrored, widths = 0, []
    for epoch in range(60):
        image = pixels_of(training, EpochRandom(0, epoch))
        across = (image[0, :, -1] - image[0, :, 0]).mean().item() / 3
        down = (image[1, -1] - image[1, 0]).mean().item() / 6
        assert down > 0  # never upside down
        mirrored += across < 0
        widths.append(abs(across))
    assert 15 < mirrored < 45
    assert min(widths) > 0.08 * 80 * 0.5
    assert max(widths) > 50
    assert torch.equal(
        training.inputs(torch.tensor([0]), EpochRandom(0, 3)),
        training.inputs(torch.tensor([0]), EpochRandom(0, 3)),
    )


def test_a_broken_image_is_reported_with_its_path(folder: Path) -> None:
    """When a batch asks for it; cut off in the middle, or no image at all."""
    path = folder / "train/red/a.png"
    paint(path, RED, (300, 300))
    path.write_bytes(path.read_bytes()[:200])
    training, _ = load_image_folder(folder, side=8)
    with pytest.raises(DataError, match=r"a\.png cannot be decoded as an image"):
        training.inputs(torch.tensor([1]), None)
    path.write_text("no image")
    with pytest.raises(DataError, match="mend it, or take it out of the folder"):
        training.inputs(torch.tensor([1]), None)


def test_folders_that_do_not_fit_are_refused(folder: Path) -> None:
    """No such part, a class without images, a class that is never trained."""
    with pytest.raises(DataError, match="test is no folder: an image folder is expect"):
        load_image_folder(folder, side=8, validation="test")
    paint(folder / "val/green/a.png", (0, 255, 0))
    with pytest.raises(DataError, match=r"val has classes that .*train has not: green"):
        load_image_folder(folder, side=8)
    (folder / "train/green").mkdir()
    with pytest.raises(DataError, match="train/green has no image"):
        load_image_folder(folder, side=8)
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no folder of a class"):
        load_image_folder(folder, side=8, training="empty")


def test_without_pillow_the_way_out_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'hocket\[vision\]'"):
        load_image_folder(folder, side=8)


def test_fingerprints_follow_names_and_sizes(folder: Path) -> None:
    """Not the content: a million images are not read before training begins."""
    training, validation = load_image_folder(folder, side=8)
    assert training.fingerprint == load_image_folder(folder, side=8)[0].fingerprint
    paint(folder / "train/red/d.png", RED)
    more, same = load_image_folder(folder, side=8)
    assert more.fingerprint != training.fingerprint
    assert same.fingerprint == validation.fingerprint
