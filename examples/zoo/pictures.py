"""Images and their classes, varied by torchvision's transforms.

    [data]
    kind = "function"
    function = "examples.zoo.pictures:stl10"
    path = "stl10_binary"

What becomes of an image in training follows from the seed, the epoch and its row.

Sources: Coates, Lee, Ng, AISTATS 2011 (STL-10); Nilsback and Zisserman, ICVGIP 2008
(flowers).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom

Transform = Callable[[Any], Tensor]
Triple = tuple[float, float, float]
_SEEDS: Final = 2.0**53  # numbers that `EpochRandom.uniform` distinguishes


@dataclass(frozen=True, slots=True)
class Colours:
    """Mean and standard deviation of each channel, of pixels from 0 to 1."""

    mean: Triple
    std: Triple


STL10: Final = Colours((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))
IMAGENET: Final = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, slots=True)
class Pictures:
    """Images by row, as `hocket.run.data.samples.Samples`.

    Args:
        image: reads the image of a row: bytes (3, H, W), or Pillow's.
        labels: (N,), int64; -1 where there is none.
        num_classes: labels are below it.
        colours: to normalise with.
        side: the pixels of a side that all become.
        vary: what training images become before they are normalised.
        plain: the same of images for evaluation.
        fingerprint: 32 bits of the content.
        labelled: where these have no labels, images that have some.
    """

    image: Callable[[int], Any]
    labels: Tensor
    num_classes: int
    colours: Colours
    side: int
    vary: Transform
    plain: Transform
    fingerprint: int
    labelled: Pictures | None = None
    num_channels: int = 3

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.labels)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 3, side, side), float32, normalised."""
        if draw is None:
            found = [self.plain(self.image(row)) for row in rows.tolist()]
        else:
            seeds = (draw.uniform(rows, 1)[:, 0] * _SEEDS).long().tolist()
            found = [
                self._varied(self.image(row), seed)
                for row, seed in zip(rows.tolist(), seeds, strict=True)
            ]
        images = torch.stack(found).as_subclass(Tensor)
        mean, std = [*self.colours.mean], [*self.colours.std]
        return v2.functional.normalize(images, mean, std)

    def _varied(self, image: Any, seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed accelerators, too.
            torch.default_generator.manual_seed(seed)
            return self.vary(image)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.labels[rows]


def accuracy(score_BK: Tensor, label_B: Tensor) -> dict[str, Tensor]:
    """Return the share of samples whose class is predicted correctly."""
    return {"accuracy": (score_BK.argmax(-1) == label_B).float().mean()}


def checked_labels(labels: ArrayLike, num_classes: int, num_images: int) -> Tensor:
    """Return labels as a tensor.

    Raises:
        ValueError: one is out of range, or there are not as many as images.
    """
    found = torch.from_numpy(np.asarray(labels).astype(np.int64, casting="same_kind"))
    wrong = found[(found < 0) | (found >= num_classes)]
    if len(wrong):
        what = f"{int(wrong[0])} is not from 0 to {num_classes - 1}"
        raise ValueError(f"a label, counted from 0: {what}")
    if len(found) != num_images or not num_images:
        raise ValueError(f"{len(found)} labels for {num_images} images")
    return found


def small_images(
    side: int, to: int, shift: int, flip: bool
) -> tuple[Transform, Transform]:
    """Move and mirror small images at random, and scale them then."""
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    if to != side:
        end.append(v2.Resize((to, to), antialias=True))
    moved = [v2.RandomCrop(side, padding=shift)] if shift else []
    mirrored = [v2.RandomHorizontalFlip()] if flip else []
    return v2.Compose([*moved, *mirrored, *end]), v2.Compose(end)


def _large(side: int) -> tuple[Transform, Transform]:
    """Cut photographs out at random, or out of the middle (Szegedy et al., 2014)."""
    begin, end = [v2.ToImage()], [v2.ToDtype(torch.float32, scale=True)]
    cut = [v2.RandomResizedCrop(side, antialias=True), v2.RandomHorizontalFlip()]
    middle = [v2.Resize(round(side * 256 / 224), antialias=True), v2.CenterCrop(side)]
    return v2.Compose([*begin, *cut, *end]), v2.Compose([*begin, *middle, *end])


def stl10(
    path: str,
    side: int = 96,
    shift_pixels: int = 12,
    flip: bool = True,
    unlabeled: bool = False,
) -> tuple[Pictures, Pictures]:
    """STL-10's images for training and for test, which stay in their files.

    Args:
        path: the folder `stl10_binary`.
        side: the pixels of a side that images are scaled to.
        shift_pixels: how far a training image is moved at most.
        flip: whether half of the training images are mirrored.
        unlabeled: train on the images without a label.

    Raises:
        DataError: a file is missing, or holds something else.
    """
    read = partial(_stl10, Path(path), small_images(96, side, shift_pixels, flip), side)
    training, test = read("train", None), read("test", None)
    return (read("unlabeled", training) if unlabeled else training), test


def _stl10(
    folder: Path,
    transforms: tuple[Transform, Transform],
    side: int,
    part: str,
    labelled: Pictures | None,
) -> Pictures:
    file = folder / f"{part}_X.bin"
    try:
        images = _mapped(file)
        labels = torch.full((len(images),), -1)
        if labelled is None:
            numbers = np.fromfile(folder / f"{part}_y.bin", np.uint8)
            labels = checked_labels(numbers.astype(np.int64) - 1, 10, len(images))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} or its labels: {error}: get the binary files of STL-10 from "
            "https://cs.stanford.edu/~acoates/stl10"
        ) from error
    some = images[:: max(1, len(images) // 256)]
    return Pictures(
        partial(_stl10_image, file),
        labels,
        10,
        STL10,
        side,
        *transforms,
        zlib.crc32(some.tobytes(), zlib.crc32(labels.numpy().tobytes())),
        labelled,
    )


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    """(N, 3, column, row): bytes that are read when they are looked at."""
    return np.memmap(path, np.uint8, "r").reshape(-1, 3, 96, 96)


def _stl10_image(path: Path, row: int) -> Tensor:
    return torch.from_numpy(_mapped(path)[row].transpose(0, 2, 1).copy())


def image_folder(
    path: str, side: int = 224, training: str = "train", validation: str = "val"
) -> tuple[Pictures, Pictures]:
    """Images in folders, one per class, as torchvision's ImageFolder reads them.

    Args:
        path: the folder that has the folders of both parts.
        side: the pixels of a side that images are scaled and cut to.
        training: the folder to train on.
        validation: the folder to evaluate on; its classes are among those.

    Raises:
        DataError: a folder is missing, or has no class or no image.
    """
    try:
        first = ImageFolder(Path(path, training))
        second = ImageFolder(Path(path, validation), allow_empty=True)
    except OSError as error:
        raise DataError(
            f"{path}: {error}: images are expected in {training}/CLASS/ and "
            f"{validation}/CLASS/"
        ) from error
    others = sorted({*second.classes} - {*first.classes})
    if others:
        raise DataError(
            f"{path}/{validation} has classes that {training} has not: "
            f"{', '.join(others)}"
        )
    known = [(x, first.class_to_idx[second.classes[y]]) for x, y in second.samples]
    num_classes = len(first.classes)
    return (
        _photographs(first.samples, num_classes, side),
        _photographs(known, num_classes, side),
    )


def _photographs(
    samples: Sequence[tuple[str, int]], num_classes: int, side: int
) -> Pictures:
    paths = [path for path, _ in samples]
    entries = [(Path(x).name, Path(x).stat().st_size, label) for x, label in samples]
    return Pictures(
        partial(_opened, paths),
        torch.tensor([label for _, label in samples]),
        num_classes,
        IMAGENET,
        side,
        *_large(side),
        zlib.crc32(repr(entries).encode()),
    )


def _opened(paths: Sequence[str], row: int) -> Any:
    try:
        return default_loader(paths[row])
    except Exception as error:  # of many kinds, where an image is damaged
        raise DataError(
            f"{paths[row]} cannot be decoded as an image ({error}): mend it, or take "
            "it out of the folder"
        ) from error


def flowers102(
    path: str, side: int = 224, with_validation: bool = True
) -> tuple[Pictures, Pictures]:
    """Oxford's flowers of 102 kinds, for training and for test.

    Args:
        path: a folder with jpg/, imagelabels.mat and setid.mat, or torchvision's root.
        side: as for `image_folder`.
        with_validation: train on the images for validation, too.

    Raises:
        DataError: a file is missing, or holds something else.
    """
    folder = Path(path)
    if (folder / "flowers-102").is_dir():
        folder /= "flowers-102"
    names = ["trnid", "valid"] if with_validation else ["trnid"]
    try:
        return _flowers(folder, names, side), _flowers(folder, ["tstid"], side)
    except Exception as error:  # of many kinds, where a table is damaged
        raise DataError(
            f"{folder} is not Flowers-102 ({type(error).__name__}: {error}): get "
            "jpg/, imagelabels.mat and setid.mat from https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
        ) from error


def _flowers(folder: Path, names: Sequence[str], side: int) -> Pictures:
    from scipy.io import loadmat

    labels = loadmat(folder / "imagelabels.mat")["labels"].ravel().astype(np.int64) - 1
    parts = loadmat(folder / "setid.mat")
    rows = np.concatenate([parts[name].ravel() for name in names]).astype(np.int64) - 1
    checked_labels(rows, len(labels), len(rows))
    classes = checked_labels(labels[rows], 102, len(rows)).tolist()
    files = [str(folder / "jpg" / f"image_{row + 1:05d}.jpg") for row in rows]
    return _photographs(list(zip(files, classes, strict=True)), 102, side)
