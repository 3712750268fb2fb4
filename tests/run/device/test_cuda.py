"""The CUDA adapter keeps the promises of the interface; needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.gpu.device import CHECKS, Bench, Row, make_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("check", CHECKS)
def test_a_gpu_does_what_the_interface_says(check: Callable[[Bench], Row]) -> None:
    """Each check of the benchmark holds; its row says what was seen."""
    with make_device(torch.device("cuda:0")) as device:
        row = check(Bench(device))

    assert row["holds"], row
