"""The CUDA adapter keeps the promises of the interface; needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.checked import Setting
from bench.gpu.device import CHECKS
from bench.gpu.one_worker import batch_on, perceptron, pipeline_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_does_what_the_interface_says(name: str, tmp_path: Path) -> None:
    """Each check of the benchmark holds; its row says what was seen."""
    row = CHECKS[name](Setting(torch.device("cuda:0"), quick=False, folder=tmp_path))

    assert row["holds"], row


def test_no_step_waits_for_the_gpu() -> None:
    """In torch's debug mode a wait is an error; results are read behind the steps."""
    device = torch.device("cuda:0")
    batch = batch_on(device)
    model = perceptron().to(device)
    with pipeline_on(device, model, batch, clip_norm=1.0, ema_decay=0.9) as pipeline:
        results = [pipeline.step(batch) for _ in range(3)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            results += [pipeline.step(batch) for _ in range(4)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses = [result.loss for result in results]
    assert losses == sorted(losses, reverse=True)
