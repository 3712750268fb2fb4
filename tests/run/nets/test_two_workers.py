"""A net that is cut again while it trains ends where it would have without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hocket
from tests.run.support.cut_again_workers import (
    ADAMW,
    NUM_MICROBATCHES,
    make_batches,
    make_model,
    warm_up,
)
from tests.run.support.forked import answers_of


@pytest.mark.parametrize(
    ("cuts", "how"),
    [(("2", "4"), "sequential"), (("4", "1"), "export")],
)
def test_three_steps_cut_again_three_steps(
    cuts: tuple[str, str], how: str, tmp_path: Path
) -> None:
    """Weights, statistics, AdamW's state, schedule and masks follow, in float64.

    Equal to six steps of one process; and only what the other worker lacked was sent.
    """
    answers = answers_of(
        "cut_again_workers:train_cut_again", list(cuts), how, folder=tmp_path
    )
    model = make_model()
    hocket.emulate(
        hocket.Program.chain(range(2), NUM_MICROBATCHES),
        model,
        F.cross_entropy,
        ADAMW,
        make_batches(),
        cut_at=[cuts[1]],
        schedulers=warm_up,
    )
    found = {name: x for answer in answers for name, x in answer["state"].items()}
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = torch.tensor(found[name], dtype=value.dtype)
        torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-12, msg=name)
    first, second = (int(x) for x in cuts)
    per_block = sum(name.startswith("0.") for name in expected)
    moved = [max(0, second - first) * per_block, max(0, first - second) * per_block]
    assert [answer["num_received"] for answer in answers] == moved
