"""PipeTransformer's experiments, on the simulator: its own system, and hocket's.

He et al., "PipeTransformer: Automated Elastic Pipelining for Distributed Training of
Large-scale Models", ICML'21, and the code and logs that the authors published: two
hosts of eight Quadro RTX 5000, PCIe 3.0 x16, InfiniBand of 5 GB/s; GPipe and data
parallelism. Its system is simulated as released:

- each pipeline keeps its batch, so that the whole batch grows with the replicas;
- 16 microbatches, 4 on one device; units are attentions and MLPs, cut by parameters;
- frozen layers run the whole batch on the first device, before the pipeline begins;
  or their outputs are copied from host memory, from three frozen layers on;
- a change of the pipeline takes 27 s (logged: 20 to 35 s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import ceil
from typing import Final

from bench.networks.transformers import transformer
from bench.networks.vision import vit
from hocket.core.costs import Costs
from hocket.core.hardware import load_catalogue
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.freeze.policy import num_frozen_after
from hocket.freeze.shapes import (
    Frozen,
    PipelineShape,
    greedy,
    halved,
    largest_part,
    order_of,
    with_frozen_layers,
)
from hocket.planner.cluster import Cluster
from hocket.planner.published.catalogue import CountedLayer
from hocket.planner.stages import stage_costs
from hocket.planner.work import CountedCosts, LayerCost
from hocket.schedules import make_schedule

DEVICE: Final = "rtx-5000"
LINK: Final = "pcie3"
NETWORK: Final = "40gb"
PRECISION: Final = "float32"
NUM_HOSTS: Final = 2
DEVICES_PER_HOST: Final = 8
NUM_DEVICES: Final = NUM_HOSTS * DEVICES_PER_HOST
TRANSITION_S: Final = 27.0
OUR_TRANSITION_S: Final = 2.0
OUR_PARTS: Final = 32  # microbatches of the whole batch, in any layout
_LENGTHS: Final = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Copies:
    """What kept outputs take in a step, for each byte.

    Args:
        read_s: seconds of reading it.
        store_s: seconds of keeping it.
    """

    read_s: float
    store_s: float = 0.0


# Three copies in host memory and one to the device that is not pinned. What storing
# takes is not published; see `caching.py` for what can be read from a log.
_COPIES: Final = Copies(3 / 5e9 + 1 / 6e9)

Make = Callable[[], tuple[CountedLayer, ...]]


@dataclass(frozen=True, slots=True)
class Task:
    """What is fine-tuned.

    Args:
        name: of the data.
        make: the model's layers: an embedding, two for each block, a head.
        num_blocks: of the model.
        num_samples: of an epoch.
        batch_size: of each pipeline.
        num_epochs: of the training.
        kept_bytes: of a block's output, for each sample.
        caches_from: frozen layers from which on outputs are kept.
    """

    name: str
    make: Make
    num_blocks: int
    num_samples: int
    batch_size: int
    num_epochs: int
    kept_bytes: int
    caches_from: int


@dataclass(frozen=True, slots=True)
class Modules:
    """Which parts of the system are on.

    Args:
        shortens: whether the pipeline becomes shorter (AutoPipe).
        replicates: whether freed devices become replicas (AutoDP).
        caches: whether outputs of frozen layers are kept (AutoCache).
    """

    shortens: bool = True
    replicates: bool = True
    caches: bool = True


ALL: Final = Modules()


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a run.

    Args:
        num_frozen: blocks.
        num_stages: of each pipeline.
        num_replicas: pipelines.
        step_s: of a step.
        seconds: of the epoch, with a change before it.
    """

    num_frozen: int
    num_stages: int
    num_replicas: int
    step_s: float
    seconds: float


