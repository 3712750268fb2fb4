"""Traces of chosen steps by torch's profiler, one of each worker.

python examples/trace_steps.py                                  one worker
torchrun --nproc-per-node 2 examples/trace_steps.py             two

https://ui.perfetto.dev opens `traces/steps-3-4-rank-0.json`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, schedule

import hocket

STEPS = range(3, 5)
FOLDER = Path("traces")


def main() -> None:
    """Train ten steps, and trace two of them."""
    torch.manual_seed(0)  # the same model and data on every worker
    batch = torch.rand(64, 10), torch.rand(64, 1)
    with hocket.Pipeline(
        nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)),
        nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
        example=batch,
        schedule="1f1b",
        num_microbatches=4,
    ) as pipeline:

        def write(traced: profile) -> None:
            """Called when the last chosen step has ended."""
            FOLDER.mkdir(exist_ok=True)
            name = f"steps-{STEPS[0]}-{STEPS[-1]}-rank-{pipeline.world.rank}.json"
            traced.export_chrome_trace(str(FOLDER / name))
            if pipeline.is_main:
                print(f"written: {FOLDER / name}")

        # The step before the chosen ones warms the profiler up.
        chosen = schedule(wait=STEPS[0] - 1, warmup=1, active=len(STEPS), repeat=1)
        with profile(schedule=chosen, on_trace_ready=write) as profiler:
            for _ in pipeline.train([batch] * 10):
                profiler.step()


if __name__ == "__main__":
    main()
