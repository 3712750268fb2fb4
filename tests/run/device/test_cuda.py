"""The CUDA adapter keeps the promises of the interface; needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.checked import Setting
from bench.gpu.device import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_does_what_the_interface_says(name: str, tmp_path: Path) -> None:
    """Each check of the benchmark holds; its row says what was seen."""
    row = CHECKS[name](Setting(torch.device("cuda:0"), quick=False, folder=tmp_path))

    assert row["holds"], row