_BERT_LARGE: Final = partial(
    transformer, 24, 1024, 16, 256, num_words=30522, num_scored=0
)
_VIT: Final = partial(vit, "ViT-Base")
_VIT_BYTES: Final = 4 * 197 * 768
IMAGENET: Final = Task("ImageNet", _VIT, 12, 1_281_167, 400, 10, _VIT_BYTES, 3)
CIFAR100: Final = Task("CIFAR-100", _VIT, 12, 50_000, 320, 10, _VIT_BYTES, 3)
SQUAD: Final = Task("SQuAD 1.1", _BERT_LARGE, 24, 88_524, 64, 3, 4 * 256 * 1024, 5)


@cache
def cluster() -> Cluster:
    """Return the 16 devices."""
    catalogue = load_catalogue()
    device = catalogue.device(DEVICE)
    return Cluster(
        NUM_DEVICES,
        device.usable_bytes,
        catalogue.link(LINK),
        catalogue.link(NETWORK),
        NUM_HOSTS,
        device.name,
    )


@cache
def counted(make: Make) -> CountedCosts:
    """Return a model's costs, counted by hand."""
    ops = tuple(layer.ops() for layer in make())
    return CountedCosts("model", ops, load_catalogue().device(DEVICE), PRECISION)


def first_active(num_frozen: int) -> int:
    """Return the first of a model's layers that trains: embeddings freeze, too."""
    return 1 + 2 * num_frozen if num_frozen else 0


def frozen_blocks(task: Task, alpha: float, num_blocks: int | None = None) -> list[int]:
    """Return the frozen blocks of each epoch; the released code counts 12 always."""
    total = num_blocks or task.num_blocks
    return [num_frozen_after(alpha, total, e) for e in range(task.num_epochs)]


def published_lengths(task: Task, frozen: Sequence[int]) -> list[int]:
    """Return the pipeline's length in each epoch, by the released rule."""
    sizes = [layer.weights / 1e6 for layer in task.make()]
    most, length, found = largest_part(sizes, DEVICES_PER_HOST), DEVICES_PER_HOST, []
    for number in frozen:
        if number:
            length = halved(sizes[first_active(number) :], length, most)
        found.append(length)
    return found


def baseline(task: Task) -> float:
    """Return the seconds of GPipe and data parallelism without freezing."""
    step_s = _published_step_s(task, DEVICES_PER_HOST, NUM_HOSTS, 0)
    return task.num_epochs * _num_steps(task, NUM_HOSTS) * step_s


def published_run(
    task: Task,
    frozen: Sequence[int],
    modules: Modules = ALL,
    copies: Copies = _COPIES,
) -> Iterator[Epoch]:
    """Simulate PipeTransformer's epochs.

    Args:
        task: what is fine-tuned.
        frozen: the frozen blocks of each epoch.
        modules: which parts of the system are on.
        copies: what the cache takes.
    """
    lengths = published_lengths(task, frozen)
    before = 0, DEVICES_PER_HOST
    for number, length in zip(frozen, lengths, strict=True):
        stages = length if modules.shortens else DEVICES_PER_HOST
        replicas = NUM_DEVICES // stages if modules.replicates else NUM_HOSTS
        caches = copies if modules.caches and number >= task.caches_from else None
        step_s = _published_step_s(task, stages, replicas, number)
        step_s += _prefix_s(task, number, before[0], caches)
        seconds = _num_steps(task, replicas) * step_s
        seconds += TRANSITION_S * (stages != before[1])
        before = number, stages
        yield Epoch(number, stages, replicas, step_s, seconds)


