"""Step 3: two schedules beside each other, and a page that shows where time goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from digits import batches, loss, make_model

import hocket
from hocket.draw.html import to_html

config = hocket.PipelineConfig(
    make_model(),
    loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    example=next(batches()),
    num_microbatches=4,
)
for name in ("1f1b", "zb-h1"):
    again = replace(config, model=make_model(), schedule=name)
    with hocket.Pipeline.from_config(again) as pipeline:
        for result in pipeline.train(islice(batches(), 28)):
            last = result
        measured = pipeline.measured()
        if pipeline.is_main:
            predicted = pipeline.predicted
            print(f"{name}: loss {last.loss:.4f}")
            print(f"  predicted bubble {predicted.bubble_fraction:.3f}")
            print(f"  measured bubble  {measured.bubble_fraction:.3f}")
            page = to_html([("predicted", predicted), ("measured", measured)], name)
            Path(f"{name}.html").write_text(page, encoding="utf-8")
