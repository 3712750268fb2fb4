"""A model of equal stages whose activations are known to the byte.

    x_TC ──▶ linear ──▶ h_TPC ──▶ sigmoid ──▶ sigmoid ──▶ sigmoid ──▶ sigmoid ──▶ mean
    narrow              wide      keeps 1     keeps 1     keeps 1     keeps 1     narrow

Shape letters: T samples of a microbatch, P positions, C channels. Between stages go C
numbers of each sample; inside there are P times as many. Each sigmoid keeps its own
output for its backward; what is multiplied before it keeps that of the sigmoid before:

    gain     h * g      g's gradient comes with I
    waits    h @ w      w's gradient waits for W, which holds h and dy: 2 wide tensors
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.core.costs import StageCost

NUM_SAMPLES: Final = 4  # in a microbatch
NUM_POSITIONS: Final = 1024
NUM_CHANNELS: Final = 16
_NUM_KEPT: Final = 4  # wide tensors that a block's forward leaves
_NUM_HELD: Final = 2  # of a block's backward, for W, where it waits


class Block(nn.Module):
    """One part of a stage: x_TC -> x_TC.

    Args:
        waits: whether a weight on the wide tensors waits for W.
    """

    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self.waits = waits
        self.narrow = nn.Linear(NUM_CHANNELS, NUM_CHANNELS, bias=False)
        self.first = nn.Parameter(torch.ones(NUM_CHANNELS))
        size = (NUM_CHANNELS, NUM_CHANNELS) if waits else (NUM_CHANNELS,)
        self.second = nn.Parameter(torch.ones(size))
        self.third = nn.Parameter(torch.ones(NUM_CHANNELS))
        self.fourth = nn.Parameter(torch.ones(NUM_CHANNELS))

    def forward(self, x_TC: Tensor) -> Tensor:
        """Four sigmoids on wide tensors, and their mean."""
        h_TPC = self.narrow(x_TC)[:, None].expand(-1, NUM_POSITIONS, -1)
        h_TPC = torch.sigmoid(h_TPC * self.first)
        if self.waits:
            h_TPC = torch.sigmoid(F.linear(h_TPC, self.second))
        else:
            h_TPC = torch.sigmoid(h_TPC * self.second)
        h_TPC = torch.sigmoid(h_TPC * self.third)
        return torch.sigmoid(h_TPC * self.fourth).mean(1)


class Blocks(nn.Module):
    """Equal blocks: `blocks.0`, `blocks.1`, ...

    Args:
        num_blocks: that many.
        waits: as for a block.
    """

    def __init__(self, num_blocks: int, *, waits: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(waits=waits) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one microbatch leaves in one block.

    Args:
        kept: from F until I has ended.
        held: of that and of I, until W has ended.
    """

    kept: int
    held: int

    @classmethod
    def of(cls, *, waits: bool) -> BlockBytes:
        """By the shapes alone."""
        wide = NUM_SAMPLES * NUM_POSITIONS * NUM_CHANNELS * torch.float32.itemsize
        return cls(_NUM_KEPT * wide, _NUM_HELD * wide * waits)

    def cost(self, num_blocks: int) -> StageCost:
        """Of a device's share; an op takes a second, for only the order counts."""
        return StageCost(
            forward_s=1.0,
            input_grad_s=1.0,
            weight_grad_s=1.0,
            activation_bytes=num_blocks * self.kept,
            weight_grad_held_bytes=num_blocks * self.held,
        )


def batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    """The same random batch on every worker."""
    generator = torch.Generator().manual_seed(1)
    shape = num_microbatches * NUM_SAMPLES, NUM_CHANNELS
    return torch.randn(shape, generator=generator), torch.zeros(shape)
