"""CIFAR-10 and CIFAR-100, from the files of their python version.

    [data]
    kind = "function"
    function = "examples.zoo.cifar:cifar10"
    path = "cifar-10-batches-py"

The files are pickles: one that could run code is refused.

Source: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import pickle
import zlib
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from examples.zoo.pictures import Colours, Pictures, checked_labels, small_images
from hocket.errors import DataError

CIFAR10: Final = Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100: Final = Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


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
                *small_images(32, side, shift_pixels, flip),
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
        return images, checked_labels(content[key], num_classes, len(images))
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
