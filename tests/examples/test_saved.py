"""Saved Hugging Face data sets, where their package is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import DataError

# The package's own, and those of what it stands on.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def datasets() -> Any:
    """The package; the test is skipped without it."""
    return pytest.importorskip("datasets")


def save(datasets: Any, folder: Path) -> Path:
    """Three padded rows to train on, one to evaluate on."""
    columns: dict[str, list[Any]] = {
        "input_ids": [[1, 2], [3, 4], [5, 0]],
        "attention_mask": [[1, 1], [1, 1], [1, 0]],
        "label": [0, 1, 0],
        "text": ["a b", "c d", "e"],
    }
    first = {name: values[:1] for name, values in columns.items()}
    parts = {
        "train": datasets.Dataset.from_dict(columns),
        "validation": datasets.Dataset.from_dict(first),
    }
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    return folder


def test_columns_become_tensors(datasets: Any, tmp_path: Path) -> None:
    """By the names that the model's arguments have, in any order of rows."""
    folder = save(datasets, tmp_path / "saved")
    columns = "input_ids attention_mask"
    training, validation = saved(datasets, folder, columns)
    inputs = training.inputs(torch.tensor([2, 0]), None)
    assert list(inputs) == ["input_ids", "attention_mask"]
    assert inputs["input_ids"].tolist() == [[5, 0], [1, 2]]
    targets = training.targets(torch.tensor([2, 0, 1]), None)
    assert isinstance(targets, torch.Tensor)
    assert targets.tolist() == [0, 0, 1]
    assert (training.num_samples, validation.num_samples) == (3, 1)
    again, _ = saved(datasets, folder, columns)
    assert again.fingerprint == training.fingerprint != validation.fingerprint


def saved(datasets: Any, folder: Path, inputs: str, **more: str) -> tuple[Any, Any]:
    """Read what was saved; where `datasets` is installed, its reader can be had."""
    assert datasets
    read: Any = import_module("examples.zoo.saved").saved
    found: tuple[Any, Any] = read(str(folder), inputs, "label", **more)
    return found


def test_what_does_not_fit_is_refused(datasets: Any, tmp_path: Path) -> None:
    """A part, a column, text where numbers are due, and a folder of something else."""
    folder = save(datasets, tmp_path / "saved")
    with pytest.raises(DataError, match=r"has no parts 'test' and 'validation'"):
        saved(datasets, folder, "label", training="test")
    with pytest.raises(DataError, match="with the columns words label"):
        saved(datasets, folder, "words")
    samples, _ = saved(datasets, folder, "text")
    with pytest.raises(DataError, match="the columns text make no tensors"):
        samples.inputs(torch.tensor([0]), None)
    with pytest.raises(DataError, match=r"as DatasetDict\.save_to_disk writes them"):
        saved(datasets, tmp_path, "label")
    single = datasets.Dataset.from_dict({"label": [1]})
    single.save_to_disk(str(tmp_path / "single"))
    with pytest.raises(DataError, match=r"as DatasetDict\.save_to_disk writes them"):
        saved(datasets, tmp_path / "single", "label")
