"""Reads CIFAR's files, and checks their shapes, types and labels.

Each is a pickled dict: `data`, an array (N, 3072) of bytes, of each image first its red
pixels, then the green, then the blue, row by row; and a list of N labels. A small file
beside them names the classes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hocket.errors import DataError
from hocket.recipes.data.images.image_tensors import Colours
from hocket.recipes.data.images.restricted_pickle import (
    PickledArray,
    PickleError,
    read_arrays,
)
from hocket.recipes.data.origin import DataOrigin

SIDE: Final = 32  # pixels
NUM_CHANNELS: Final = 3
_NOUNS: Final = {PickledArray: "an array", list: "a list"}
_IMAGE_BYTES: Final = NUM_CHANNELS * SIDE * SIDE


@dataclass(frozen=True, slots=True)
class CifarLayout:
    """The files of one variant of CIFAR, and the keys of their dicts.

    Args:
        origin: where to get them.
        training: the files of training images.
        test: the files of test images.
        meta: the file of class names.
        labels: the key of the labels.
        names: the key of the class names.
        num_classes: labels are below it.
        colours: the mean and deviation over the official 50,000 training images.
    """

    origin: DataOrigin
    training: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str
    num_classes: int
    colours: Colours


_URL: Final = "https://www.cs.toronto.edu/~kriz/cifar.html"

CIFAR10: Final = CifarLayout(
    DataOrigin(
        "CIFAR-10",
        _URL,
        "the folder cifar-10-batches-py of the python version, with data_batch_1 to "
        "data_batch_5, test_batch and batches.meta",
    ),
    training=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    meta="batches.meta",
    labels="labels",
    names="label_names",
    num_classes=10,
    colours=Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
CIFAR100: Final = CifarLayout(
    DataOrigin(
        "CIFAR-100",
        _URL,
        "the folder cifar-100-python of the python version, with train, test and meta",
    ),
    training=("train",),
    test=("test",),
    meta="meta",
    labels="fine_labels",
    names="fine_label_names",
    num_classes=100,
    colours=Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)
CIFAR100_COARSE: Final = replace(
    CIFAR100, labels="coarse_labels", names="coarse_label_names", num_classes=20
)


def read(path: Path, layout: CifarLayout) -> tuple[Mapping[str, Any], int]:
    """Return a file's dict and its CRC-32."""
    data = layout.origin.read(path)
    try:
        content = read_arrays(data)
    except PickleError as error:
        raise DataError(
            f"{path} is no pickle of plain data: {error}. {layout.origin.advice}"
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} holds a {type(content).__name__}, not a dict: "
            f"{layout.origin.advice}"
        )
    return {_text(key): value for key, value in content.items()}, zlib.crc32(data)


def _text(name: object) -> str:
    """Decode a name that Python 2 has written as bytes; Python 3 writes text."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def read_images(
    path: Path, content: Mapping[str, Any], layout: CifarLayout
) -> NDArray[np.uint8]:
    """Return (N, 3072): of each image its red bytes, then the green, then the blue."""
    data = _value(path, content, "data", PickledArray, layout)
    try:
        images: NDArray[np.uint8] = data.bytes_array()
    except PickleError as error:
        raise DataError(f"{path}: 'data' is {error}. {layout.origin.advice}") from error
    if images.ndim != 2 or images.shape[1] != _IMAGE_BYTES or not len(images):
        raise DataError(
            f"{path}: 'data' has the shape {images.shape} where (N, {_IMAGE_BYTES}) "
            f"is due, N at least 1. {layout.origin.advice}"
        )
    return images


def read_labels(
    path: Path, content: Mapping[str, Any], layout: CifarLayout, num_images: int
) -> list[int]:
    """Return N classes, each in range."""
    labels: list[int] = _value(path, content, layout.labels, list, layout)
    if len(labels) != num_images:
        raise DataError(
            f"{path} has {num_images} images and {len(labels)} labels: "
            f"{layout.origin.advice}"
        )
    for record, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < layout.num_classes:
            raise DataError(
                f"{path}, record {record}: label {label!r} is not from 0 to "
                f"{layout.num_classes - 1}. {layout.origin.advice}"
            )
    return labels


def read_class_names(path: Path, layout: CifarLayout) -> tuple[str, ...]:
    """Return the classes' names, by label."""
    content, _ = read(path, layout)
    names = _value(path, content, layout.names, list, layout)
    if len(names) != layout.num_classes:
        raise DataError(
            f"{path} names {len(names)} classes where {layout.num_classes} are due: "
            f"{layout.origin.advice}"
        )
    return tuple(map(_text, names))


def _value(
    path: Path, content: Mapping[str, Any], key: str, kind: type, layout: CifarLayout
) -> Any:
    """Return a file's entry, which must exist and be of this kind."""
    if key not in content:
        keys = ", ".join(map(repr, sorted(content))) or "nothing"
        raise DataError(f"{path} has no {key!r}, only {keys}: {layout.origin.advice}")
    if not isinstance(content[key], kind):
        raise DataError(
            f"{path}: {key!r} is of type {type(content[key]).__name__}, where "
            f"{_NOUNS[kind]} is due. {layout.origin.advice}"
        )
    return content[key]
