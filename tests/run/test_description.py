"""A pipeline says what it plays."""

from __future__ import annotations

import re

import torch
from torch import nn

from tests.run.support.started import started


def test_a_pipeline_prints_its_plan() -> None:
    """Order, stages and memory of each device, prediction, layout and steps."""
    batch = torch.ones(4, 3), torch.zeros(4, 3)
    pipeline = started(
        nn.Sequential(nn.Linear(3, 3)), nn.functional.mse_loss, torch.optim.SGD, batch
    )
    with pipeline:
        pipeline.step(batch)
        first, device, prediction, last = str(pipeline).splitlines()
        assert repr(pipeline) == "<hocket.Pipeline 1f1b 1x1, step 1>"
        html = pipeline._repr_html_()
        assert repr(pipeline.plan).startswith("<hocket.Plan 1f1b with <hocket.Timeline")
    assert f"<pre>{first}\n{device}" in html
    assert "<svg" in html
    assert first == "1f1b: 1 stage on 1 device, 2 microbatches"
    assert re.fullmatch(r"  device 0: stage 0 \(0\); [\d.]+ B at most", device)
    assert re.fullmatch(r"predicted: [\d.]+ .s a step, bubble 0 %", prediction)
    assert last == "1x1 (devices x replicas), 1 step trained"
