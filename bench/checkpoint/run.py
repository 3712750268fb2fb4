"""What saving a model of 500 MB takes, before training goes on and altogether.

    python -m bench.checkpoint.run

A transformer whose float32 weights take 500 MB is trained with AdamW, which keeps twice
as much beside them, on one worker and on two. Each round trains a step, saves, and
trains another. Blocking: the whole save is in the way. In the background: only the copy
is, and the steps meanwhile share the cores with the writer. Loading is timed as well.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.measure import environment, spread, write_result
from bench.models import Block
from hocket.run.cluster.world import World, join_world

WIDTH = 1024
NUM_BLOCKS = 10  # of that width 12 * 1024**2 weights each: 50 MB
NUM_TOKENS = 128
BATCH_SIZE = 4
NUM_MICROBATCHES = 4
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure on one and on two workers, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, default=WIDTH, help="less for a try")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows = []
    for num_workers in (1, 2):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            results = hocket.launch(
                "bench.checkpoint.run:worker",
                [arguments.rounds, folder, arguments.width],
                num_workers=num_workers,
                run_dir=Path(folder),
                timeout_s=300.0,
            )
        rows.append(row(results))
        print(rows[-1], flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def row(results: list[Any]) -> dict[str, Any]:
    """The slowest worker's seconds of each round, and what follows from them."""
    seconds = {
        name: [max(part["seconds"][name][i] for part in results) for i in range(count)]
        for name, values in results[0]["seconds"].items()
        for count in [len(values)]
    }
    saved_bytes = results[0]["saved_bytes"]
    step_s = median(seconds["step"])
    in_the_way_s = median(seconds["background_call"])
    return {
        "num_workers": len(results),
        "model_bytes": results[0]["model_bytes"],
        "saved_bytes": saved_bytes,
        **{name: spread(values) for name, values in seconds.items()},
        "blocking_bytes_per_s": round(saved_bytes / median(seconds["blocking"])),
        "background_bytes_per_s": round(saved_bytes / median(seconds["background"])),
        "load_bytes_per_s": round(saved_bytes / median(seconds["load"])),
        "share_of_step": round(in_the_way_s / step_s, 4),
        "target_share_of_step": 0.05,
    }


def worker(num_rounds: int, folder: str, width: int) -> dict[str, Any]:
    """Seconds of steps, saves and loads on this worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = join_world()
    model = nn.Sequential(*(Block(width) for _ in range(NUM_BLOCKS)))
    model_bytes = sum(x.nbytes for x in model.parameters())
    x = torch.randn(BATCH_SIZE, NUM_TOKENS, width)
    batch = (x, x.flip(0).contiguous())
    pipeline = hocket.Pipeline(
        model,
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4),
        example=batch,
        num_microbatches=NUM_MICROBATCHES,
        world=world,
    )
    seconds: dict[str, list[float]] = {}
    pipeline.step(batch)
    for i in range(num_rounds + 1):
        for name, taken_s in one_round(pipeline, batch, world, Path(folder)):
            if i:  # the first fills the page cache, and makes memory for the copies
                seconds.setdefault(name, []).append(taken_s)
    size = sum(path.stat().st_size for path in Path(folder).glob("b/step-*/*"))
    world.barrier("size")
    pipeline.close()
    return {"seconds": seconds, "model_bytes": model_bytes, "saved_bytes": size}


def one_round(
    pipeline: hocket.Pipeline, batch: Any, world: World, folder: Path
) -> list[tuple[str, float]]:
    """A step, a save of each kind, and a load; what each took."""
    step_s = timed(world, lambda: pipeline.step(batch))
    blocking_s = timed(world, lambda: pipeline.save(folder / "a", keep=1))
    pipeline.step(batch)
    begin_s = time()
    call_s = timed(world, lambda: pipeline.save(folder / "b", background=True, keep=1))
    beside_s = timed(world, lambda: pipeline.step(batch))
    pipeline.load(folder / "b")  # waits for the writer
    written_s = (folder / "b" / "latest").stat().st_mtime - begin_s
    load_s = timed(world, lambda: pipeline.load(folder / "b"))
    return [
        ("step", step_s),
        ("blocking", blocking_s),
        ("background_call", call_s),
        ("background", written_s),
        ("step_beside", beside_s),
        ("load", load_s),
    ]


def timed(world: World, act: Any) -> float:
    """Seconds of something that all workers begin together."""
    world.barrier("begin")
    begin_s = perf_counter()
    act()
    return perf_counter() - begin_s


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean over the microbatch."""
    return F.mse_loss(output, targets)


if __name__ == "__main__":
    main()
