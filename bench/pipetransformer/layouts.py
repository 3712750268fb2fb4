"""DDP beside a pipeline and data parallelism, and the forward of a frozen model.

ViT-Base on three and four Quadro RTX 5000 of one host, GPipe's order: what fits, how
fast it is, and how long ten epochs of CIFAR-100 take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from bench.pipetransformer.experiments import CIFAR100, cluster, counted
from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.freeze.shapes import Frozen, PipelineShape, order_of

BATCH_SIZES: Final = (96, 192, 384)
NUM_MICROBATCHES: Final = (4, 8, 16)
FORWARD_BATCHES: Final = (64, 320)
PUBLISHED_FORWARD_S: Final = {64: 0.471, 320: 2.313}  # the released code's README
_SHAPES: Final = (
    PipelineShape(1, 3),
    PipelineShape(3, 1),
    PipelineShape(1, 4),
    PipelineShape(2, 2),
    PipelineShape(4, 1),
)


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One layout, batch size and number of microbatches.

    Args:
        num_devices: all of them.
        layout: stages x replicas; "1xN" is DDP.
        batch_size: the whole batch.
        num_microbatches: of each pipeline.
        most_bytes: of a device.
        fits: whether that is no more than it has.
        images_per_s: of all devices.
        training_s: of ten epochs.
    """

    num_devices: int
    layout: str
    batch_size: int
    num_microbatches: int
    most_bytes: int
    fits: bool
    images_per_s: float
    training_s: float


def layout_rows() -> Iterator[LayoutRow]:
    """Simulate all layouts, those that do not fit, too."""
    for shape in _SHAPES:
        for batch_size in BATCH_SIZES:
            for num in NUM_MICROBATCHES if shape.num_stages > 1 else (1,):
                yield _row(shape, batch_size, num)


def forward_s(batch_size: int) -> float:
    """Return the seconds of the whole model's forward on one device."""
    return sum(x.forward_s for x in counted(CIFAR100.make).layers(batch_size))


def _row(shape: PipelineShape, batch_size: int, num_microbatches: int) -> LayoutRow:
    found, costs = cluster(), counted(CIFAR100.make)
    num_parts = num_microbatches * shape.num_replicas
    layers = costs.layers(batch_size // num_parts)
    beside = Costs((), link=found.inside)
    model = Frozen(layers, 0, costs.update_s_per_byte, beside)
    order = order_of("gpipe", shape, num_parts)
    played = replace(
        model.costs(model.boundaries(shape.num_stages)), reduce_link=found.inside
    )
    timeline = simulate(order, played)
    images_per_s = batch_size / timeline.makespan_s
    return LayoutRow(
        shape.num_stages * shape.num_replicas,
        str(shape),
        batch_size,
        num_microbatches,
        round(timeline.most_bytes),
        timeline.most_bytes <= found.memory_bytes,
        images_per_s,
        CIFAR100.num_epochs * CIFAR100.num_samples / images_per_s,
    )
