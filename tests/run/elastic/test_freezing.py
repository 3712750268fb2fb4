"""Freezing layers while training runs equals one process that does the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.run.support.forked_launch import launch_forked
from tests.run.support.freezing_workers import (
    NUM_STEPS,
    emulated,
    make_batches,
)

ENTRY = "tests.run.support.freezing_workers:train_freezing"
NUM_FROZEN = {
    "fixed": [0, 0, 4, 4, 6, 6, 7, 7, 7],  # two stages keep a block and the head
    "recut": [0, 0, 4, 4, 6, 6, 7, 7, 8],
}
LAYOUTS = {
    "fixed": ["2x1"] * NUM_STEPS,
    "recut": ["4x1"] * 2 + ["2x2"] * 2 + ["1x4"] * 5,
}


@pytest.mark.parametrize(
    ("num_workers", "shapes", "options", "norm", "schedule"),
    [
        (2, "fixed", "plain", "BatchNorm1d", "1f1b"),
        (4, "recut", "plain", "LayerNorm", "1f1b"),
        (4, "recut", "clipped", "LayerNorm", "gpipe"),
    ],
)
def test_equals_one_process(
    tmp_path: Path,
    num_workers: int,
    shapes: str,
    options: str,
    norm: str,
    schedule: str,
) -> None:
    """Losses and weights after 9 steps, with four decisions in between."""
    expected, model = emulated(options, norm, NUM_FROZEN[shapes])

    found = launch_forked(
        ENTRY,
        [shapes, options, norm, schedule],
        num_workers=num_workers,
        run_dir=tmp_path,
    )

    for answer in found:
        frozen, layouts, losses, _ = zip(*answer["results"], strict=True)
        assert list(frozen) == NUM_FROZEN[shapes]
        assert list(layouts) == LAYOUTS[shapes]
        assert losses == pytest.approx(expected, rel=1e-10)
        state = answer["state"]
        for name, value in model.state_dict().items():
            got = torch.tensor(state[name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y).item() for x, y in make_batches()]
    mean = sum(losses) / len(losses)
    assert found[0]["evaluated"] == pytest.approx(mean, rel=1e-10)
