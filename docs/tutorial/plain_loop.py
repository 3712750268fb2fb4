"""Step 1: the loop that everybody writes, in one process."""

from __future__ import annotations

import torch
from digits import batches, loss, make_model

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    optimizer.step()
    if step % 28 == 27:  # the last batch of an epoch
        print(f"step {step}: loss {value.item():.4f}")
