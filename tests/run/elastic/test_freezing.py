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
        (2, "chosen", "plain", "LayerNorm", "1f1b"),
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
    found = launch_forked(
        ENTRY,
        [shapes, options, norm, schedule],
        num_workers=num_workers,
        run_dir=tmp_path,
    )

    expected, model = emulated(options, norm, [x[0] for x in found[0]["results"]])
    for answer in found:
        frozen, layouts, losses, _ = zip(*answer["results"], strict=True)
        assert list(frozen) == NUM_FROZEN.get(shapes, list(frozen))
        assert {*layouts} <= {"2x1", "1x2"} or list(layouts) == LAYOUTS[shapes]
        assert losses == pytest.approx(expected, rel=1e-10)
        state = answer["state"]
        for name, value in model.state_dict().items():
            got = torch.tensor(state[name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)
    model.eval()
    with torch.no_grad():
        ends = [F.cross_entropy(model(x), y).item() for x, y in make_batches()]
    mean = sum(ends) / len(ends)
    assert found[0]["evaluated"] == pytest.approx(mean, rel=1e-10)


def test_no_process_group_is_made_twice(tmp_path: Path) -> None:
    """None more after 20 changes between 2x1 and 1x2 than after the first two."""
    entry = "tests.run.support.freezing_workers:train_many_layouts"
    for found in launch_forked(entry, num_workers=2, run_dir=tmp_path):
        layouts, groups, threads = zip(*found, strict=True)
        assert layouts == tuple(("2x1", "1x2")[n % 2] for n in range(21))
        assert len({*groups[2:]}) == 1
        assert len({*threads[2:]}) == 1