def our_run(
    task: Task, frozen: Sequence[int], modules: Modules = ALL
) -> Iterator[Epoch]:
    """Simulate hocket's epochs: the whole batch stays as large as the baseline's."""
    batch_size = task.batch_size * NUM_HOSTS
    layers = counted(task.make).layers(batch_size // OUR_PARTS)
    num_steps, before, shape_before = ceil(task.num_samples / batch_size), 0, (8, 2)
    for number in frozen:
        kept = layers
        if modules.caches and before:  # only what is newly frozen runs, once
            kept = _without_forward(layers, first_active(before))
        if modules.caches and number == before:
            kept = _without_forward(layers, first_active(number))
        step_s, shape = _our_step_s(task, kept, first_active(number))
        seconds = num_steps * step_s
        seconds += OUR_TRANSITION_S * (number != before or shape != shape_before)
        before, shape_before = number, shape
        yield Epoch(number, *shape, step_s, seconds)


def partition(sizes: Sequence[float], num_devices: int) -> tuple[int, ...]:
    """Return where stages 1, 2, ... begin, by the released rule; none is empty."""
    edges = {*accumulate(greedy(sizes, num_devices))}
    return tuple(sorted(edges - {0, len(sizes)}))


def _published_step_s(
    task: Task, num_stages: int, num_replicas: int, num_frozen: int
) -> float:
    num_parts = 16 if num_stages > 1 else 4
    costs = counted(task.make)
    layers = costs.layers(task.batch_size // num_parts)[first_active(num_frozen) :]
    sizes = [layer.weights / 1e6 for layer in task.make()][first_active(num_frozen) :]
    boundaries = partition(sizes, num_stages)
    stages = stage_costs(
        layers,
        boundaries,
        recomputes=False,
        update_s_per_byte=costs.update_s_per_byte,
    )
    found = cluster()
    order = make_schedule(
        "gpipe",
        num_devices=len(boundaries) + 1,
        num_microbatches=num_parts,
        num_replicas=num_replicas,
    )
    reduce_link = found.reduce_link(num_stages, num_replicas)
    played = Costs(stages, link=found.inside, reduce_link=reduce_link)
    return simulate(order, played).makespan_s


def _prefix_s(task: Task, num_frozen: int, before: int, caches: Copies | None) -> float:
    """Return what a step spends on frozen layers, before the pipeline begins.

    Args:
        task: what is fine-tuned.
        num_frozen: blocks.
        before: those of the epoch before, whose outputs are kept from `caches_from` on.
        caches: what the cache takes; None where nothing is kept now.
    """
    layers = counted(task.make).layers(task.batch_size)
    begin, num_bytes, total_s = 0, task.batch_size * task.kept_bytes, 0.0
    if caches is not None:
        if before >= task.caches_from:
            begin = first_active(before)
            total_s += num_bytes * caches.read_s
        if num_frozen != before:
            total_s += num_bytes * caches.store_s
    computed = layers[begin : first_active(num_frozen)]
    return total_s + sum(layer.forward_s for layer in computed)


def _num_steps(task: Task, num_replicas: int) -> int:
    return ceil(task.num_samples / (num_replicas * task.batch_size))


def _without_forward(layers: Sequence[LayerCost], num: int) -> tuple[LayerCost, ...]:
    return (*(replace(x, forward_s=0.0) for x in layers[:num]), *layers[num:])


def _our_step_s(
    task: Task, layers: Sequence[LayerCost], num_frozen_layers: int
) -> tuple[float, tuple[int, int]]:
    """Return the fastest shape that fits the memory, and its step."""
    found, costs = cluster(), counted(task.make)
    best: tuple[float, tuple[int, int]] | None = None
    for num_stages in _LENGTHS:
        shape = PipelineShape(num_stages, NUM_DEVICES // num_stages)
        beside = Costs((), link=found.inside)
        model = Frozen(layers, num_frozen_layers, costs.update_s_per_byte, beside)
        try:
            boundaries = model.boundaries(num_stages)
        except ShapeError:
            continue
        order = with_frozen_layers(
            order_of("1f1b", shape, OUR_PARTS), boundaries, num_frozen_layers
        )
        reduce_link = found.reduce_link(*shape)
        played = replace(model.costs(boundaries), reduce_link=reduce_link)
        timeline = simulate(order, played)
        fits = timeline.most_bytes <= found.memory_bytes
        if fits and (best is None or timeline.makespan_s < best[0]):
            best = timeline.makespan_s, (shape.num_stages, shape.num_replicas)
    assert best is not None, "these models fit eight devices"
    return best
