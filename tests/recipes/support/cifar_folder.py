"""Small folders in CIFAR's format, written by numpy and pickle as the official ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

IMAGE_BYTES = 3072


def pixels(num_images: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(N, 3072), random."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_images, IMAGE_BYTES), dtype=np.uint8)


def write(path: Path, content: Any) -> None:
    """A pickle of protocol 2, as CIFAR's are."""
    path.write_bytes(pickle.dumps(content, protocol=2))


def cifar10(folder: Path, images_per_file: int = 4) -> Path:
    """A CIFAR-10 of five training files and a test file."""
    write(folder / "batches.meta", {b"label_names": [b"%d" % i for i in range(10)]})
    for number, name in enumerate([f"data_batch_{i}" for i in range(1, 6)]):
        write(folder / name, batch(images_per_file, number))
    write(folder / "test_batch", batch(images_per_file, 9))
    return folder


def batch(num_images: int, seed: int, **changed: Any) -> dict[bytes, Any]:
    """What one file holds; image i of file s is of class (s + i) modulo 10."""
    content: dict[bytes, Any] = {
        b"batch_label": b"a batch",
        b"labels": [(seed + i) % 10 for i in range(num_images)],
        b"data": pixels(num_images, seed),
        b"filenames": [b"%d.png" % i for i in range(num_images)],
    }
    content.update({key.encode(): value for key, value in changed.items()})
    return content


def cifar100(folder: Path, num_images: int = 5) -> Path:
    """A CIFAR-100: fine labels are ten times the coarse ones."""
    meta = {
        b"fine_label_names": [b"fine %d" % i for i in range(100)],
        b"coarse_label_names": [b"coarse %d" % i for i in range(20)],
    }
    write(folder / "meta", meta)
    for seed, name in enumerate(("train", "test")):
        content = batch(num_images, seed)
        coarse = content.pop(b"labels")
        content[b"coarse_labels"] = coarse
        content[b"fine_labels"] = [10 * label for label in coarse]
        write(folder / name, content)
    return folder
