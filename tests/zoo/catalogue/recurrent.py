"""Recurrent networks, and a mixture of experts, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch
from torch import Tensor, nn

from tests.model.support.small_models import CASES as SMALL
from tests.model.support.stages_by_hand import Case


class Recurrent(nn.Module):
    """Two layers of GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.gru(x)[0][:, -1]))


class Cells(nn.Module):
    """A loop over time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8))
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        return cast(Tensor, self.head(state[0]))


class StatePassed(nn.Module):
    """Takes its state as an argument, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return self.head(state), state


CASES: Final[dict[str, Callable[[], Case]]] = {
    "gru": lambda: Case(Recurrent(), (torch.randn(4, 5, 6),)),
    "lstm-cells": lambda: Case(Cells(), (torch.randn(4, 5, 6),)),
    "mixture-of-experts": SMALL["experts"],
    "state-passed": lambda: Case(StatePassed(), (torch.randn(4, 6), torch.randn(4, 8))),
}
