"""Steps of a pipeline alone and with its bubbles filled, in turn.

    python -m bench.fill.run [--rounds 20]

`emulated`: four workers whose layers sleep, so that two cores are enough for them, and
a net to fill with that sleeps. `computing`: two workers that compute, one core each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.emulated.layers import LayerSeconds, numbered_batch
from bench.emulated.rounds import sleeping_pipeline
from bench.measure import alternate, environment, paired_ratio, spread, write_result
from hocket.run.cluster.world import World, join_world
from tests.run.device.support.emulated import sleep_until

RESULTS: Final = Path(__file__).parent / "results"
TARGET: Final = 1.02
NUM_MICROBATCHES: Final = 4
CHANNELS: Final = 64
LAYER: Final = LayerSeconds(forward_s=9e-3, input_grad_s=9e-3, weight_grad_s=9e-3)
FILL_S: Final = 4e-3  # of an emulated forward
WIDTH: Final = 512
NUM_STEPS: Final = 8  # in a row, of either pipeline
NUM_SAMPLES: Final = 10_000_000


def main() -> None:
    """Measure both, and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows = []
    for name, num_workers in (("emulated", 4), ("computing", 2)):
        with tempfile.TemporaryDirectory() as folder:
            found = hocket.launch(
                "bench.fill.run:worker",
                [name, arguments.rounds],
                num_workers=num_workers,
                run_dir=Path(folder),
            )
        rows.append(found[0])
        print(found[0], flush=True)
    result = {"environment": environment(), "target": TARGET, "rows": rows}
    write_result(arguments.output, result)


def worker(name: str, num_rounds: int) -> dict[str, Any]:
    """What each process does: the same row on all."""
    torch.set_num_threads(1)
    with closing(join_world()) as world:
        make = emulated if name == "emulated" else computing
        return measured(name, make, world, num_rounds)


def measured(
    name: str,
    make: Callable[[World, hocket.Fill | None], tuple[hocket.Pipeline, Any]],
    world: World,
    num_rounds: int,
) -> dict[str, Any]:
    """Train both pipelines in turn."""
    alone, batch = make(world, None)
    net = SleepingNet() if name == "emulated" else computing_net()
    size = 1 if name == "emulated" else 16
    fill = hocket.Fill(net, Samples(), _forget, batch_size=size)
    filled, _ = make(world, fill)
    # Several steps: the waits at the end of one go on in the next.
    steps = {
        "alone": lambda: [*alone.train([batch] * NUM_STEPS)],
        "filled": lambda: [*filled.train([batch] * NUM_STEPS)],
    }
    seconds = alternate(steps, world, num_rounds=num_rounds, num_warm=1)
    bubble = alone.measured().bubble_fraction
    each_s = {x: spread([s / NUM_STEPS for s in seconds[x]]) for x in steps}
    per_step = sum(filled.filling.counts)
    found = {
        "case": name,
        "workers": world.world_size,
        **each_s,
        "filled_over_alone": paired_ratio(seconds["filled"], seconds["alone"]),
        "bubble_alone": round(bubble, 4),
        "forwards_per_step": per_step,
        "share_of_bubble": round(_share_filled(filled, alone), 4),
        "predicted_slowdown": round(filled.filling.predicted_slowdown, 4),
        "same_losses": alone.step(batch).loss == filled.step(batch).loss,
    }
    filled.close()
    alone.close()
    return found


def _share_filled(filled: hocket.Pipeline, alone: hocket.Pipeline) -> float:
    """The share of the simulated bubble that the forwards fill."""
    bubbles = filled.filling.predicted.bubble_fraction, alone.predicted.bubble_fraction
    return 1.0 - bubbles[0] / bubbles[1]


def emulated(
    world: World, fill: hocket.Fill | None
) -> tuple[hocket.Pipeline, tuple[Tensor, Tensor]]:
    """A pipeline whose layers sleep, one per worker."""
    batch = numbered_batch(NUM_MICROBATCHES, 2, CHANNELS)
    pipeline = sleeping_pipeline(
        LAYER,
        world.world_size,
        1,
        CHANNELS,
        example=batch,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        fill=fill,
        world=world,
    )
    return pipeline, batch


def computing(world: World, fill: hocket.Fill | None) -> tuple[hocket.Pipeline, Any]:
    """A perceptron whose workers compute."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
    batch = (
        torch.randn(64 * NUM_MICROBATCHES, WIDTH),
        torch.randn(64 * NUM_MICROBATCHES, WIDTH),
    )
    pipeline = hocket.Pipeline(
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.01),
        example=batch,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        cut=["6"],
        fill=fill,
        world=world,
    )
    return pipeline, batch


def computing_net() -> nn.Module:
    """A net whose forward takes half a millisecond or so."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))] * 2
    return nn.Sequential(*layers).eval()


class SleepingNet(nn.Module):
    """A forward that takes its time, and no core."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        sleep_until(time.perf_counter() + FILL_S)
        return x


class Samples:
    """As many samples as any run needs."""

    def __init__(self) -> None:
        self.sample = torch.randn(64)

    def __len__(self) -> int:
        """Return their number."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        """Return one."""
        return self.sample


def _forget(rows: range, output: Tensor) -> None:
    """Keep nothing."""


if __name__ == "__main__":
    main()
