"""Text as windows of bytes: every byte predicted once, and no file too short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.zoo.text import windows as load_text
from hocket.errors import DataError


def write(folder: Path, text: bytes) -> Path:
    """A text file."""
    path = folder / "some.txt"
    path.write_bytes(text)
    return path


@given(
    text=st.binary(min_size=60, max_size=300),
    window_bytes=st.integers(1, 12),
    validation_fraction=st.floats(0.3, 0.7),
)
def test_windows_say_the_text(
    tmp_path_factory: pytest.TempPathFactory,
    text: bytes,
    window_bytes: int,
    validation_fraction: float,
) -> None:
    """Targets are the inputs one byte later; together they are the file's two parts."""
    path = write(tmp_path_factory.mktemp("text"), text)
    parts = load_text(str(path), window_bytes, validation_fraction)

    cut = len(text) - round(validation_fraction * len(text))
    for windows, part in zip(parts, (text[:cut], text[cut:]), strict=True):
        rows = torch.arange(windows.num_samples)
        inputs, targets = windows.inputs(rows, None), windows.targets(rows, None)
        assert inputs.shape == targets.shape == (windows.num_samples, window_bytes)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        said = bytes(inputs.flatten().tolist())
        assert said == part[: len(said)]
        assert bytes(targets.flatten().tolist()) == part[1 : len(said) + 1]
        assert len(part) - 1 - len(said) < window_bytes  # nothing more fits


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the path as it was looked for."""
    path = tmp_path / "nowhere.txt"
    with pytest.raises(DataError, match=r"nowhere\.txt cannot be read as a file"):
        load_text(str(path), 8, 0.1)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """An error of ours, not one of the operating system."""
    with pytest.raises(DataError, match=r"cannot be read as a file|too short"):
        load_text(str(tmp_path), 8, 0.1)


def test_a_short_file_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """Bytes in the file, in each part, and needed; one more byte is enough."""
    path = write(tmp_path, b"x" * 89)
    message = (
        "of its 89 bytes, 9 are for validation .* for training, and each part "
        r"needs at least 10 \(data.window_bytes 9 and one more\)"
    )
    with pytest.raises(DataError, match=message):
        load_text(str(path), 9, 0.1)
    training, validation = load_text(str(path), 8, 0.1)
    assert (training.num_samples, validation.num_samples) == (9, 1)


def test_an_empty_file_is_too_short(tmp_path: Path) -> None:
    """Not an error about mapping no bytes."""
    with pytest.raises(DataError, match="of its 0 bytes"):
        load_text(str(write(tmp_path, b"")), 8, 0.1)
