"""A data set whose samples say which row they are, and who reads what of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hocket.run.data.samples import EpochRandom


@dataclass(frozen=True)
class Numbered:
    """Inputs (B, 6), float64, that begin with their row; targets of three classes.

    Args:
        num_samples: how many.
        fingerprint: as if of the content.
        noise: of the varied inputs.
        read: every reading, as the side and the rows, in this process.
    """

    num_samples: int
    fingerprint: int = 7
    noise: float = 0.1
    read: list[tuple[str, list[int]]] = field(default_factory=list)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Each row's own numbers."""
        self.read.append(("inputs", rows.tolist()))
        own = torch.sin(rows[:, None] * torch.arange(1, 7, dtype=torch.float64))
        own[:, 0] = rows
        return own if draw is None else own + self.noise * draw.uniform(rows, 6)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """The row modulo three."""
        self.read.append(("targets", rows.tolist()))
        return rows % 3
