"""The table of a worker's stages is what the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from tests.run.support.forked import answers_of

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "layers.md"


def printed() -> str:
    """What this worker does for each op of the page's example."""
    example = (torch.zeros(4, 4), torch.zeros(4, 2))
    with hocket.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=example,
        num_microbatches=2,
        schedule="zb-h1",
        clip_norm=1.0,
    ) as pipeline:
        return str(pipeline._executor.player)


def test_the_page_shows_what_workers_do(tmp_path: Path) -> None:
    """Word for word, of both workers."""
    shown = PAGE.read_text("utf-8").partition("What a worker does for each op")[2]
    tables = re.findall(r"```text\n(.*?)\n```", shown, re.DOTALL)
    assert len(tables) == 2
    assert answers_of(f"{__name__}:printed", folder=tmp_path) == tables
