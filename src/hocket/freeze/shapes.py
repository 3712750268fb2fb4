"""Chooses stages and replicas for the layers that still train.

    6 workers    6 stages x 1 replica ─▶ 3 x 2 ─▶ 2 x 3 ─▶ 1 x 6

A shape is taken when it fits the memory, and what it saves over the rest of the run is
more than the transition takes (`run/elastic/shape_choice.py`).

The number of microbatches follows: the replicas share those of the whole batch, whose
number stays, so that a replica of D has M/D of M. They are the same samples in every
shape, so that gradients, batch norms and dropout masks are the same, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import pvariance
from typing import Final, Literal, NamedTuple

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import FitError, ShapeError
from hocket.freeze.cache.payoff import CacheCosts
from hocket.passes.add_frozen_prefix import add_frozen_prefix
from hocket.passes.freeze_stages import freeze_stages
from hocket.planner.balance import Balancer
from hocket.planner.stages import stage_costs
from hocket.planner.work import LayerCost
from hocket.schedules import make_schedule


class PipelineShape(NamedTuple):
    """Stages of one pipeline, and copies of it.

    >>> print(PipelineShape(4, 2))
    4x2
    """

    num_stages: int
    num_replicas: int

    def __str__(self) -> str:
        """Return stages x replicas."""
        return f"{self.num_stages}x{self.num_replicas}"


@dataclass(frozen=True, slots=True)
class Frozen:
    """A model of which the first layers are frozen.

    Args:
        layers: the costs of all layers, for one microbatch.
        num_frozen: those of them that are frozen, from the first on.
        update_s_per_byte: seconds of the optimizer's step per byte.
        beside: the costs of messages, of reductions and of the host, without stages.
        frozen_s: seconds of each layer's forward once it is frozen: in eval mode,
            without gradients; as in training where not given.
        cache: what the cache takes, where frozen layers' outputs are kept.
        sizes: millions of parameters of each layer, by which `greedy` cuts; None where
            the slowest device is to be the fastest possible.
        kept: the layers at which stages 1, 2, ... begin, where each layer stays on its
            device; None where the layers that train are cut again.
    """

    layers: Sequence[LayerCost]
    num_frozen: int
    update_s_per_byte: float = 0.0
    beside: Costs = field(default_factory=lambda: Costs(()))
    frozen_s: Sequence[float] = ()
    cache: CacheCosts | None = None
    sizes: Sequence[float] | None = None
    kept: Sequence[int] | None = None

    @property
    def prefix_s(self) -> float:
        """The seconds of the frozen layers' outputs."""
        own_s = self._forwards_s[: self.num_frozen]
        return sum(own_s) if self.cache is None else self.cache.prefix_s(own_s)

    @property
    def unmeasured_cache(self) -> CacheCosts:
        """What the cache is taken to need for the frozen layers' outputs.

        Until it is measured: to read or store them takes as long as to send them.
        """
        num_bytes = self.layers[self.num_frozen].received_bytes
        seconds = self.beside.link.occupied_s(num_bytes)
        return CacheCosts(self.num_frozen, seconds, seconds)

    @property
    def _forwards_s(self) -> Sequence[float]:
        return self.frozen_s or [layer.forward_s for layer in self.layers]

    def boundaries(self, num_stages: int) -> tuple[int, ...]:
        """Return the layers at which stages begin that follow the frozen ones.

        The slowest device is the fastest possible: the first one runs the frozen
        layers' forwards, too. Where layers stay on their devices, the stage that holds
        frozen layers and others is two.

        Args:
            num_stages: the devices of a pipeline.

        Returns:
            Where layers are frozen, one of them is the first layer that trains.

        Raises:
            ShapeError: there are fewer layers left than stages.
        """
        if self.kept is not None:
            return tuple(sorted({*self.kept, self.num_frozen} - {0}))
        if self.sizes is not None:
            begins = greedy_boundaries(self.sizes, num_stages, self.num_frozen)
            return (self.num_frozen, *begins) if self.num_frozen else begins
        active = self.layers[self.num_frozen :]
        cut = Balancer.of(active, self.beside.link, self.prefix_s).cut(num_stages)
        begins = tuple(self.num_frozen + place for place in cut)
        return (self.num_frozen, *begins) if self.num_frozen else begins

    def layers_on(
        self, boundaries: Sequence[int], num_stages: int
    ) -> tuple[range, ...]:
        """Return the layers of each device of a cut.

        Args:
            boundaries: see `boundaries`.
            num_stages: the devices of a pipeline.
        """
        begins = self.kept
        if begins is None:  # the frozen ones are on the first
            begins = boundaries[len(boundaries) - num_stages + 1 :]
        edges = (0, *begins, len(self.layers))
        return tuple(range(a, b) for a, b in pairwise(edges))

    def costs(self, boundaries: Sequence[int], prefix_s: float | None = None) -> Costs:
        """Return the costs of the stages of a cut.

        Args:
            boundaries: see `boundaries`.
            prefix_s: the seconds of the frozen layers' outputs, if they are known.
        """
        stages = stage_costs(
            self.layers,
            boundaries,
            recomputes=False,
            update_s_per_byte=self.update_s_per_byte,
        )
        num = num_stages_before(boundaries, self.num_frozen)
        edges = (0, *boundaries)[: num + 1]
        each_s = [sum(self._forwards_s[a:b]) for a, b in pairwise(edges)]
        if num == 1:
            each_s = [self.prefix_s if prefix_s is None else prefix_s]
        frozen = [_frozen(x, s) for x, s in zip(stages[:num], each_s, strict=True)]
        return replace(self.beside, stages=(*frozen, *stages[num:]))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a shape is predicted to take.

    Args:
        shape: stages and replicas.
        boundaries: see `Frozen.boundaries`.
        step_s: seconds of a step.
        peak_bytes: the most on any device.
        prefix_s: the seconds of a microbatch's frozen layers in it.
        fullest: the device that needs the most.
    """

    shape: PipelineShape
    boundaries: tuple[int, ...]
    step_s: float
    peak_bytes: int
    prefix_s: float = 0.0
    fullest: int = 0


def shapes_of(num_workers: int, num_parts: int) -> list[PipelineShape]:
    """Return the shapes in which all workers work, the longest pipeline first.

    Args:
        num_workers: stages x replicas.
        num_parts: microbatches of the whole batch, which the replicas share evenly.

    >>> print(*shapes_of(6, 6))
    6x1 3x2 2x3 1x6
    >>> print(*shapes_of(6, 4))
    6x1 3x2
    """
    return [
        PipelineShape(num_workers // replicas, replicas)
        for replicas in range(1, num_workers + 1)
        if num_workers % replicas == 0 and num_parts % replicas == 0
    ]


def predict(
    model: Frozen, shape: PipelineShape, num_parts: int, schedule: str
) -> Prediction:
    """Simulate a step of one shape.

    Args:
        model: the layers, and how many of them are frozen.
        shape: stages and replicas.
        num_parts: microbatches of the whole batch.
        schedule: the name of a schedule with one stage per device.

    Raises:
        ShapeError: the schedule's constraints refuse the numbers, or there are fewer
            layers left than stages.
    """
    boundaries = model.boundaries(shape.num_stages)
    order = order_of(schedule, shape, num_parts)
    order = with_frozen_layers(order, boundaries, model.num_frozen)
    timeline = simulate(order, model.costs(boundaries))
    peaks = [round(timeline.peak_bytes(d)) for d in range(shape.num_stages)]
    peak, step_s = max(peaks), timeline.makespan_s
    fullest = peaks.index(peak)
    return Prediction(shape, boundaries, step_s, peak, model.prefix_s, fullest)


def order_of(schedule: str, shape: PipelineShape, num_parts: int) -> Schedule:
    """Make the order of one step, in which no layer is frozen.

    Args:
        schedule: its name.
        shape: stages and replicas.
        num_parts: microbatches of the whole batch.
    """
    return make_schedule(
        schedule,
        num_devices=shape.num_stages,
        num_microbatches=num_parts // shape.num_replicas,
        num_replicas=shape.num_replicas,
    )


def with_frozen_layers(
    order: Schedule, boundaries: Sequence[int], num_frozen: int
) -> Schedule:
    """Return the order of one step in which the first layers run forward only.

    Args:
        order: with one stage on each device, all of which train.
        boundaries: see `Frozen.boundaries`.
        num_frozen: the layers that are frozen, from the first on.
    """
    num = num_stages_before(boundaries, num_frozen)
    if len(boundaries) < order.program.num_stages:  # no stage is frozen in part
        return freeze_stages(order, num)
    return add_frozen_prefix(freeze_stages(order, num - 1), before=num - 1)


def num_stages_before(boundaries: Sequence[int], layer: int) -> int:
    """Return how many stages of a cut end at a layer at which one begins.

    >>> [num_stages_before((3, 5, 8), layer) for layer in (0, 3, 5)]
    [0, 1, 2]
    """
    return bisect_left((0, *boundaries), layer)


def next_shape(
    now: PipelineShape,
    predictions: Sequence[Prediction],
    *,
    steps_left: int,
    transition_s: Callable[[Prediction], float],
) -> Prediction:
    """Return the shape with which the rest of the run is over first.

    Args:
        now: the present shape.
        predictions: those of all shapes that may be taken.
        steps_left: steps until the run ends; or, if that is not known, until the next
            decision.
        transition_s: returns the seconds until a shape is taken.
    """

    def rest_s(option: Prediction) -> float:
        return steps_left * option.step_s + transition_s(option)

    # Of shapes that are equally fast, the present one.
    return min(predictions, key=lambda x: (rest_s(x), x.shape != now))


def unfit(
    asked: Sequence[Prediction],
    every: Sequence[Prediction],
    num_frozen: int,
    memory_bytes: int,
) -> FitError:
    """Return the error of shapes that do not fit the memory.

    Args:
        asked: those that may be taken, none of which fits.
        every: those of all shapes that are possible.
        num_frozen: the layers that are frozen.
        memory_bytes: what each device has.
    """
    needs, least = (min(x, key=lambda x: x.peak_bytes) for x in (asked, every))
    if needs.shape == least.shape:
        text = (
            f"with {num_frozen} layers frozen, no shape fits memory_bytes "
            f"{memory_bytes}: {least.shape} (stages x replicas) needs the least, "
            f"{least.peak_bytes} bytes on device {least.fullest}; give more "
            "memory_bytes, or more workers"
        )
    else:
        text = (
            f"with {num_frozen} layers frozen, {needs.shape} (stages x replicas) needs "
            f"{needs.peak_bytes} bytes on device {needs.fullest}, and memory_bytes is "
            f"{memory_bytes}; of all shapes, {least.shape} needs the least, "
            f"{least.peak_bytes} bytes; give more memory_bytes, or shapes that fit"
        )
    return FitError(
        text,
        device=needs.fullest,
        needed_bytes=needs.peak_bytes,
        memory_bytes=memory_bytes,
    )


def halved_shape(
    model: Frozen, longest: PipelineShape, first: PipelineShape, num_parts: int
) -> PipelineShape:
    """Return the shape that PipeTransformer takes: half the stages, if it may.

    Args:
        model: the layers with their sizes, and how many of them are frozen.
        longest: the shape that is halved: the present one; the first one where layers
            train again.
        first: the shape with nothing frozen; its largest part is the measure.
        num_parts: microbatches of the whole batch, which the replicas share evenly.
    """
    assert model.sizes is not None
    most = largest_part(model.sizes, first.num_stages)
    fewest = halved(model.sizes[model.num_frozen :], longest.num_stages, most)
    halves = {longest.num_stages >> i for i in range(longest.num_stages.bit_length())}
    shapes = shapes_of(longest.num_stages * longest.num_replicas, num_parts)
    return min(x for x in shapes if x.num_stages in halves and x.num_stages >= fewest)


def possible(
    model: Frozen, num_workers: int, num_parts: int, schedule: str
) -> list[Prediction]:
    """Return the predictions of all shapes that there are layers for.

    Raises:
        ShapeError: there is none.
    """
    found = []
    for shape in shapes_of(num_workers, num_parts):
        try:
            found.append(predict(model, shape, num_parts, schedule))
        except ShapeError:
            continue
    if not found:
        raise ShapeError(
            f"{len(model.layers) - model.num_frozen} layers are left for "
            f"{num_workers} workers with {num_parts} microbatches: freeze fewer, or "
            "take a number of microbatches that more replicas divide"
        )
    return found


def _frozen(cost: StageCost, forward_s: float) -> StageCost:
    """Return the cost of a stage that has forwards alone, and keeps nothing."""
    return replace(
        cost,
        forward_s=forward_s,
        input_grad_s=0.0,
        weight_grad_s=0.0,
        input_grad_bytes=0,
        activation_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        update_s=0.0,
    )


# PipeTransformer's own partition and pipeline lengths, for comparison.
#
#     sizes    0.74 2.36 4.72 2.36 │ 4.72 2.36 │ ...       K devices, from the front
#                                  └ the next unit would pass mean + variance
#
# Source: the released code of PipeTransformer (ICML 2021); Algorithm 1 of its paper. It
# counts parameters alone; `hocket.planner.balance` cuts by measured seconds, exactly.
# With `balance="greedy"`, a run cuts and shortens its pipeline by these rules.

Balance = Literal["exact", "greedy"]
FROZEN_SHARE: Final = 1 / 6  # the memory of a frozen layer relative to an active one


def greedy(
    sizes: Sequence[float], num_devices: int, frozen_size: float = 0.0
) -> list[int]:
    """Return how many units each device gets.

    Args:
        sizes: the units' sizes; PipeTransformer counts millions of parameters.
        num_devices: devices; the last takes all that is left.
        frozen_size: the size of the frozen part, which the first device runs: it counts
            for a sixth, so that fewer units fit beside it. The released code has the
            rule, and calls it with no frozen part at all.

    >>> greedy([1.0, 2.0, 1.0, 2.0, 1.0], 2)
    [2, 3]
    """
    counts, begin = [], 0
    for device in range(num_devices - 1):
        left = sizes[begin:]
        num_left = num_devices - device
        most = (sum(left) + (pvariance(left) if left else 0.0)) / num_left
        load = frozen_size * FROZEN_SHARE if device == 0 else 0.0
        end = begin
        while end < len(sizes) and load + sizes[end] < most:
            load += sizes[end]
            end += 1
        counts.append(end - begin)
        begin = end
    return [*counts, len(sizes) - begin]


def greedy_boundaries(
    sizes: Sequence[float], num_stages: int, num_frozen: int = 0
) -> tuple[int, ...]:
    """Return the units at which stages 1, 2, ... begin, behind frozen units.

    Each stage gets a unit, also where the rule alone leaves a device without.

    Args:
        sizes: the units' sizes, in millions of parameters.
        num_stages: the stages that train.
        num_frozen: the units at the front that are frozen.

    Raises:
        ShapeError: there are fewer units left than stages.

    >>> greedy_boundaries([1.0, 1.0, 2.0, 1.0, 2.0, 1.0], 2, num_frozen=1)
    (3,)
    >>> greedy_boundaries([9.0, 1.0, 1.0], 2)  # all are below mean + variance
    (2,)
    """
    num_left = len(sizes) - num_frozen
    if num_left < num_stages:
        raise ShapeError(
            f"{num_left} layers of {len(sizes)} are left to train, fewer than "
            f"{num_stages} stages: take fewer stages, or freeze fewer layers"
        )
    counts = greedy(sizes[num_frozen:], num_stages, sum(sizes[:num_frozen]))
    begins: list[int] = []
    for stage, place in enumerate(accumulate(counts[:-1]), start=1):
        least = begins[-1] + 1 if begins else 1
        begins.append(min(max(place, least), num_left - num_stages + stage))
    return tuple(num_frozen + begin for begin in begins)


def largest_part(sizes: Sequence[float], num_devices: int) -> float:
    """Return the size of the largest part that `greedy` makes."""
    largest, begin = 0.0, 0
    for count in greedy(sizes, num_devices):
        largest = max(largest, sum(sizes[begin : begin + count]))
        begin += count
    return largest


def halved(sizes: Sequence[float], num_devices: int, most: float) -> int:
    """Return the shortest pipeline by halving whose parts are no larger than `most`.

    Args:
        sizes: the units that still train.
        num_devices: devices now.
        most: the largest part of the first pipeline, with nothing frozen.
    """
    while num_devices >= 2 and largest_part(sizes, num_devices // 2) <= most:
        num_devices //= 2
    return num_devices
