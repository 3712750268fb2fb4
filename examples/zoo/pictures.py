"""Images and their classes, varied by torchvision's transforms.

    [data]
    kind = "function"
    function = "examples.zoo.pictures:cifar10"
    path = "cifar-10-batches-py"

What becomes of an image in training follows from the seed, the epoch and its row.

Sources: Krizhevsky, "Learning multiple layers of features from tiny images", 2009;
Coates, Lee, Ng, AISTATS 2011 (STL-10); Nilsback and Zisserman, ICVGIP 2008 (flowers).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
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


CIFAR10: Final = Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100: Final = Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
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


def cifar10(
    path: str, side: int = 32, shift_pixels: int = 4, flip: bool = True
) -> tuple[Pictures, Pictures]:
    """CIFAR-10's images for training and for test.

    Args:
        path: the folder `cifar-10-batches-py` of the python version.
        side: the pixels of a side that images are scaled to.
        shift_pixels: how far a training image is moved at most.
        flip: whether half of the training images are mirrored.

    Raises:
        DataError: a file is missing, or holds something else.
    """
    parts = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
    return _cifar(path, parts, b"labels", 10, CIFAR10, side, shift_pixels, flip)


def cifar100(
    path: str,
    side: int = 32,
    shift_pixels: int = 4,
    flip: bool = True,
    coarse: bool = False,
) -> tuple[Pictures, Pictures]:
    """CIFAR-100's; see `cifar10`.

    Args:
        path: the folder `cifar-100-python`.
        side: as for `cifar10`.
        shift_pixels: as for `cifar10`.
        flip: as for `cifar10`.
        coarse: classify the 20 groups of classes, not the 100 classes.
    """
    key, num_classes = (b"coarse_labels", 20) if coarse else (b"fine_labels", 100)
    parts = ["train"], ["test"]
    return _cifar(path, parts, key, num_classes, CIFAR100, side, shift_pixels, flip)


def _cifar(
    path: str,
    parts: tuple[list[str], list[str]],
    key: bytes,
    num_classes: int,
    colours: Colours,
    side: int,
    shift_pixels: int,
    flip: bool,
) -> tuple[Pictures, Pictures]:
    found = []
    for names in parts:
        files = [_cifar_file(Path(path, name), key, num_classes) for name in names]
        images, labels = (torch.cat(x) for x in zip(*files, strict=True))
        digest = zlib.crc32(labels.numpy().tobytes())
        found.append(
            Pictures(
                partial(getitem, images),
                labels,
                num_classes,
                colours,
                side,
                *_small(32, side, shift_pixels, flip),
                zlib.crc32(images.numpy().tobytes(), digest),
            )
        )
    return found[0], found[1]


def _cifar_file(path: Path, key: bytes, num_classes: int) -> tuple[Tensor, Tensor]:
    """Read the images (N, 3, 32, 32) and labels of a file, without running code."""
    try:
        with path.open("rb") as file:
            content = _PlainUnpickler(file, encoding="bytes").load()
        pixels = content[b"data"].astype(np.uint8, casting="no")
        images = torch.from_numpy(pixels).view(-1, 3, 32, 32)
        return images, _checked(content[key], num_classes, len(images))
    except Exception as error:  # a mutilated pickle raises nearly anything
        raise DataError(
            f"{path} is no file of CIFAR's python version ({type(error).__name__}: "
            f"{error}): get it from https://www.cs.toronto.edu/~kriz/cifar.html"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays of numbers; whatever else a file names could run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what numpy's arrays are made by."""
        name = f"{module_name}.{global_name}"
        match name.replace("numpy._core", "numpy.core"):
            case "numpy.core.multiarray._reconstruct" | "numpy.ndarray" | "numpy.dtype":
                return super().find_class(module_name, global_name)
            case "_codecs.encode":
                return _latin_1
            case "__builtin__.bytes":
                return bytes
            case _:
                raise pickle.UnpicklingError(f"it names {name}, which could run code")


def _latin_1(text: str, encoding: str) -> bytes:
    """Encode as pickles of protocol 2 write bytes; other codecs can do anything."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _checked(labels: ArrayLike, num_classes: int, num_images: int) -> Tensor:
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


def _small(side: int, to: int, shift: int, flip: bool) -> tuple[Transform, Transform]:
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
        side: as for `cifar10`.
        shift_pixels: as for `cifar10`.
        flip: as for `cifar10`.
        unlabeled: train on the images without a label.

    Raises:
        DataError: a file is missing, or holds something else.
    """
    read = partial(_stl10, Path(path), _small(96, side, shift_pixels, flip), side)
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
            labels = _checked(numbers.astype(np.int64) - 1, 10, len(images))
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
    _checked(rows, len(labels), len(rows))
    classes = _checked(labels[rows], 102, len(rows)).tolist()
    files = [str(folder / "jpg" / f"image_{row + 1:05d}.jpg") for row in rows]
    return _photographs(list(zip(files, classes, strict=True)), 102, side)
