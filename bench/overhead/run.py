"""What the runtime costs the host per op, beside an op that does next to nothing.

    python -m bench.overhead.run

A model of one number per stage makes forward and backward as short as autograd allows.
What a step takes beyond the same calls in a bare loop, divided by the ops of a lane, is
the host's work per op: playing the lane, timing, the ring of last ops; with two workers
also a message in and out, and the wait for the other.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from bench.measure import environment, spread, write_result
from hocket.run.cluster.world import join_world

NUM_MICROBATCHES = 64
RESULTS = Path(__file__).parent / "results"


class Scale(nn.Module):
    """One parameter, one multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The input times the weight."""
        return x * self.weight


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """As short as a loss can be."""
    return (output * targets).mean()


def main() -> None:
    """Measure with one and with two workers, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the workers do; `environment` reports it
    rows = []
    for num_workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.overhead.run:worker",
                [arguments.rounds],
                num_workers=num_workers,
                run_dir=Path(folder),
            )
        rows.append(results[0])
        print(results[0], flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(num_rounds: int) -> dict[str, Any]:
    """Step time of the pipeline and of the bare loop, on this worker."""
    torch.set_num_threads(1)
    world = join_world()
    batch = (torch.ones(NUM_MICROBATCHES, 1), torch.ones(NUM_MICROBATCHES, 1))
    pipeline = hocket.Pipeline(
        nn.Sequential(*(Scale() for _ in range(world.world_size))),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        example=batch,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        world=world,
    )
    bare = _bare_loop(is_last=world.rank == world.world_size - 1)
    whole_s, bare_s = [], []
    for i in range(num_rounds + 5):
        begin = perf_counter()
        pipeline.step(batch)
        middle = perf_counter()
        bare()
        if i >= 5:
            whole_s.append(middle - begin)
            bare_s.append(perf_counter() - middle)
    num_ops = 2 * NUM_MICROBATCHES + 1
    own_us = (median(whole_s) - median(bare_s)) / num_ops * 1e6
    pipeline.close()
    return {
        "num_workers": world.world_size,
        "num_ops_per_lane": num_ops,
        "step": spread(whole_s),
        "bare_loop": spread(bare_s),
        "host_us_per_op": round(own_us, 2),
        "target_us_per_op": 60,
    }


def _bare_loop(*, is_last: bool) -> Any:
    stage = Scale()
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-6)
    x, targets = torch.ones(1, 1), torch.ones(1, 1)
    grad = torch.ones(1, 1)

    def step() -> None:
        for _ in range(NUM_MICROBATCHES):
            out = stage(x.detach().requires_grad_())
            if is_last:
                torch.autograd.backward(loss(out, targets))
            else:
                torch.autograd.backward(out, grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
