"""Freezes layers between steps: rank 0 decides, all workers follow at the same step.

rank 0    policy ─▶ 6 layers ─▶ shape 2x2 ─┐ broadcast
all                                        └▶ cut again, and go on
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from hocket.errors import (
    CheckpointError,
    ConfigError,
    FitError,
    HocketError,
    RunError,
    ShapeError,
)
from hocket.freeze.decide import Decider
from hocket.freeze.policy import Policy
from hocket.freeze.shapes import (
    PipelineShape,
    Prediction,
    next_shape,
    possible,
    predict,
)
from hocket.freeze.transition import TransitionCosts, moved_bytes
from hocket.run.checkpoint.format.manifest import FreezingRecord
from hocket.run.checkpoint.format.values import decode, encode
from hocket.run.cluster.world import World
from hocket.run.diagnostics.job_folder import Json
from hocket.run.elastic.measures import LayerMeasure
from hocket.run.elastic.reshape import Reshaper
from hocket.run.engine.executor import Executor, PlayedLayout

log = logging.getLogger(__name__)

Shapes = Mapping[int, tuple[int, int]]


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


class Freezing:
    """Asks the policy when it is time, and has the net cut again.

    Args:
        options: the user's.
        modules: the layers that may freeze, by name.
        edges: for 1, 2, ... frozen layers, the place of the first that still trains.
        measure: measures what the policy looks at.
        reshaper: cuts the net.
        world: the job.
        first: what is played at first.

    Attributes:
        num_frozen: the layers that are frozen now.
        epoch_ended: whether a loader has ended since the policy was last asked.
        epoch_end: the step after which the present loader ends; 0: unknown.
        transition_s: the seconds of the last change of layout.

    Raises:
        ConfigError: a shape is not possible.
    """

    def __init__(
        self,
        options: FreezingOptions,
        modules: Sequence[str],
        edges: Sequence[int],
        measure: LayerMeasure,
        reshaper: Reshaper,
        world: World,
        first: PlayedLayout,
    ) -> None:
        self._options = options
        self._decider = Decider(options.policy, len(edges))
        self._modules = modules[: len(edges)]
        self._edges = (0, *edges)
        self._measure = measure
        self._reshaper = reshaper
        self._world = world
        self._first_shape = _shape_of(first)
        self._costs = TransitionCosts(first.plan.costs.link)
        self._last_step = 0  # before which the policy was asked
        self._num_before = 0  # frozen layers before a load
        self.num_frozen = 0
        self.epoch_ended = False
        self.epoch_end = 0
        self.transition_s = 0.0
        num_parts = reshaper.job.num_parts
        refuse_shapes(options.shapes or {}, world.world_size, num_parts)
        measure.start(first)

    def is_due(self, step: int) -> bool:
        """Return whether the policy is to be asked before a step.

        Args:
            step: the number of the next step.
        """
        epoch_ended, self.epoch_ended = self.epoch_ended, False
        if step == self._last_step:
            return False
        return self._decider.is_due(step, epoch_ended=epoch_ended)

    def follow(self, step: int, now: PlayedLayout, batch: Any) -> PlayedLayout:
        """Ask the policy, and do what it says. Every worker must call this.

        Args:
            step: the number of the next step.
            now: what was played so far.
            batch: the batch of the next step.

        Returns:
            What is played from now on: the same if nothing changes.

        Raises:
            RunError: the policy, or the choice of a shape, has failed on rank 0, where
                its own error is raised.
        """
        updaters = now.executor.updaters.values()
        rate = next((x.rates()[0] for x in updaters if x.rates()), 0.0)
        measured = self._measure.take(now, batch)
        steps_left, until = self._steps_left(step)
        self._last_step = step

        def choose() -> Json:
            wanted = self._decider.ask(step, rate, measured)
            num_frozen, chosen = self._chosen(wanted, now, steps_left)
            log.info(
                "before step %d: %d layers are frozen, %s stages x replicas, chosen "
                "for the %d steps until %s",
                step,
                num_frozen,
                chosen.shape,
                steps_left,
                until,
            )
            return [num_frozen, *_as_json(chosen)]

        num_frozen, *chosen = self._from_rank_0(choose, f"layers to freeze at {step}")
        played = self._cut(now, num_frozen, _prediction(*chosen), step)
        self._reshaper.keep()
        self._measure.start(played)
        return played

    def after_step(self, executor: Executor, step: int, *, skipped: bool) -> None:
        """Move the averages of frozen weights, which no update moves.

        Args:
            executor: this worker's.
            step: the step's number.
            skipped: whether it updated nothing.
        """
        # Known before the loader ends: a checkpoint may be saved in between.
        self.epoch_ended |= step + 1 == self.epoch_end
        frozen = executor.updaters.get(0)
        if self.num_frozen and frozen is not None and not skipped:
            frozen.average()

    def record(self, played: PlayedLayout) -> FreezingRecord:
        """Return the frozen layers and the policy's state; rank 0's is right."""
        parameters: tuple[str, ...] = ()
        if self.num_frozen:
            known = self._reshaper.net.outline.state.tensors
            parameters = tuple(
                name
                for name in played.plan.state_names[0]
                if name in known
                and isinstance(known[name], nn.Parameter)
                and known[name].requires_grad
            )
        shape = _shape_of(played)
        return FreezingRecord(
            layers=tuple(self._modules[: self.num_frozen]),
            parameters=parameters,
            shape=(shape.num_stages, shape.num_replicas),
            policy=type(self._options.policy).__name__,
            number=self._decider.number,
            state=encode(self._decider.state, "the policy's state", {}),
            last_step=self._last_step,
            epoch_ended=self.epoch_ended,
        )

    def watched(self, executor: Executor) -> Mapping[str, Tensor]:
        """Return what the policy measured of this worker's weights, by name."""
        return self._measure.tensors(executor)

    def enter(
        self, saved: FreezingRecord | None, now: PlayedLayout, step: int
    ) -> PlayedLayout:
        """Cut the net as it was saved; every worker must call this.

        It keeps the saved shape where these workers can form it.

        Args:
            saved: the checkpoint's; None: it is of a run without freezing.
            now: what was played so far.
            step: the number of the next step.

        Raises:
            CheckpointError: other layers were frozen, or no shape fits.
        """
        layers = () if saved is None else saved.layers
        if layers != tuple(self._modules[: len(layers)]):
            raise CheckpointError(
                f"the checkpoint has frozen {', '.join(layers)}, and here the layers "
                f"that freeze are {', '.join(self._modules)}: give the policy the same "
                "layers=. Nothing was loaded"
            )

        def choose() -> Json:
            try:
                return ["", *_as_json(self._saved_shape(saved, now, step))]
            except HocketError as error:
                return [str(error)]

        fault, *chosen = self._from_rank_0(choose, "layers of a checkpoint")
        if fault:
            raise CheckpointError(f"{fault}. Nothing was loaded")
        self._num_before = self.num_frozen
        return self._cut(now, len(layers), _prediction(*chosen), step)

    def leave(self, before: PlayedLayout, after: PlayedLayout) -> None:
        """Undo `enter`."""
        self._reshaper.undo(before, after)
        self.num_frozen = self._num_before

    def resume(
        self,
        saved: FreezingRecord | None,
        played: PlayedLayout,
        watched: Mapping[str, Tensor],
    ) -> None:
        """Restore the policy's state, once the weights are restored.

        Another policy than the saved one begins again, with the layers that are frozen.
        """
        self._reshaper.keep()
        policy = self._options.policy
        self._decider = Decider(policy, len(self._modules), self.num_frozen)
        self._last_step, self.epoch_ended = 0, False
        self.transition_s = 0.0
        if saved is not None:
            self._decider.number = saved.number
            self._last_step = saved.last_step
            self.epoch_ended = saved.epoch_ended
            if saved.policy == type(policy).__name__:
                self._decider.state = decode(saved.state, _no_tensor)
        self._measure.start(played)
        self._measure.restore(played, watched)

    def _from_rank_0(self, choose: Callable[[], Json], name: str) -> Any:
        """Return what rank 0 chooses; all workers raise if it cannot.

        Raises:
            RunError: rank 0 has raised an error, which it raises itself.
        """
        answer: Any = None
        error: Exception | None = None
        if self._world.rank == 0:
            try:
                answer = {"chosen": choose()}
            except Exception as caught:  # a policy may raise anything
                error, answer = caught, {"error": f"{type(caught).__name__}: {caught}"}
        answer = self._world.broadcast_json(answer, name=name)
        if error is not None:
            raise error
        if "error" in answer:
            raise RunError(f"rank 0 cannot choose the {name}: {answer['error']}")
        return answer["chosen"]

    def _cut(
        self, now: PlayedLayout, num_frozen: int, chosen: Prediction, step: int
    ) -> PlayedLayout:
        self._decider.num_frozen = num_frozen
        if num_frozen == self.num_frozen and chosen.shape == _shape_of(now):
            return now
        begin_s = perf_counter()
        moved = self._moved_bytes(now, num_frozen, chosen)
        self.num_frozen = num_frozen
        played = self._reshaper.reshape(now, chosen, self._edges[num_frozen], step)
        self.transition_s = perf_counter() - begin_s
        self._costs.add(moved, self.transition_s)
        return played

    def _steps_left(self, step: int) -> tuple[int, str]:
        """Return the steps over which a shape must pay, and when they end."""
        if self._options.num_run_steps is not None:
            return max(1, self._options.num_run_steps - step), "the run ends"
        every = self._options.policy.every_steps
        decision = step - self._last_step if every is None else every
        if self.epoch_end - step > decision:
            return self.epoch_end - step, "the loader ends"
        return decision, "the next decision"

    def _chosen(
        self, num_frozen: int, now: PlayedLayout, steps_left: int
    ) -> tuple[int, Prediction]:
        """Return the shape, and how many layers freeze: each stage keeps one."""
        while True:
            try:
                return num_frozen, self._shape(num_frozen, now, steps_left)
            except ShapeError:
                if num_frozen <= self.num_frozen:
                    raise
                num_frozen -= 1

    def _shape(self, num_frozen: int, now: PlayedLayout, steps_left: int) -> Prediction:
        """Return the shape for so many frozen layers.

        Raises:
            ConfigError: layers would train again, and do not fit the memory.
            FitError: no shape fits.
            ShapeError: there are fewer layers than stages.
        """
        job, options = self._reshaper.job, self._options
        model = self._reshaper.costs_of(now.plan, self._edges[num_frozen])
        try:
            if options.shapes is None:
                found = possible(
                    model, self._world.world_size, job.num_parts, job.schedule
                )
            else:
                shape = self._first_shape
                for least in sorted(options.shapes):
                    if least <= num_frozen:
                        shape = PipelineShape(*options.shapes[least])
                found = [predict(model, shape, job.num_parts, job.schedule)]
            return next_shape(
                _shape_of(now),
                found,
                steps_left=steps_left,
                transition_s=lambda x: self._transition_s(now, num_frozen, x),
                memory_bytes=options.memory_bytes,
            )
        except FitError as error:
            if num_frozen >= self.num_frozen:
                raise
            raise ConfigError(
                f"{type(options.policy).__name__} unfreezes layers ({self.num_frozen} "
                f"to {num_frozen} frozen), and there is no way back to where they "
                f"fit: {error}; give more memory_bytes, or a policy that keeps them "
                "frozen (such as unfreeze_at=None)"
            ) from error

    def _saved_shape(
        self, saved: FreezingRecord | None, now: PlayedLayout, step: int
    ) -> Prediction:
        num_frozen = 0 if saved is None else len(saved.layers)
        job, num_workers = self._reshaper.job, self._world.world_size
        if saved is not None and self._options.shapes is None:
            stages, replicas = saved.shape
            if stages * replicas == num_workers and job.num_parts % replicas == 0:
                model = self._reshaper.costs_of(now.plan, self._edges[num_frozen])
                shape = PipelineShape(stages, replicas)
                return predict(model, shape, job.num_parts, job.schedule)
        return self._shape(num_frozen, now, self._steps_left(step)[0])

    def _transition_s(
        self, now: PlayedLayout, num_frozen: int, option: Prediction
    ) -> float:
        if num_frozen == self.num_frozen and option.shape == _shape_of(now):
            return 0.0
        return self._costs.seconds(self._moved_bytes(now, num_frozen, option))

    def _moved_bytes(
        self, now: PlayedLayout, num_frozen: int, option: Prediction
    ) -> int:
        model = self._reshaper.costs_of(now.plan, self._edges[num_frozen])
        return moved_bytes(
            model,
            model.layers_on(now.plan.boundaries, now.layout.num_devices),
            model.layers_on(option.boundaries, option.shape.num_stages),
            self._world.world_size,
        )


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


def _as_json(chosen: Prediction) -> list[Json]:
    return [[*chosen.shape], [*chosen.boundaries]]


def _prediction(shape: Sequence[int], boundaries: Sequence[int]) -> Prediction:
    return Prediction(PipelineShape(*shape), tuple(boundaries), 0.0, 0)


def _shape_of(now: PlayedLayout) -> PipelineShape:
    return PipelineShape(now.layout.num_devices, now.layout.num_replicas)


def _no_tensor(name: str, on_host: bool) -> Tensor:
    raise CheckpointError(f"the policy's state names a tensor, {name}")
