"""Estimate out-of-order backprop's experiments on one GPU, for `hocket bench`.

    python -m bench.ooo_single.simulate

takes some minutes, most of them to capture the networks. Nothing is computed: shapes
and operators of the captured step are counted (counted.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from bench.ooo_single.counted import count
from bench.published import Row, Table, write_published
from examples.zoo import vision
from hocket.core.hardware import load_catalogue
from hocket.core.simulate import simulate
from hocket.passes.beside_critical_path import MeasuredProgram, beside_critical_path
from hocket.passes.serial import serial
from hocket.run.outoforder.capture.captured_step import capture_step

HARDWARE: Final = "v100-16g"
_CIFAR: Final = (32, 100)  # pixels, classes
_IMAGENET: Final = (224, 1000)
_HEAD: Final[Row] = (
    *("network", "images", "kernels", "each launched", "one graph"),
    *("two lanes", "launched / graph", "graph / two lanes"),
)
_LEGEND: Final = (
    "Steps on a V100 of 16 GB, float32, SGD with momentum, estimated from each "
    "kernel's multiplications and bytes, and 1.5 us between kernels; not measured. "
    "each launched: no kernel is faster than its launch from the host (6 us), as in "
    "eager mode. one graph: the serial order in a CUDA graph. two lanes: weight "
    "gradients and updates in a second lane, which fills the first one's gaps; both "
    "together are no faster than the kernels one after the other without a gap. This "
    "is the most that they can gain. Out-of-order backprop reports 1.03 to 1.58 times "
    "XLA for all of its networks on one GPU, and no number for a single one; its XLA "
    "had no CUDA graphs, so that a part of its gain is the graph's."
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A network and a batch of the artifact's scripts.

    Args:
        name: of the network.
        make: makes it.
        batch_size: images.
        sides: pixels and classes of the images.
    """

    name: str
    make: Callable[[Any], nn.Module]
    batch_size: int
    sides: tuple[int, int]


def experiments() -> Iterator[Experiment]:
    """Yield the artifact's experiments on one GPU."""
    for growth, batch_size in ((12, 32), (24, 32), (32, 32), (24, 64), (32, 64)):
        dense = partial(vision.densenet, growth_rate=growth)
        yield Experiment(f"DenseNet-121, growth {growth}", dense, batch_size, _CIFAR)
    for width in (0.5, 1.0):
        for batch_size in (32, 64):
            small = partial(vision.mobilenet_v3, width_multiplier=width)
            name = f"MobileNetV3-Large x {width:g}"
            yield Experiment(name, small, batch_size, _IMAGENET)


def simulated(experiment: Experiment) -> dict[str, Any]:
    """Estimate one step; times in milliseconds."""
    side, num_classes = experiment.sides
    model = experiment.make(SimpleNamespace(num_classes=num_classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.empty(experiment.batch_size, 3, side, side)
    labels = torch.zeros(experiment.batch_size, dtype=torch.long)
    step = capture_step(model, F.cross_entropy, optimizer, (images, labels))
    counted = count(step, load_catalogue().device(HARDWARE))
    program = step.regions.program
    costs = replace(counted.costs, lane_capacity=2.0)
    measured = MeasuredProgram(program, costs, step.code.footprint)
    beside = simulate(beside_critical_path(measured).schedule, costs)
    return {
        "network": experiment.name,
        "batch_size": experiment.batch_size,
        "num_kernels": counted.num_kernels,
        "launched_ms": round(counted.launched_s * 1e3, 4),
        "graph_ms": round(simulate(serial(program), costs).makespan_s * 1e3, 4),
        "two_lanes_ms": round(max(beside.makespan_s, counted.kernels_s) * 1e3, 4),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Return what people read."""
    title = ["Out-of-order backprop's experiments on one V100, estimated:"]
    return {"title": title, "rows": [_HEAD, *map(_cells, rows)], "legend": _LEGEND}


def _cells(row: dict[str, Any]) -> Row:
    launched, graph, beside = (
        row[f"{x}_ms"] for x in ("launched", "graph", "two_lanes")
    )
    return (
        row["network"],
        str(row["batch_size"]),
        str(row["num_kernels"]),
        *(f"{x:.2f} ms" for x in (launched, graph, beside)),
        f"{launched / graph:.2f}",
        f"{graph / beside:.2f}",
    )


def main() -> None:
    """Estimate all, and write them."""
    rows = []
    for experiment in experiments():
        rows.append(simulated(experiment))
        print(rows[-1], flush=True)
    write_published("ooo-single", rows, {}, [table(rows)])


if __name__ == "__main__":
    main()
