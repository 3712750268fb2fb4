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


class LstmStatePassed(nn.Module):
    """The same with two states in a tuple, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h_LBH, c_LBH = (part.transpose(0, 1).contiguous() for part in state)
        y, (h_LBH, c_LBH) = self.lstm(x, (h_LBH, c_LBH))
        return self.head(y[:, -1]), (h_LBH.transpose(0, 1), c_LBH.transpose(0, 1))


class StateKept(nn.Module):
    """`StatePassed`, but for where the state is: it keeps it until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        return cast(Tensor, self.head(self.state))


def lstm_state_passed() -> Case:
    """The state of each sample in its row."""
    state = (torch.randn(4, 2, 8), torch.randn(4, 2, 8))
    return Case(LstmStatePassed(), (torch.randn(4, 5, 6), state))


CASES: Final[dict[str, Callable[[], Case]]] = {
    "gru": lambda: Case(Recurrent(), (torch.randn(4, 5, 6),)),
    "lstm-cells": lambda: Case(Cells(), (torch.randn(4, 5, 6),)),
    "lstm-state-passed": lstm_state_passed,
    "mixture-of-experts": SMALL["experts"],
    "state-kept": lambda: Case(StateKept(), (torch.randn(4, 6),)),
    "state-passed": lambda: Case(StatePassed(), (torch.randn(4, 6), torch.randn(4, 8))),
}
