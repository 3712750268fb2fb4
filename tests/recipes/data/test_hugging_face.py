"""Saved Hugging Face data sets, where their package is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.data.hugging_face import load_hugging_face

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
    columns = ("input_ids", "attention_mask")
    training, validation = load_hugging_face(folder, inputs=columns, targets=("label",))
    inputs = training.inputs(torch.tensor([2, 0]), None)
    assert list(inputs) == ["input_ids", "attention_mask"]
    assert inputs["input_ids"].tolist() == [[5, 0], [1, 2]]
    targets = training.targets(torch.tensor([2, 0, 1]), None)
    assert isinstance(targets, torch.Tensor)
    assert targets.tolist() == [0, 0, 1]
    assert (training.num_samples, validation.num_samples) == (3, 1)
    again, _ = load_hugging_face(folder, inputs=columns, targets=("label",))
    assert again.fingerprint == training.fingerprint != validation.fingerprint


def test_what_does_not_fit_is_refused(datasets: Any, tmp_path: Path) -> None:
    """A part, a column, text where numbers are due, and a folder of something else."""
    folder = save(datasets, tmp_path / "saved")
    with pytest.raises(DataError, match="has no part 'test', only 'train', 'validat"):
        load_hugging_face(
            folder, inputs=("label",), targets=("label",), training="test"
        )
    with pytest.raises(
        DataError, match="part 'train' has no column words, only input_"
    ):
        load_hugging_face(folder, inputs=("words",), targets=("label",))
    samples, _ = load_hugging_face(folder, inputs=("text",), targets=("label",))
    with pytest.raises(DataError, match="column 'text' makes no tensor"):
        samples.inputs(torch.tensor([0]), None)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_hugging_face(tmp_path, inputs=("label",), targets=("label",))
    single = datasets.Dataset.from_dict({"label": [1]})
    single.save_to_disk(str(tmp_path / "single"))
    with pytest.raises(DataError, match="holds a single data set without parts"):
        load_hugging_face(tmp_path / "single", inputs=("label",), targets=("label",))


def test_without_the_package_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is optional."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        load_hugging_face(tmp_path, inputs=("a",), targets=("b",))
