"""Predictions beside published measurements: the right size, not the right digits."""

from __future__ import annotations

import pytest
import torch

from examples.zoo.text import Gpt
from hocket.core.hardware import load_catalogue
from hocket.model.capture.capture import capture
from hocket.model.profile.work import counted_work
from hocket.recipes.models.make import Blocks

NUM_BLOCKS = 3  # of theirs: all compute the same

# hidden size, heads, tokens, microbatch, device, precision, TFLOP/s per device
CASES = {
    "Megatron-LM 1.7B, A100 (arXiv:2104.04473, table 1)": (
        (2304, 24, 2048, 4),
        ("a100-80g", "float16"),
        137.0,
    ),
    "Megatron-LM 1.2B, V100 (arXiv:1909.08053, abstract)": (
        (1536, 16, 1024, 8),
        ("v100-32g", "float16"),
        39.0,
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_gpt_computes_about_as_fast_as_was_measured(name: str) -> None:
    """Within a third, with the forward counted twice, as they recompute it."""
    (width, num_heads, window, size), (device, precision), wanted = CASES[name]
    with torch.device("meta"):
        model = Gpt(
            window_bytes=window, blocks=Blocks(width, NUM_BLOCKS, num_heads, 4 * width)
        )
        batch = torch.randint(0, 256, (2, window))
    captured = capture(model, (batch,))
    hardware = load_catalogue().device(device)
    work = counted_work(captured, hardware, {}, precision=precision)
    layers = work.layers(size)
    seconds = sum(2 * layer.forward_s + layer.backward_s for layer in layers)
    flops = sum(
        2 * ops.forward.total_flops(size) + ops.backward.total_flops(size)
        for ops in work.ops
    )
    published = 96 * size * window * NUM_BLOCKS * width**2 * (1 + window / (6 * width))
    assert flops == pytest.approx(published, rel=0.05)
    assert flops / seconds / 1e12 == pytest.approx(wanted, rel=0.33)
