"""How long `hocket plan` takes: capturing, counting, and predicting its candidates.

    python -m bench.planner.run

A GPT of 1.3 billion parameters on the meta device, so that nothing of it is in memory,
is planned for several clusters: once as users get it, where candidates that cannot be
among the best are left out, and once with all of them simulated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import torch
from torch.nn import functional

from bench.measure import environment, write_result
from examples.zoo.text import Gpt
from hocket.core.hardware import load_catalogue
from hocket.model.capture.capture import capture
from hocket.model.profile.work import counted_work
from hocket.planner.cluster import Cluster
from hocket.planner.rank import Search, rank
from hocket.planner.work import ModelCosts
from hocket.recipes.models.make import Blocks

RESULTS: Final = Path(__file__).parent / "results"
TARGET: Final = {"num_candidates": 1000, "seconds": 10.0}
BLOCKS: Final = Blocks(width=2048, num_blocks=24, num_heads=16, mlp_width=8192)
WINDOW: Final = 1024
# devices, nodes, samples per step
CASES: Final = ((8, 1, 240), (16, 2, 480), (32, 4, 960), (64, 8, 1440))


def main() -> None:
    """Plan every case both ways, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = load_catalogue()
    device = known.device("a100-80g")
    begin, begin_cpu = perf_counter(), process_time()
    with torch.device("meta"):
        model = Gpt(window_bytes=WINDOW, blocks=BLOCKS)
        batch = torch.randint(0, 256, (4, WINDOW))
    captured = capture(model, (batch,))
    middle, middle_cpu = perf_counter(), process_time()
    states = {
        name: 2 * x.nbytes
        for name, x in captured.state.tensors.items()
        if x.requires_grad
    }
    work = counted_work(
        captured,
        device,
        states,
        finish=lambda score_BTV, size: functional.cross_entropy(
            score_BTV.flatten(0, 1),
            torch.zeros(size * WINDOW, dtype=torch.long, device="meta"),
        ),
        precision="bfloat16",
    )
    once = {
        "capture_s": round(middle - begin, 2),
        "capture_cpu_s": round(middle_cpu - begin_cpu, 2),
        "count_s": round(perf_counter() - middle, 2),
        "count_cpu_s": round(process_time() - middle_cpu, 2),
        "num_layers": len(work.ops),
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }
    print(once, flush=True)
    rows = []
    for num_devices, num_nodes, batch_size in CASES:
        cluster = Cluster(
            num_devices,
            device.usable_bytes,
            known.link("nvlink", device),
            known.link("100gb"),
            num_nodes,
            device.name,
        )
        for is_exhaustive in (False, True):
            rows.append(_measure(work, cluster, batch_size, is_exhaustive))
            print(rows[-1], flush=True)
    write_result(
        arguments.output,
        {"environment": environment(), "target": TARGET, "once": once, "rows": rows},
    )


def _measure(
    work: ModelCosts, cluster: Cluster, batch_size: int, is_exhaustive: bool
) -> dict[str, Any]:
    begin, begin_cpu = perf_counter(), process_time()
    ranking = rank(work, cluster, batch_size, Search(is_exhaustive=is_exhaustive))
    seconds, cpu_s = perf_counter() - begin, process_time() - begin_cpu
    best = ranking.best
    return {
        "num_devices": cluster.num_devices,
        "batch_size": batch_size,
        "is_exhaustive": is_exhaustive,
        "num_candidates": ranking.num_candidates,
        "num_simulated": len(ranking.outcomes),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "cpu_ms_per_candidate": round(1e3 * cpu_s / ranking.num_candidates, 2),
        "best": None if best is None else best.candidate.schedule,
        "best_samples_per_s": None if best is None else round(best.samples_per_s, 1),
    }


if __name__ == "__main__":
    main()
