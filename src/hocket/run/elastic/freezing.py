"""Freezes layers between steps: rank 0 decides, all workers follow at the same step.

rank 0    policy ─▶ 6 layers ─▶ shape 2x2 ─┐ broadcast
all                                        └▶ cut again, and go on
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import count, takewhile
from time import perf_counter
from typing import Any
from warnings import warn

from torch import Tensor, nn

from hocket.errors import CheckpointError, HocketError, RunError
from hocket.freeze.cache.payoff import CacheCosts
from hocket.freeze.forecast import Stretch
from hocket.freeze.policy import Decider, Measures
from hocket.freeze.shapes import PipelineShape, Prediction
from hocket.run.checkpoint.format.manifest import FreezingRecord
from hocket.run.cluster.store.values import decode, encode
from hocket.run.cluster.world import World
from hocket.run.diagnostics.job_folder import Json
from hocket.run.elastic.cache.cached_prefix import CachedPrefix
from hocket.run.elastic.measures import LayerMeasure
from hocket.run.elastic.reshape import Reshaper, learning_rate
from hocket.run.elastic.shape_choice import (
    FreezingOptions,
    Present,
    ShapeChoice,
    refuse_unfit,
    shape_of,
)
from hocket.run.engine.executor import Executor, PlayedLayout

log = logging.getLogger(__name__)


class FreezingWarning(UserWarning):
    """The policy is not asked, so that nothing freezes; training goes on."""


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
        epoch_steps: the steps of the present loader; 0: unknown.

    Raises:
        ConfigError, FitError: a shape is not possible, or does not fit the memory.
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
        self._choice = ShapeChoice(
            options, self._edges, reshaper, first, world.world_size
        )
        # Rank 0 decides here, too: memory_bytes may differ, as a host's own.
        self._from_rank_0(
            lambda: refuse_unfit(options, self._choice, first, len(edges)),
            "first layout",
        )
        self._last_step = 0  # before which the policy was asked
        self._num_before = 0  # frozen layers before a load
        self._is_warned = False  # that no epoch ends
        self.num_frozen = 0
        self.epoch_ended = False
        self.epoch_end = self.epoch_steps = 0
        self.cache: CachedPrefix | None = None  # keeps the frozen layers' outputs
        measure.start(first)

    def begin_epoch(self, step: int, num_steps: int) -> None:
        """Note the steps of a loader; 0: unknown.

        Args:
            step: the number of the next step.
            num_steps: the loader's.
        """
        self.epoch_end, self.epoch_steps = step + num_steps, num_steps

    def warn_of_no_epoch(self) -> None:
        """Warn on rank 0, once, before a step without a loader, which ends no epoch.

        Warns:
            FreezingWarning: the policy is asked at the ends of epochs.
        """
        policy = self._options.policy
        if policy.every_steps is not None or self.epoch_ended or self._is_warned:
            return
        self._is_warned = True
        if self._world.rank == 0:
            name = type(policy).__name__
            warn(
                f"{name} is asked at the ends of epochs, and step() ends none, so that "
                "no layer freezes: give it every_steps=, such as every_steps=200; or "
                "train from a loader, to its end, with train()",
                FreezingWarning,
                stacklevel=3,  # the caller of step()
            )

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
            What is played from now on: by the same executor if nothing changes.

        Raises:
            RunError: the policy, or the choice of a shape, has failed on rank 0, where
                its own error is raised.
        """
        rate = learning_rate(now, self._world)
        measured = self._measure.take(now, batch)
        steps_left, until = self._steps_left(step)
        self._last_step = step

        def choose() -> Json:
            wanted = self._decider.ask(step, rate, measured)
            costs = None if self.cache is None else self.cache.costs
            present = self._present(now, steps_left, costs)
            num_frozen, chosen = self._choice.with_most_frozen(wanted, present)
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

        num_frozen, *answer = self._from_rank_0(choose, f"layers to freeze at {step}")
        chosen = _prediction(*answer)
        played = self._cut(now, num_frozen, chosen, step)
        if played is now and num_frozen and self.cache is not None:
            played = self._reshaper.priced_again(now, chosen.prefix_s)
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
        stages = executor.plan.program.stages
        for stage, updater in executor.updaters.items():
            if not stages[stage].trainable and not skipped:
                updater.average()

    def ahead(self, step: int, num_steps: int, now: PlayedLayout) -> Iterator[Stretch]:
        """Predict the layouts from a step on: what the policy will decide.

        A policy that measures is taken to freeze nothing more. Before a change of
        layout was measured, none takes time beside its messages; before the cache was,
        it is taken to pay (`Frozen.unmeasured_cache`).

        Args:
            step: the number of the next step.
            num_steps: the steps of the whole run.
            now: what is played.
        """
        shape = shape_of(now)
        yield Stretch(step, shape.num_replicas, now.plan.predicted.step_s)
        if self._options.policy.measures is not Measures.NOTHING:
            return
        decider, before = copy(self._decider), None
        present = self._present(
            now, cache=None if self.cache is None else self.cache.costs
        )
        last = self._last_step
        for at in takewhile(lambda x: x < num_steps, self._decisions(step)):
            steps_left, _ = self._steps_left(at, last, self._loader_end(at))
            present, last = replace(present, steps_left=steps_left), at
            try:
                asked = decider.ask(at), present.num_frozen, present.cache
                decider.num_frozen = present.num_frozen
                if asked == before:
                    continue  # nothing changes
                before = asked
                num, found = self._choice.with_most_frozen(asked[0], present)
            except HocketError:  # raised again when it is decided
                return
            change_s = None
            if (num, found.shape) != (present.num_frozen, present.shape):
                change_s = self._choice.transition_s(num, found, present, unknown_s=0.0)
            yield Stretch(at, found.shape.num_replicas, found.step_s, change_s)
            decider.num_frozen, cache = num, present.cache
            if cache is not None and num:  # is kept from now on
                model = self._reshaper.costs_of(self._edges[num])
                known = cache if cache.boundary else model.unmeasured_cache
                cache = known._replace(boundary=model.num_frozen)
            shape, boundaries = found.shape, found.boundaries
            present = Present(shape, boundaries, num, cache=cache)

    def _decisions(self, step: int) -> Iterator[int]:
        """Yield the steps before which the policy will be asked, for ever."""
        every = self._options.policy.every_steps
        if every is None:
            first, every = self.epoch_end, self.epoch_steps
        else:
            first = -(-step // every) * every
        if every:
            yield from (at for at in count(first, every) if at != self._last_step)

    def record(self, played: PlayedLayout) -> FreezingRecord:
        """Return the frozen layers and the policy's state; rank 0's is right."""
        parameters: tuple[str, ...] = ()
        if self.num_frozen:
            known = self._reshaper.net.outline.state.tensors
            parameters = tuple(
                name
                for name in played.plan.frozen_names
                if name in known
                and isinstance(known[name], nn.Parameter)
                and known[name].requires_grad
            )
        shape = shape_of(played)
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
                present = self._present(now, self._steps_left(step)[0])
                return ["", *_as_json(self._choice.saved_shape(saved, present))]
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
                answer = {"chosen": json.dumps(choose())}  # fails here, if it does
            except Exception as caught:  # a policy may raise anything
                error, answer = caught, {"error": f"{type(caught).__name__}: {caught}"}
        answer = self._world.broadcast_json(answer, name=name)
        if error is not None:
            raise error
        if "error" in answer:
            raise RunError(f"rank 0 cannot choose the {name}: {answer['error']}")
        return json.loads(answer["chosen"])

    def _cut(
        self, now: PlayedLayout, num_frozen: int, chosen: Prediction, step: int
    ) -> PlayedLayout:
        self._decider.num_frozen = num_frozen
        present = self._present(now)
        if num_frozen == self.num_frozen and chosen.shape == present.shape:
            return now
        moved = self._choice.moved_bytes(num_frozen, chosen, present)
        begin_s = perf_counter()
        self.num_frozen = num_frozen
        played = self._reshaper.reshape(now, chosen, self._edges[num_frozen], step)
        self._choice.transition_costs.add(moved, perf_counter() - begin_s)
        return played

    def _present(
        self, now: PlayedLayout, steps_left: int = 1, cache: CacheCosts | None = None
    ) -> Present:
        shape, boundaries = shape_of(now), now.plan.boundaries
        return Present(shape, boundaries, self.num_frozen, steps_left, cache)

    def _loader_end(self, step: int) -> int:
        """Return where the loader of a later step ends, if all are equally long."""
        if step < self.epoch_end or not self.epoch_steps:
            return self.epoch_end
        num_over = (step - self.epoch_end) // self.epoch_steps
        return self.epoch_end + (num_over + 1) * self.epoch_steps

    def _steps_left(
        self, step: int, last_step: int | None = None, epoch_end: int | None = None
    ) -> tuple[int, str]:
        """Return the steps over which a shape must pay, and when they end.

        Args:
            step: before which it is chosen.
            last_step: before which the policy is asked the time before; the last time
                that it was when not given.
            epoch_end: the step after which the loader ends, 0 if unknown; that of the
                present loader when not given.
        """
        last_step = self._last_step if last_step is None else last_step
        epoch_end = self.epoch_end if epoch_end is None else epoch_end
        if self._options.num_run_steps is not None:
            return max(1, self._options.num_run_steps - step), "the run ends"
        every = self._options.policy.every_steps
        decision = step - last_step if every is None else every
        if epoch_end - step > decision:
            return epoch_end - step, "the loader ends"
        return decision, "the next decision"


def _as_json(chosen: Prediction) -> list[Json]:
    return [[*chosen.shape], [*chosen.boundaries], chosen.prefix_s]


def _prediction(
    shape: Sequence[int], boundaries: Sequence[int], prefix_s: float
) -> Prediction:
    return Prediction(PipelineShape(*shape), tuple(boundaries), 0.0, 0, prefix_s)


def _no_tensor(name: str, on_host: bool) -> Tensor:
    raise CheckpointError(f"the policy's state names a tensor, {name}")
