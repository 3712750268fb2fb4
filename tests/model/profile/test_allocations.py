"""The allocator's own count of bytes, span by span."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from hocket.model.profile.allocations import allocations

KIB: Final = 1024
DEVICES: Final = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_peaks_and_what_is_left_by_hand(device: torch.device) -> None:
    """Three blocks, two of them at once; one stays. Spans do not see each other's."""

    def block(num_kib: int) -> Tensor:
        return torch.empty(num_kib * KIB, dtype=torch.uint8, device=device)

    before = block(64)
    with allocations(device) as log:
        with log.span():
            first = block(8)
            second = block(32)
            del first
            third = block(16)
            del third
        outside = block(128)
        with log.span():
            del second
        with log.span():
            pass

    assert log.peaks == [48 * KIB, 0, 0]
    assert log.left == [32 * KIB, -32 * KIB, 0]
    assert before.numel() + outside.numel() == 192 * KIB


@pytest.mark.parametrize(
    ("run", "num_blocks"),
    [
        (lambda x: x.exp_(), 0),
        (lambda x: x.exp(), 1),
        (lambda x: torch.softmax(x.exp(), 1), 2),
        (lambda x: x.mT.contiguous() @ x, 2),
    ],
)
def test_an_operator_counts_with_what_it_returns(
    run: Callable[[Tensor], Tensor], num_blocks: int
) -> None:
    """Operators that work on one square, and how many more are there at once."""
    x = torch.randn(256, 256)
    with allocations(torch.device("cpu")) as log, log.span():
        run(x)

    assert log.peaks == [num_blocks * x.nbytes]
    assert log.left == [0]


def test_a_backward_counts_too() -> None:
    """Autograd works on this thread: the gradient, and what a product of it needs."""
    with allocations(torch.device("cpu")) as log:
        x = torch.randn(256, 256, requires_grad=True)
        y = x.exp().sum()
        with log.span():
            y.backward()

    # The gradient of x is new, and what exp() kept is given back behind it.
    assert log.left == [0]
    assert x.nbytes <= log.peaks[0] < 1.01 * x.nbytes


@pytest.mark.parametrize("device", DEVICES)
def test_garbage_of_others_does_not_count(device: torch.device) -> None:
    """A tensor left in a cycle stays until the span is over, many objects later."""
    with allocations(device) as log:
        cycle: list[object] = [torch.empty(KIB, dtype=torch.uint8, device=device)]
        cycle.append(cycle)
        del cycle
        with log.span():
            objects: list[object] = [[] for _ in range(10 * gc.get_threshold()[0])]

    assert len(objects) > 0
    assert log.left == [0]
