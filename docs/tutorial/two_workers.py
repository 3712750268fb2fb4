"""Step 2: the same loop, with the model's layers on several workers."""

from __future__ import annotations

import torch
from digits import batches, loss, make_model

import hocket

with hocket.Pipeline(
    make_model(),
    loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    example=next(batches()),
    schedule="1f1b",
    num_microbatches=4,
) as pipeline:
    for result in pipeline.train(batches()):
        if pipeline.is_main and result.step % 28 == 27:
            print(f"step {result.step}: loss {result.loss:.4f}")
