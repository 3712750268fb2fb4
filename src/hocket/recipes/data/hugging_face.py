"""Reads Hugging Face data sets that `datasets.save_to_disk` has written.

Optional: needs `pip install datasets`. Columns become tensors, so they must hold
numbers or lists of numbers of one length: map the data set with your tokenizer first,
and pad.

    load_hugging_face(folder, inputs=("input_ids",), targets=("label",))

Source: https://huggingface.co/docs/datasets (load_from_disk).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom


@dataclass(frozen=True, slots=True)
class HuggingFaceSamples:
    """Rows of a data set's columns.

    Args:
        input_columns: a `datasets.Dataset`; becomes a dict of keyword arguments.
        target_columns: a `datasets.Dataset`; becomes a tensor, or a dict of several.
        where: the folder and part, for messages.
    """

    input_columns: Any
    target_columns: Any
    where: str

    @property
    def num_samples(self) -> int:
        """The number of rows."""
        return len(self.input_columns)

    @property
    def fingerprint(self) -> int:
        """The CRC-32 of the data set's own fingerprint, a hash of how it was made."""
        parts = (self.input_columns, self.target_columns)
        ids = [(part._fingerprint, part.column_names) for part in parts]
        return zlib.crc32(repr((ids, self.num_samples)).encode())

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> dict[str, Tensor]:
        """The input columns by their names, each (B, ...)."""
        del draw
        return self._columns(self.input_columns, rows)

    def targets(
        self, rows: Tensor, draw: EpochRandom | None
    ) -> Tensor | dict[str, Tensor]:
        """The target column (B, ...), or all of them by their names."""
        del draw
        columns = self._columns(self.target_columns, rows)
        return columns if len(columns) > 1 else next(iter(columns.values()))

    def _columns(self, dataset: Any, rows: Tensor) -> dict[str, Tensor]:
        taken = dataset[rows.tolist()]
        return {name: self._tensor(name, taken[name], rows) for name in taken}

    def _tensor(self, name: str, values: Any, rows: Tensor) -> Tensor:
        try:
            return torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self.where}: column {name!r} makes no tensor of rows "
                f"{rows.tolist()[:4]}... ({error}): it must hold numbers, or lists of "
                "numbers of one length; pad it when you map the data set"
            ) from error


def load_hugging_face(
    folder: Path,
    *,
    inputs: tuple[str, ...],
    targets: tuple[str, ...],
    training: str = "train",
    validation: str = "validation",
) -> tuple[HuggingFaceSamples, HuggingFaceSamples]:
    """Load the parts of a saved DatasetDict for training and for validation.

    Args:
        folder: a folder that `save_to_disk` has made.
        inputs: columns that the model takes, by the names of its arguments.
        targets: columns that the loss takes.
        training: the name of the part to train on.
        validation: the name of the part to evaluate on.

    Raises:
        DataError: `datasets` is not installed, or the folder, a part or a column is
            missing.
    """
    parts = _load(folder)
    found = []
    for part in (training, validation):
        where = f"{folder}, part {part!r}"
        if part not in parts:
            raise DataError(
                f"{folder} has no part {part!r}, only {', '.join(map(repr, parts))}: "
                "name the parts to train and to evaluate on"
            )
        dataset = parts[part]
        missing = [
            name for name in (*inputs, *targets) if name not in dataset.column_names
        ]
        if missing or not (inputs and targets):
            raise DataError(
                f"{where} has no column {', '.join(missing) or '(none was named)'}, "
                f"only {', '.join(dataset.column_names)}"
            )
        if not len(dataset):
            raise DataError(f"{where} has no sample")
        found.append(
            HuggingFaceSamples(
                dataset.select_columns(list(inputs)),
                dataset.select_columns(list(targets)),
                where,
            )
        )
    return found[0], found[1]


def _load(folder: Path) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "saved Hugging Face data sets are read by their own package, which is not "
            "installed: pip install datasets"
        ) from error
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} cannot be loaded ({error}): it must be a folder that "
            "DatasetDict.save_to_disk has made"
        ) from error
    if not isinstance(loaded, dict):
        raise DataError(
            f"{folder} holds a single data set without parts: save a DatasetDict with "
            "a part for training and one for validation"
        )
    return dict(loaded)
