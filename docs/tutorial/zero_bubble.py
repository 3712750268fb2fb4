"""Step 3: two schedules beside each other, and a page that shows where time goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from digits import batches, loss, make_model

import hocket
from hocket.draw.html import to_html

ORDERS = ("1f1b", "zb-h1")
config = hocket.PipelineConfig(
    make_model(),
    loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    example=next(batches()),
    num_microbatches=4,
)
for name in ORDERS:
    again = replace(config, model=make_model(), schedule=name)
    with hocket.Pipeline.from_config(again) as pipeline:
        results = list(pipeline.train(islice(batches(), 28)))
        measured, predicted = pipeline.measured(), pipeline.predicted
        if pipeline.is_main:
            usual_s = median(result.seconds for result in results[8:])
            print(f"{name}: loss {results[-1].loss:.4f}")
            print(f"  predicted bubble {predicted.bubble_fraction:.3f}")
            print(f"  measured bubble  {measured.bubble_fraction:.3f}")
            if max(usual_s, measured.step_s) > 1.3 * predicted.step_s:
                expected, usual = f"{predicted.step_s:.4f} s", f"{usual_s:.4f} s"
                print(f"  noisy: a step should take {expected}, and takes {usual}")
            page = to_html([("predicted", predicted), ("measured", measured)], name)
            Path(f"{name}.html").write_text(page, encoding="utf-8")
if pipeline.is_main:
    costs = pipeline.plan.costs  # seconds and bytes of each stage, as measured
    print("both orders, predicted from the same seconds for each op:")
    for name in ORDERS:
        num_devices = pipeline.plan.schedule.program.num_devices
        order = hocket.make_schedule(name, num_devices=num_devices, num_microbatches=4)
        timeline = hocket.simulate(order, costs)
        print(f"  {name}: a step of {1e3 * timeline.makespan_s:.1f} ms, ", end="")
        print(f"bubble {timeline.bubble_fraction:.3f}")
