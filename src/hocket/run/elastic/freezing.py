"""Freezes layers between steps: rank 0 decides, all workers follow at the same step.

rank 0    policy ─▶ 6 layers ─▶ shape 2x2 ─┐ broadcast
all                                        └▶ cut again, and go on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

from hocket.errors import ConfigError, ShapeError
from hocket.freeze.decide import Decider
from hocket.freeze.policy import Measures, Policy
from hocket.freeze.shapes import (
    PipelineShape,
    Prediction,
    next_shape,
    possible,
    predict,
)
from hocket.run.cluster.world import World
from hocket.run.diagnostics.job_folder import Json
from hocket.run.elastic.reshape import PlayedLayout, Reshaper
from hocket.run.engine.executor import Executor
from hocket.run.weights.gradient_sums import GradientSums

_FIRST_TRANSITION_S: Final = 2.0  # until one was measured
Shapes = Mapping[int, tuple[int, int]]


class Freezing:
    """Asks the policy when it is time, and has the net cut again.

    Args:
        policy: what decides.
        modules: the layers that may freeze, by name.
        edges: for 1, 2, ... frozen layers, the place of the first that still trains.
        shapes: stages and replicas from so many frozen layers on; None: chosen by the
            predicted seconds.
        memory_bytes: each device's memory; None: enough.
        reshaper: cuts the net.
        world: the job.

    Raises:
        ConfigError: a shape in `shapes` is not possible.
    """

    def __init__(
        self,
        policy: Policy[Any],
        modules: Sequence[str],
        edges: Sequence[int],
        shapes: Shapes | None,
        memory_bytes: int | None,
        reshaper: Reshaper,
        world: World,
    ) -> None:
        self._decider = Decider(policy, len(edges), can_unfreeze=False)
        self._modules = modules[: len(edges)]
        self._edges = (0, *edges)
        self._shapes = shapes
        self._memory_bytes = memory_bytes
        self._reshaper = reshaper
        self._world = world
        self._transition_s = _FIRST_TRANSITION_S
        self._last_step = 0  # at which it was asked
        self.num_followed = 0  # frozen layers of the present cut
        refuse_shapes(shapes or {}, world.world_size, reshaper.job.num_parts)

    @property
    def num_frozen(self) -> int:
        """The layers that are frozen now."""
        return self._decider.num_frozen

    def is_due(self, step: int, *, epoch_ended: bool) -> bool:
        """Return whether the policy is to be asked before a step.

        Args:
            step: the number of the next step.
            epoch_ended: whether a loader has ended before it.
        """
        if step == self._last_step:
            return False
        return self._decider.is_due(step, epoch_ended=epoch_ended)

    def follow(self, step: int, now: PlayedLayout) -> PlayedLayout:
        """Ask the policy, and do what it says. Every worker must call this.

        Args:
            step: the number of the next step.
            now: what was played so far.

        Returns:
            What is played from now on: the same if nothing changes.
        """
        steps_left = step - self._last_step  # as far ahead as it looked back
        self._last_step = step
        rate, measured = self._measured(now.executor)
        decided: Json = None
        if self._world.rank == 0:
            num_frozen, chosen = self._chosen(
                self._decider.ask(step, rate, measured), now, steps_left
            )
            decided = [num_frozen, [*chosen.shape], [*chosen.boundaries]]
        num_frozen, shape, boundaries = self._world.broadcast_json(
            decided, name=f"layers to freeze before step {step}"
        )
        self._decider.num_frozen = num_frozen
        layers = self._edges[num_frozen]
        chosen = Prediction(PipelineShape(*shape), tuple(boundaries), 0.0, 0)
        has_same_shape = chosen.shape == _shape_of(now)
        if num_frozen == self.num_followed and has_same_shape:
            return now
        self.num_followed = num_frozen
        begin_s = perf_counter()
        played = self._reshaper.reshape(now, chosen, layers, step)
        self._transition_s = perf_counter() - begin_s
        self.watch(played.executor)
        return played

    def after_step(self, executor: Executor, *, skipped: bool) -> None:
        """Move the averages of frozen weights, which no update moves.

        Args:
            executor: this worker's.
            skipped: whether the step updated nothing.
        """
        frozen = executor.updaters.get(0)
        if self.num_followed and frozen is not None and not skipped:
            frozen.average()

    def watch(self, executor: Executor) -> None:
        """Begin to add up gradients, if the policy looks at them."""
        if self._decider.policy.measures is Measures.GRADIENTS:
            for updater in executor.updaters.values():
                updater.gradient_sums = GradientSums()

    def _measured(self, executor: Executor) -> tuple[float, tuple[float, ...]]:
        """Return the learning rate and each layer's norm. Every worker must call this.

        Replicas have the same gradients, and each stage those of its own weights.
        """
        updaters = executor.updaters.values()
        rate = next((x.rates()[0] for x in updaters if x.rates()), 0.0)
        if self._decider.policy.measures is Measures.NOTHING:
            return rate, ()
        sums = [x.gradient_sums for x in updaters if x.gradient_sums is not None]
        own: dict[str, Json] = {}
        for x in sums:
            own |= x.take_norms()
        norms: dict[str, float] = {}
        for part in self._world.gather_json(own, "norms of layers"):
            norms |= part
        return rate, tuple(
            sum(x for name, x in norms.items() if name.startswith(f"{module}."))
            for module in self._modules
        )

    def _chosen(
        self, num_frozen: int, now: PlayedLayout, steps_left: int
    ) -> tuple[int, Prediction]:
        """Return the shape, and how many layers freeze: each stage keeps one."""
        while True:
            try:
                return num_frozen, self._shape(num_frozen, now, steps_left)
            except ShapeError:
                if num_frozen <= self.num_followed:
                    raise
                num_frozen -= 1

    def _shape(self, num_frozen: int, now: PlayedLayout, steps_left: int) -> Prediction:
        job, shape = self._reshaper.job, _shape_of(now)
        model = self._reshaper.costs_of(now.plan, self._edges[num_frozen])
        if self._shapes is None:
            return next_shape(
                shape,
                possible(model, self._world.world_size, job.num_parts, job.schedule),
                steps_left=steps_left,
                transition_s=self._transition_s,
                memory_bytes=self._memory_bytes,
            )
        for least in sorted(self._shapes):
            if least <= num_frozen:
                shape = PipelineShape(*self._shapes[least])
        return predict(model, shape, job.num_parts, job.schedule)


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
        fit = [
            str(PipelineShape(num_workers // d, d))
            for d in range(1, num_workers + 1)
            if num_workers % d == 0 and num_parts % d == 0
        ]
        raise ConfigError(
            f"shapes (stages x replicas): {', '.join(faults)} cannot be: {num_workers} "
            f"workers with {num_parts} microbatches in the whole batch can be "
            f"{', '.join(fit)}"
        )


def _shape_of(now: PlayedLayout) -> PipelineShape:
    return PipelineShape(now.layout.num_devices, now.layout.num_replicas)
