"""Predict torchtitan's published Llama 3.1 figures, and keep them beside each other.

    python -m bench.torchtitan.predict

One number is fitted: the part of the peak that matrix products reach, so that the first
row takes as long as published. All others are predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.measure import write_result
from bench.torchtitan.llama import LLAMA_8B, LLAMA_405B, Llama, layers
from hocket.core.hardware import Hardware, LinkKind, load_catalogue
from hocket.planner.candidate import FSDP, Candidate, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.planner.replicas.data_parallel import data_parallel_outcome
from hocket.planner.work import CountedCosts

RESULTS: Final = Path(__file__).parent / "results"
SOURCE: Final = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
PUBLISHED_RATIO: Final = 128 / 100  # interleaved over plain 1F1B, of 405B
_NUM_SAMPLES: Final = 2  # of each GPU, in one microbatch
_PER_NODE: Final = 8
_PRECISION: Final = "bfloat16"
_TOLERANCE: Final = 1e-4
_BATCH: Final = 32  # of each pipeline of 405B
_MICROBATCHES: Final = 8  # as many as stages in a pipeline, torchtitan's default


@dataclass(frozen=True, slots=True)
class Row:
    """A published row of Llama 3.1 8B.

    Args:
        num_gpus: in nodes of eight.
        is_compiled: whether its blocks are.
        tokens_per_s: of each GPU.
        gib: the most that PyTorch's allocator reserved on any.
    """

    num_gpus: int
    is_compiled: bool
    tokens_per_s: float
    gib: float


ROWS: Final = (
    Row(8, False, 5762, 82.4),
    Row(8, True, 6667, 77.0),
    Row(128, False, 5605, 67.0),
    Row(128, True, 6514, 62.0),
)


def device(fraction: float, num_parts: int = 1) -> Hardware:
    """An H100 with 96 GB of HBM2e, as published; or several that work as one.

    Args:
        fraction: the part of the peak that matrix products reach.
        num_parts: GPUs that work as one.
    """
    known = load_catalogue().device("h100")
    return replace(
        known,
        name="NVIDIA H100 96 GB HBM2e",
        memory_bytes=num_parts * 96 * 10**9,
        bytes_per_s=num_parts * 2.4e12,
        flops={_PRECISION: num_parts * known.flops[_PRECISION]},
        matmul_fraction={_PRECISION: fraction},
    )


def cluster(num_devices: int, per_node: int, hardware: Hardware) -> Cluster:
    """Nodes of eight GPUs with 400 Gb/s each, all of which a node's ring uses."""
    known = load_catalogue()
    card = known.link("400gb")
    network = LinkKind(
        "8x400gb", "8 x 400 Gb/s", 8 * card.bytes_per_s, card.latency_s, 0.8, SOURCE
    )
    return Cluster(
        num_devices,
        hardware.usable_bytes,
        known.link("nvlink4"),
        network,
        num_devices // per_node,
        hardware.name,
    )


def predicted(row: Row, fraction: float) -> Outcome:
    """Predict a row of 8B: FSDP over all GPUs, as `hocket plan` does.

    Args:
        row: the row.
        fraction: the part of the peak that matrix products reach.
    """
    model = replace(LLAMA_8B, is_compiled=row.is_compiled)
    hardware = device(fraction)
    work = CountedCosts("Llama 3.1 8B", layers(model), hardware, _PRECISION)
    devices = cluster(row.num_gpus, _PER_NODE, hardware)
    predictor = Predictor(work, devices, _NUM_SAMPLES * row.num_gpus)
    candidate = Candidate(FSDP, 1, 1, 1, 1, num_shards=row.num_gpus)
    return data_parallel_outcome(predictor, candidate)


def tokens_per_s(row: Row, outcome: Outcome) -> float:
    """Return the tokens per second of each GPU."""
    return outcome.samples_per_s * LLAMA_8B.num_tokens / row.num_gpus


def fitted_fraction(row: Row = ROWS[0]) -> float:
    """Return the part of the peak with which a row takes as long as published."""
    low, high = 0.05, 1.0
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        if tokens_per_s(row, predicted(row, middle)) < row.tokens_per_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def interleaved_ratio(fraction: float, stages_per_device: int) -> float:
    """Return how many times as fast interleaved 1F1B is as 1F1B, for 405B.

    On 512 GPUs: 8 stages x 8 shards x 8 parts of each block; the last eight GPUs are
    one device here. Each block is recomputed, as published.

    Args:
        fraction: the part of the peak that matrix products reach.
        stages_per_device: of the interleaved order; not published.
    """
    model: Llama = replace(LLAMA_405B, is_compiled=True, is_selective=False)
    hardware = device(fraction, _PER_NODE)
    work = CountedCosts("Llama 3.1 405B", layers(model), hardware, _PRECISION)
    predictor = Predictor(work, cluster(64, 1, hardware), 8 * _BATCH)
    speeds = [
        predictor.outcome(
            Candidate(name, 8, 1, num, _MICROBATCHES, num_shards=8)
        ).samples_per_s
        for name, num in (("1f1b", 1), ("interleaved-1f1b", stages_per_device))
    ]
    return speeds[1] / speeds[0]


def results() -> dict[str, Any]:
    """Fit, and predict everything."""
    fraction = fitted_fraction()
    rows = []
    for row in ROWS:
        outcome = predicted(row, fraction)
        rows.append(
            {
                "num_gpus": row.num_gpus,
                "is_compiled": row.is_compiled,
                "tokens_per_s": tokens_per_s(row, outcome),
                "published_tokens_per_s": row.tokens_per_s,
                "gib": outcome.peak_bytes / 2**30,
                "published_gib": row.gib,
            }
        )
    return {"source": SOURCE, "fitted_fraction": fraction, "rows": rows}


def ratios(fraction: float) -> dict[str, Any]:
    """Predict how much faster interleaved 1F1B is."""
    rows = [
        {
            "stages_per_device": num,
            "ratio": interleaved_ratio(fraction, num),
            "published_ratio": PUBLISHED_RATIO,
        }
        for num in (2, 3)
    ]
    return {"source": SOURCE, "fitted_fraction": fraction, "rows": rows}


if __name__ == "__main__":
    found = results()
    for name, document in (
        ("published", found),
        ("interleaved", ratios(found["fitted_fraction"])),
    ):
        print(document)
        write_result(RESULTS / f"{name}.json", document)
