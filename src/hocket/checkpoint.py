"""Checkpoints outside of a job: what there is, is it whole, take the weights elsewhere.

A pipeline saves and loads by itself (`Pipeline.save`, `Pipeline.load`). These functions
need no pipeline; the first three do not even need torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hocket.run.checkpoint.format.folder import saved as saved
from hocket.run.checkpoint.format.newest import newest as newest
from hocket.run.checkpoint.format.opened import verify as verify

if TYPE_CHECKING:
    from torch import Tensor  # noqa: TID251  (a type, and nothing that is imported)

__all__ = [
    "export",
    "newest",
    "read_weights",
    "saved",
    "verify",
]


def export(
    checkpoint: str | Path,
    target: str | Path,
    format: Literal["safetensors", "hf", "pt", "dcp"] = "safetensors",  # noqa: A002
    *,
    step: int | str = "latest",
    averaged: bool = False,
    max_file_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write a checkpoint's weights for other programs (`run.checkpoint.export`)."""
    from hocket.run.checkpoint import export as exporting

    return exporting.export(
        checkpoint,
        target,
        exporting.WeightFormat(format),
        step=step,
        averaged=averaged,
        max_file_bytes=max_file_bytes,
    )


def read_weights(
    checkpoint: str | Path,
    *,
    step: int | str = "latest",
    averaged: bool = False,
) -> dict[str, Tensor]:
    """A checkpoint's weights and buffers as a state dict, tied ones under all names."""
    from hocket.run.checkpoint import export as exporting

    return exporting.read_weights(checkpoint, step=step, averaged=averaged)
