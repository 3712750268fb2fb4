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
NUM_BLOCKS = 66  # of three modules each, and the two around them: 200
WIDTH = 64
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
    guards = hold_guards(arguments.rounds)
    print(guards, flush=True)
    rows.append(guards)
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


class Block(nn.Module):
    """Three modules with a temperature that the training loop may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        return x + torch.tanh(self.inner(x) / self.temperature)


class Deep(nn.Module):
    """200 modules; captured, for it is no `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def hold_guards(num_rounds: int) -> dict[str, Any]:
    """The same step in turn: without guards, with them, and with a change in each."""
    batch = torch.randn(256, WIDTH), torch.randn(256, WIDTH)
    made = {}
    for name in ("without", "guarded", "changing"):
        torch.manual_seed(0)
        model = Deep()
        pipeline = hocket.Pipeline(
            model,
            nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            example=batch,
            num_microbatches=2,
        )
        if name == "without":
            pipeline._followed = ()
        made[name] = model, pipeline
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for i in range(num_rounds + 5):
        for name, (model, pipeline) in made.items():
            if name == "changing":
                block: Any = model.blocks[NUM_BLOCKS // 2]
                block.temperature = 1.0 + i / 100
            begin_s = perf_counter()
            pipeline.step(batch)
            if i >= 5:
                seconds[name].append(perf_counter() - begin_s)
    for _, pipeline in made.values():
        pipeline.close()
    typical = {name: median(found) for name, found in seconds.items()}
    return {
        "num_modules": sum(1 for _ in Deep().modules()),
        **{name: spread(found) for name, found in seconds.items()},
        "guards": round(typical["guarded"] / typical["without"], 4),
        "target_guards": 1.01,
        "changes": round(typical["changing"] / typical["guarded"], 4),
        "target_changes": 1.05,
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
