"""Begins a model with weights from a folder; never from a pickle, nor the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hocket.errors import DataError

_FILE: Final = "model.safetensors"
_COUNTS: Final = "num_batches_tracked"  # not used by batch norms with a momentum

Weights = dict[str, Tensor]


def load_pretrained(
    model: nn.Module,
    folder: Path,
    *,
    kind: str,
    head: str,
    source: str,
    renamed: Callable[[Weights], Weights] = dict,
) -> None:
    """Load weights from a folder; the head's only if it has as many classes.

    Args:
        model: the model, whose other weights must all be there.
        folder: the folder, with a file `model.safetensors`.
        kind: what the model is, with its article.
        head: how the names of the head's weights begin.
        source: where such a file is to be had.
        renamed: returns the file's weights under the model's names.

    Raises:
        DataError: there are no weights, or their sizes differ.
    """
    if not (folder / _FILE).is_file():
        raise DataError(f"model.pretrained: {folder} has no {_FILE}: {source}")
    try:
        weights = renamed(load_file(folder / _FILE))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"model.pretrained: {folder / _FILE} cannot be read: {error}"
        ) from error
    own = model.state_dict()
    faults = _faults(own, weights, head)
    if faults:
        raise DataError(
            f"model.pretrained: the weights in {folder} do not fit {kind} of the "
            f"recipe's sizes: {'; '.join(faults[:3])}"
        )
    is_head_alike = all(
        name in weights and weights[name].shape == value.shape
        for name, value in own.items()
        if name.startswith(head)
    )
    kept = {
        name: value
        for name, value in weights.items()
        if is_head_alike or not name.startswith(head)
    }
    model.load_state_dict(kept, strict=False)


def _faults(own: Weights, weights: Weights, head: str) -> list[str]:
    """Describe mismatches, but for the head, which is new for other classes."""
    faults = [
        f"no {name!r} in the model"
        for name in sorted({*weights} - {*own})
        if not name.startswith(head)
    ]
    for name, value in own.items():
        if name.startswith(head) or name.endswith(_COUNTS):
            continue
        if name not in weights:
            faults.append(f"no {name!r} in the file")
        elif weights[name].shape != value.shape:
            shapes = tuple(weights[name].shape), tuple(value.shape)
            faults.append(f"{name} is {shapes[0]}, not {shapes[1]}")
    return faults
