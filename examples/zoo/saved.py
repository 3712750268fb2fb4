"""Data sets of Hugging Face that `DatasetDict.save_to_disk` has written.

    [data]
    kind = "function"
    function = "examples.zoo.saved:saved"
    path = "folder"
    inputs = "input_ids attention_mask"
    targets = "label"

Columns become tensors, so they must hold numbers or lists of numbers of one length: map
the data set with your tokenizer first, and pad.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from datasets import load_from_disk
from torch import Tensor

from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom


@dataclass(frozen=True, slots=True)
class SavedSamples:
    """Rows of a data set's columns.

    Args:
        input_columns: become a dict of keyword arguments.
        target_columns: become a tensor, or a dict of several.
    """

    input_columns: Any
    target_columns: Any

    @property
    def num_samples(self) -> int:
        """The number of rows."""
        return len(self.input_columns)

    @property
    def fingerprint(self) -> int:
        """The CRC-32 of the data set's own fingerprint, a hash of how it was made."""
        parts = self.input_columns, self.target_columns
        ids = [(part._fingerprint, part.column_names) for part in parts]
        return zlib.crc32(repr(ids).encode())

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> dict[str, Tensor]:
        """The input columns by their names, each (B, ...)."""
        del draw
        return _tensors(self.input_columns, rows)

    def targets(
        self, rows: Tensor, draw: EpochRandom | None
    ) -> Tensor | dict[str, Tensor]:
        """The target column (B, ...), or all of them by their names."""
        del draw
        columns = _tensors(self.target_columns, rows)
        return columns if len(columns) > 1 else next(iter(columns.values()))


def _tensors(columns: Any, rows: Tensor) -> dict[str, Tensor]:
    found = columns.with_format("torch")[rows.tolist()]
    if wrong := [name for name in found if not isinstance(found[name], Tensor)]:
        raise DataError(
            f"the columns {', '.join(wrong)} make no tensors: they must hold numbers, "
            "or lists of numbers of one length; pad them when you map the data set"
        )
    return {name: found[name] for name in columns.column_names}


def saved(
    path: str,
    inputs: str,
    targets: str,
    training: str = "train",
    validation: str = "validation",
) -> tuple[SavedSamples, SavedSamples]:
    """Load the parts of a saved DatasetDict for training and for validation.

    Args:
        path: a folder that `save_to_disk` has made.
        inputs: columns that the model takes, by the names of its arguments.
        targets: columns that the loss takes.
        training: the name of the part to train on.
        validation: the name of the part to evaluate on.

    Raises:
        DataError: the folder, a part or a column is missing.
    """
    try:
        parts: Any = load_from_disk(path)
        first, second = (
            SavedSamples(
                parts[part].select_columns(inputs.split()),
                parts[part].select_columns(targets.split()),
            )
            for part in (training, validation)
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} has no parts {training!r} and {validation!r} with the columns "
            f"{inputs} {targets}, as DatasetDict.save_to_disk writes them: {error}"
        ) from error
    return first, second
