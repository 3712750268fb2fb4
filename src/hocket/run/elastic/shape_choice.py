"""Rank 0 chooses the stages and replicas for a number of frozen layers.

shapes given                      those
balance="greedy"                  half the stages each time, as PipeTransformer does it
otherwise                         the fastest, as predicted

What will not fit the memory is refused before the first step:

any policy                        the first layout is checked
Listed({2: 6, 4: 0})              also 6 and then 0 frozen layers: an allowed shape fits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from statistics import mean
from typing import Any, Final

from hocket.core.costs import Link
from hocket.errors import ConfigError, FitError, ShapeError
from hocket.freeze.cache.payoff import CacheCosts
from hocket.freeze.policy import LayerObservation, Listed, Policy
from hocket.freeze.shapes import (
    Frozen,
    PipelineShape,
    Prediction,
    halved_shape,
    next_shape,
    possible,
    predict,
    shapes_of,
    unfit,
)
from hocket.run.checkpoint.format.manifest import FreezingRecord
from hocket.run.elastic.reshape import Reshaper
from hocket.run.engine.executor import PlayedLayout

Shapes = Mapping[int, tuple[int, int]]
_FIRST_S: Final = 2.0  # assumed until one is measured


# Predicts how long a change of layout takes, from those that were measured.
#
#     seconds = fixed + bytes that move / bandwidth
#
# The fixed part (cutting the net again, connections) is the mean of what the measured
# transitions took beside their messages. No microbatch is under way, since a step ends
# before the layout changes, so none adds to it.
@dataclass(slots=True)
class TransitionCosts:
    """The measured transitions of a run.

    Args:
        link: between devices.
    """

    link: Link
    _fixed_s: list[float] = field(default_factory=list)

    def add(self, moved_bytes: int, seconds: float) -> None:
        """Add a transition that was measured."""
        self._fixed_s.append(max(0.0, seconds - self.link.occupied_s(moved_bytes)))

    def seconds(self, moved_bytes: int, unknown_s: float = _FIRST_S) -> float:
        """Return the predicted seconds of a transition.

        Args:
            moved_bytes: the bytes that workers receive.
            unknown_s: the fixed part until one was measured.
        """
        fixed_s = mean(self._fixed_s) if self._fixed_s else unknown_s
        return fixed_s + self.link.occupied_s(moved_bytes)


def moved_bytes(
    model: Frozen,
    before: Sequence[range],
    after: Sequence[range],
    num_workers: int,
) -> int:
    """Return the bytes that workers receive which they did not hold.

    Layers that train move with their optimizer's state.

    Args:
        model: the layers, and how many of them are frozen afterwards.
        before: the layers of each device of a replica.
        after: the layers of each device of a replica, afterwards.
        num_workers: all workers; a worker's device is its rank modulo the devices.
    """
    total = 0
    for rank in range(num_workers):
        had, needs = before[rank % len(before)], after[rank % len(after)]
        weights = {
            each.name: each.num_bytes
            + (0 if layer < model.num_frozen else each.optimizer_bytes)
            for layer in needs
            if layer not in had
            for each in model.layers[layer].weights
        }
        total += sum(weights.values())
    return total


@dataclass(frozen=True, slots=True)
class FreezingOptions:
    """What the user says of freezing.

    Args:
        policy: what decides.
        shapes: stages and replicas from so many frozen layers on; None: chosen by the
            predicted seconds.
        memory_bytes: each device's memory; None: enough.
        num_run_steps: the steps of the whole run; None: unknown.
    """

    policy: Policy[Any]
    shapes: Shapes | None = None
    memory_bytes: int | None = None
    num_run_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """What is played when a shape is chosen.

    Args:
        shape: stages and replicas.
        boundaries: where its stages begin.
        num_frozen: the layers that are frozen.
        steps_left: the steps over which another shape must save what it costs.
        cache: what the cache takes; None where frozen layers compute.
    """

    shape: PipelineShape
    boundaries: tuple[int, ...]
    num_frozen: int
    steps_left: int = 1
    cache: CacheCosts | None = None


@dataclass(eq=False)
class ShapeChoice:
    """Chooses shapes by the user's mapping, or by the predicted seconds.

    Args:
        options: the user's.
        edges: for 0, 1, ... frozen layers, the place of the first that still trains.
        reshaper: knows the layers' costs.
        first: what is played at first.
        num_workers: all workers.

    Raises:
        ConfigError: a shape is not possible.
    """

    options: FreezingOptions
    edges: Sequence[int]
    reshaper: Reshaper
    first: InitVar[PlayedLayout]
    num_workers: int

    def __post_init__(self, first: PlayedLayout) -> None:
        """Refuse shapes that are not possible."""
        self._first_shape = shape_of(first)
        self.transition_costs = TransitionCosts(first.plan.costs.link)
        shapes, num_parts = self.options.shapes or {}, self.reshaper.job.num_parts
        refuse_shapes(shapes, self.num_workers, num_parts)

    def with_most_frozen(
        self, num_frozen: int, present: Present
    ) -> tuple[int, Prediction]:
        """Return the largest number of layers that can freeze, and the shape.

        At most `num_frozen`; fewer where a stage would otherwise have no layer.

        Raises:
            ConfigError, FitError: see `shape`.
            ShapeError: there are fewer layers than stages.
        """
        while True:
            try:
                return num_frozen, self.shape(num_frozen, present)
            except ShapeError:
                if num_frozen <= present.num_frozen:
                    raise
                num_frozen -= 1

    def shape(self, num_frozen: int, present: Present) -> Prediction:
        """Return the shape for so many frozen layers.

        Raises:
            ConfigError: layers would train again, and do not fit the memory.
            FitError: no shape that may be taken fits.
            ShapeError: there are fewer layers than stages.
        """
        return next_shape(
            present.shape,
            self._fitting(num_frozen, present),
            steps_left=present.steps_left,
            transition_s=lambda x: self.transition_s(num_frozen, x, present),
        )

    def saved_shape(self, saved: FreezingRecord | None, present: Present) -> Prediction:
        """Return the shape of a checkpoint; another where it cannot be formed here.

        Args:
            saved: the checkpoint's; None: it is of a run without freezing.
            present: what is played.
        """
        num_frozen, job = 0 if saved is None else len(saved.layers), self.reshaper.job
        if saved is not None and self.options.shapes is None:
            shape = PipelineShape(*saved.shape)
            if shape in shapes_of(self.num_workers, job.num_parts):
                model = self._model(num_frozen, present)
                found = predict(model, shape, job.num_parts, job.schedule)
                most = self.options.memory_bytes
                if most is None or found.peak_bytes <= most:
                    return found
        return self.shape(num_frozen, present)

    def moved_bytes(self, num_frozen: int, option: Prediction, present: Present) -> int:
        """Return the bytes that workers receive when a shape is taken."""
        model = self._model(num_frozen, present)
        return moved_bytes(
            model,
            model.layers_on(present.boundaries, present.shape.num_stages),
            model.layers_on(option.boundaries, option.shape.num_stages),
            self.num_workers,
        )

    def transition_s(
        self, num_frozen: int, option: Prediction, present: Present, **unknown: float
    ) -> float:
        """Return the predicted seconds until a shape is taken.

        Args:
            num_frozen: the layers that are frozen then.
            option: the shape.
            present: what is played before.
            **unknown: see `TransitionCosts.seconds`.
        """
        if num_frozen == present.num_frozen and option.shape == present.shape:
            return 0.0
        moved = self.moved_bytes(num_frozen, option, present)
        return self.transition_costs.seconds(moved, **unknown)

    def possible(self, num_frozen: int, present: Present) -> list[Prediction]:
        """Return the predictions of all shapes, whether they may be taken or not."""
        model, job = self._model(num_frozen, present), self.reshaper.job
        if not job.recut:
            return [self._predict(self._first_shape, num_frozen, present)]
        found = possible(model, self.num_workers, job.num_parts, job.schedule)
        if num_frozen != present.num_frozen:
            return found
        now = self._predict(present.shape, num_frozen, present)
        return [now if x.shape == now.shape else x for x in found]

    def _fitting(self, num_frozen: int, present: Present) -> list[Prediction]:
        """Return the predictions of the shapes that may be taken and fit the memory."""
        asked, most = self._asked(num_frozen, present), self.options.memory_bytes
        if most is None:
            return asked
        fits = [x for x in asked if x.peak_bytes <= most]
        if fits:
            return fits
        error = unfit(asked, self.possible(num_frozen, present), num_frozen, most)
        if num_frozen >= present.num_frozen:
            raise error
        raise ConfigError(
            f"{type(self.options.policy).__name__} unfreezes layers "
            f"({present.num_frozen} to {num_frozen} frozen), and there is no way back "
            f"to where they fit: {error}, or a policy that keeps them frozen (such as "
            "unfreeze_at=None)"
        ) from error

    def _asked(self, num_frozen: int, present: Present) -> list[Prediction]:
        """Return the predictions of the shapes that may be taken."""
        job = self.reshaper.job
        if self.options.shapes is None and job.balance == "exact":
            return self.possible(num_frozen, present)
        shape = self._first_shape
        if self.options.shapes is None:
            model = self._model(num_frozen, present)
            falls = num_frozen < present.num_frozen
            longest = shape if falls else present.shape
            shape = halved_shape(model, longest, shape, job.num_parts)
        for least, given in sorted((self.options.shapes or {}).items()):
            if least <= num_frozen:
                shape = PipelineShape(*map(int, given))  # also numpy integers
        return [self._predict(shape, num_frozen, present)]

    def _predict(
        self, shape: PipelineShape, num_frozen: int, present: Present
    ) -> Prediction:
        """Return the prediction of a shape; of the present layout, as it is cut."""
        model, job = self._model(num_frozen, present), self.reshaper.job
        if (shape, num_frozen) == (present.shape, present.num_frozen):
            model = replace(model, kept=present.boundaries)
        return predict(model, shape, job.num_parts, job.schedule)

    def _model(self, num_frozen: int, present: Present) -> Frozen:
        model = self.reshaper.costs_of(self.edges[num_frozen])
        return replace(model, cache=present.cache)


def refuse_shapes(shapes: Shapes, num_workers: int, num_parts: int) -> None:
    """Refuse shapes that do not divide the workers or the microbatches.

    Args:
        shapes: stages and replicas, by number of frozen layers.
        num_workers: all workers.
        num_parts: the microbatches of the whole batch.

    Raises:
        ConfigError: names all shapes that are not possible, and those that are.
    """
    faults = [
        f"{PipelineShape(*shape)} from {least} frozen layers on"
        for least, shape in sorted(shapes.items())
        if shape[0] * shape[1] != num_workers or num_parts % shape[1]
    ]
    if faults:
        fit = map(str, shapes_of(num_workers, num_parts))
        raise ConfigError(
            f"shapes (stages x replicas): {', '.join(faults)} cannot be: {num_workers} "
            f"workers with {num_parts} microbatches in the whole batch can be "
            f"{', '.join(fit)}"
        )


def shape_of(played: PlayedLayout) -> PipelineShape:
    """Return the stages and replicas of what is played."""
    return PipelineShape(played.layout.num_devices, played.layout.num_replicas)


def refuse_unfit(
    options: FreezingOptions, choice: ShapeChoice, first: PlayedLayout, num_layers: int
) -> None:
    """Refuse a first layout, or listed numbers of frozen layers, that do not fit.

    Args:
        options: the user's.
        choice: chooses the shapes.
        first: what is played at first.
        num_layers: layers that may freeze.

    Raises:
        FitError: the first layout does not fit, or no allowed shape fits a listed
            number of frozen layers.
        ConfigError: the list lets layers train again, and then no allowed shape fits.
        ShapeError: there are fewer layers than stages.
    """
    if options.memory_bytes is None:
        return
    present = Present(shape_of(first), first.plan.boundaries, 0)
    _refuse_first(first, choice.possible(0, present), options.memory_bytes)
    policy = options.policy
    if not isinstance(policy, Listed):  # only a list is known in advance
        return
    # The first decision chooses a shape, too, even if the list does not name it.
    for number in sorted({1, *policy.num_frozen}):
        seen = LayerObservation(number, 0, num_layers, present.num_frozen)
        wanted = policy.decide(None, seen)
        num_frozen, found = choice.with_most_frozen(wanted, present)
        present = Present(found.shape, found.boundaries, num_frozen)


def _refuse_first(
    first: PlayedLayout, possible: Sequence[Prediction], memory_bytes: int
) -> None:
    """Refuse a layout that needs more than the memory, as planned or as predicted.

    The first decision compares predictions, which are a few bytes off the plan.
    """
    shape, planned = shape_of(first), first.plan.predicted
    needs = [(round(planned.peak_bytes(d)), d) for d in range(shape.num_stages)]
    needs += [(x.peak_bytes, x.fullest) for x in possible if x.shape == shape]
    needed_bytes, device = max(needs)
    if needed_bytes <= memory_bytes:
        return
    others = [x for x in possible if x.shape != shape and x.peak_bytes <= memory_bytes]
    way_out = (
        "no other shape fits; give more memory_bytes, more workers, or more "
        "microbatches, which are smaller"
    )
    if others:
        least = min(others, key=lambda x: x.peak_bytes)
        num_replicas = least.shape.num_replicas
        num_parts = first.plan.schedule.program.nets[0].num_microbatches
        way_out = (
            f"begin with {least.shape}, which needs the least, {least.peak_bytes} "
            f"bytes: num_replicas={num_replicas}, num_microbatches="
            f"{num_parts * shape.num_replicas // num_replicas}"
        )
    raise FitError(
        f"the first layout, {shape} (stages x replicas), needs {needed_bytes} bytes on "
        f"device {device}, and memory_bytes is {memory_bytes}: {way_out}",
        device=device,
        needed_bytes=needed_bytes,
        memory_bytes=memory_bytes,
    )
