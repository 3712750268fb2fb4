"""NASNet-A: two kinds of cells, found by search.

    image ─ conv ─ 2 reduce ─ 4 cells ─ reduce ─ 4 cells ─ reduce ─ 4 cells ─ head

Each cell reads the outputs of the two before it. NASNet-mobile has 4 cells in each
group, and 1056 features. Auxiliary heads and dropped paths are left out. timm has only
the large one, whose number of cells is fixed.

Shapes: B images of S x S pixels, K classes.
Source: Zoph et al., arXiv:1707.07012, figure 4 and appendix A ("4 @ 1056").
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

# What each part of a cell adds up: two operations, each with what it reads. 0: the
# output of the last cell, 1: of that before; 2, 3, ...: this cell's own parts.
_NORMAL: Final = (
    (("5x5", 0), ("3x3", 1)),
    (("5x5", 1), ("3x3", 1)),
    (("mean", 0), ("same", 1)),
    (("mean", 1), ("mean", 1)),
    (("3x3", 0), ("same", 0)),
)
_REDUCTION: Final = (
    (("5x5", 0), ("7x7", 1)),
    (("most", 0), ("7x7", 1)),
    (("mean", 0), ("5x5", 1)),
    (("mean", 2), ("same", 3)),
    (("3x3", 2), ("most", 0)),
)


_EPS: Final = 1e-3


def _branch(name: str, few: int, many: int, stride: int) -> nn.Module:
    """Return an operation by its name: a pool, the same, or a separable convolution."""
    match name:
        case "same":
            return nn.Identity()
        case "mean":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "most":
            return nn.MaxPool2d(3, stride, 1)
        case _:
            side = int(name[0])
            first = _separable(few, many, side, stride)
            return nn.Sequential(first, _separable(many, many, side, 1))


def _separable(few: int, many: int, side: int, stride: int) -> nn.Sequential:
    """Each channel by itself, then all at each pixel."""
    alone = nn.Conv2d(few, few, side, stride, side // 2, groups=few, bias=False)
    together = nn.Conv2d(few, many, 1, bias=False)
    return nn.Sequential(nn.ReLU(), alone, together, nn.BatchNorm2d(many, _EPS))


def _projected(few: int, many: int) -> nn.Sequential:
    """To other channels, at each pixel."""
    convolution = nn.Conv2d(few, many, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(many, _EPS))


class _Halved(nn.Module):
    """Every second pixel, and every second one beside it; half of the channels each."""

    def __init__(self, few: int, many: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(few, many // 2, 1, bias=False)
        self.odd = nn.Conv2d(few, many - many // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(many, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Halve the sides."""
        x = x.relu()
        moved = nn.functional.pad(x, (0, 1, 0, 1))[..., 1:, 1:]
        both = self.even(x[..., ::2, ::2]), self.odd(moved[..., ::2, ::2])
        normal: Tensor = self.norm(torch.cat(both, 1))
        return normal


class _Cell(nn.Module):
    """A cell: outputs of the last two cells to one with 4 or 6 times its width.

    Args:
        channels: those of the last cell, and of that before.
        width: channels of each part.
        reduces: whether its output has half the side of its inputs.
        older: how the output of the cell before the last is: of the same side, larger,
            or raw: not projected.
    """

    def __init__(
        self, channels: tuple[int, int], width: int, *, reduces: bool, older: str
    ) -> None:
        super().__init__()
        self.reduces = reduces
        self.parts = _REDUCTION if reduces else _NORMAL
        self.newer = _projected(channels[0], width)
        kinds = {"same": _projected, "larger": _Halved}
        is_raw = older == "raw"
        self.older = nn.Identity() if is_raw else kinds[older](channels[1], width)
        self.branches = nn.ModuleList()
        for name, source in (side for part in self.parts for side in part):
            stride = 2 if reduces and source < 2 else 1
            few = channels[1] if is_raw and source == 1 else width
            self.branches.append(_branch(name, few, width, stride))
        self.num_channels = (4 if reduces else 6) * width

    def forward(self, newer: Tensor, older: Tensor) -> Tensor:
        """Add up each part, and put parts side by side."""
        known = [self.newer(newer), self.older(older)]
        branches = iter(self.branches)
        for (_, left), (_, right) in self.parts:
            known.append(next(branches)(known[left]) + next(branches)(known[right]))
        return torch.cat(known[3:] if self.reduces else known[1:], 1)


class NasNet(nn.Module):
    """Images (B, 3, S, S) to class scores (B, K); S is 224 in the paper.

    Args:
        data: has `num_classes`, K.
        num_features: what the head reads; 24 times the width of the first cells.
        num_cells: normal cells in each of three groups.
        stem: channels of the first convolution.
    """

    def __init__(
        self,
        data: Any,
        num_features: int = 1056,
        num_cells: int = 4,
        stem: int = 32,
    ) -> None:
        super().__init__()
        first = nn.Conv2d(3, stem, 3, 2, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(stem, 1e-3))
        width, cells = num_features // 24, list[_Cell]()
        one = _Cell((stem, stem), width // 4, reduces=True, older="raw")
        channels, older = (one.num_channels, stem), "larger"
        plan = [(width // 2, True)]
        for group in (1, 2, 4):
            plan += [(group * width, True)] * (group > 1)
            plan += [(group * width, False)] * num_cells
        for own_width, reduces in plan:
            cells.append(_Cell(channels, own_width, reduces=reduces, older=older))
            channels = cells[-1].num_channels, channels[0]
            older = "larger" if reduces else "same"
        self.cells = nn.ModuleList([one, *cells])
        self.head = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(channels[0], data.num_classes)
        )

    def forward(self, image_B3SS: Tensor) -> Tensor:
        """Score images."""
        newer = older = self.stem(image_B3SS)
        for cell in self.cells:
            newer, older = cell(newer, older), newer
        score_BK: Tensor = self.head(newer.relu().mean((2, 3)))
        return score_BK
