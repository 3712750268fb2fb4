"""Predicts candidates: cut, cost, simulate. Shared results are cached.

num_samples ─▶ layers ─▶ boundaries ─▶ stage costs ┐
               trials ─▶ measured in place ────────┤
cluster ─▶ links                                   ├─▶ simulate ─▶ Outcome
schedule's name, shape ─▶ Schedule                 ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError, ShapeError
from hocket.passes.merge_backward import merge_unneeded_splits
from hocket.planner.balance import Balancer
from hocket.planner.candidate import Candidate, MemorySplit, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.correction_cost import NO_CORRECTION, CorrectionCost
from hocket.planner.quick_bound import Placement, StageSums
from hocket.planner.search.bound import bound_s
from hocket.planner.stages import stage_costs
from hocket.planner.trial import (
    NO_TRIALS,
    MeasuredTrials,
    StageSlowdown,
    Trial,
    as_measured,
    nearest,
)
from hocket.planner.work import LayerCost, ModelCosts
from hocket.schedules import SCHEDULES, make_schedule, options_of

_FULL_STEPS: Final = 3
_MORE_STEPS: Final = 2


class Predictor:
    """Predicts candidates for one batch of one model on one cluster.

    Args:
        work: the model's costs.
        cluster: the devices.
        batch_size: samples per step, over all replicas.
        trials: the measured trials on these devices.
        clips: whether updates without a flush need all gradients of their group.
    """

    def __init__(
        self,
        work: ModelCosts,
        cluster: Cluster,
        batch_size: int,
        trials: MeasuredTrials = NO_TRIALS,
        *,
        clips: bool = False,
    ) -> None:
        """Make a predictor with empty caches."""
        self.work = work
        self.cluster = cluster
        self.batch_size = batch_size
        self.trials = trials
        self.clips = clips
        self._layers: dict[int, tuple[LayerCost, ...]] = {}
        self._balancers: dict[int, Balancer] = {}
        self._stages: dict[tuple[int, int, int, bool], StageSums] = {}
        self._placements: dict[tuple[str, int, int], Placement] = {}
        self._least_s: dict[tuple[Candidate, tuple[int, ...]], float] = {}
        self._last_order: tuple[Candidate, Schedule] | None = None

    def with_batch(self, batch_size: int) -> Predictor:
        """Return a predictor for another batch size that shares the caches."""
        other = Predictor(
            self.work, self.cluster, batch_size, self.trials, clips=self.clips
        )
        other._layers, other._balancers = self._layers, self._balancers
        other._stages, other._placements = self._stages, self._placements
        other._last_order = self._last_order
        return other

    def layers(self, num_samples: int) -> tuple[LayerCost, ...]:
        """Return the layers' costs for microbatches of this size."""
        if num_samples not in self._layers:
            self._layers[num_samples] = self.work.layers(num_samples)
        return self._layers[num_samples]

    def boundaries(self, num_samples: int, num_stages: int) -> tuple[int, ...]:
        """Return the balanced cut.

        Raises:
            ShapeError: there are fewer layers than stages.
        """
        if num_samples not in self._balancers:
            layer_s = [x.forward_s + x.backward_s for x in self.layers(num_samples)]
            self._balancers[num_samples] = Balancer(layer_s)
        return self._balancers[num_samples].cut(num_stages)

    def bound_s(self, candidate: Candidate) -> float:
        """Return a lower bound of this candidate's step; see `quick_bound`.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        placement = self._placement_of(candidate)
        stages = self._stages_of(candidate)
        link = self._in_place(candidate).link
        hop_s = link.latency_s + link.occupied_s(stages.least_message_bytes)
        return stages.bound_s(placement, candidate.num_microbatches, hop_s)

    def splits(self, candidate: Candidate) -> bool:
        """Return whether its schedule splits any backward.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return self._placement_of(candidate).splits

    def delay(self, candidate: Candidate) -> int:
        """Return the largest delay of any stage.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return self._placement_of(candidate).delay

    def outcome(self, candidate: Candidate) -> Outcome:
        """Simulate a pipeline and return its outcome.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return self._outcome(candidate, self.timeline(candidate))

    def timeline(self, candidate: Candidate) -> Timeline:
        """Return the timeline of one step; of a flush-free order, of a few.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return simulate(self.schedule(candidate), self.costs(candidate))

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return the order of one step, made for these costs and memory if possible.

        Backwards stay whole if no op waits for their I, as in the runtime.

        If no order fits the memory, it is the one that misses least.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        known = {
            "costs": self.costs(candidate),
            "memory_bytes": self.cluster.memory_bytes,
        }
        taken = SCHEDULES[candidate.schedule].options
        options = {name: value for name, value in known.items() if name in taken}
        if not options:
            return self._order_of(replace(candidate, recomputes=False))
        n = self._num_steps(candidate)
        try:
            made = _made(candidate, options, n)
        except FitError as error:
            options["memory_bytes"] = error.needed_bytes
            made = _made(candidate, options, n)
        return merge_unneeded_splits(made)

    def _order_of(self, candidate: Candidate) -> Schedule:
        """Return a schedule that does not depend on costs; the last one is cached."""
        if self._last_order is None or self._last_order[0] != candidate:
            is_late = self.clips and "late_updates" in options_of(candidate.schedule)
            options = {"late_updates": True} if is_late else {}
            made = _made(candidate, options, self._num_steps(candidate))
            self._last_order = candidate, merge_unneeded_splits(made)
        return self._last_order[1]

    def _num_steps(self, candidate: Candidate) -> int:
        """Return 1; for a flush-free order, enough steps to fill the pipeline."""
        placement = self._placement_of(candidate)
        if not placement.delay:
            return 1
        return _FULL_STEPS + -(-candidate.num_devices // candidate.num_microbatches)

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of its stages and links."""
        cluster = self.cluster
        shape = candidate.num_devices, candidate.num_replicas
        stages = self._corrected(candidate)
        reduce_link = cluster.reduce_link(*shape)
        if cluster.shares_cores:
            stages = tuple(
                reduced_alone(cost, reduce_link, shape[1]) for cost in stages
            )
            reduce_link = Link()
        return replace(
            self._in_place(candidate),
            stages=stages,
            links=cluster.pipeline_links(*shape),
            reduce_link=reduce_link,
        )

    def stage_costs(
        self,
        num_samples: int,
        num_devices: int,
        boundaries: tuple[int, ...],
        *,
        recomputes: bool,
    ) -> tuple[StageCost, ...]:
        """Return the costs of stages that are cut here.

        Args:
            num_samples: samples of each microbatch.
            num_devices: the devices that share the stages.
            boundaries: the layers at which stages 1, 2, ... begin.
            recomputes: whether the stages keep only their inputs.
        """
        stages = self._added(num_samples, boundaries, recomputes=recomputes)
        trial = self._nearest(num_samples, num_devices, len(stages))
        if trial is None:
            return stages
        if trial.is_of(num_samples, num_devices, boundaries):
            pairs = zip(stages, trial.costs.stages, strict=True)
            return tuple(as_measured(cost, trials) for cost, trials in pairs)
        same = self._added(trial.num_samples, trial.boundaries, recomputes=False)
        stretch = StageSlowdown.of(trial, same)
        return tuple(stretch.slowed(cost) for cost in stages)

    def _added(
        self, num_samples: int, boundaries: tuple[int, ...], *, recomputes: bool
    ) -> tuple[StageCost, ...]:
        """Return the sums of layers."""
        return stage_costs(
            self.layers(num_samples),
            boundaries,
            recomputes=recomputes,
            update_s_per_byte=self.work.update_s_per_byte,
        )

    def _nearest(self, *cut: int) -> Trial | None:
        return nearest(self.trials.cuts, *cut)

    def _in_place(self, candidate: Candidate) -> Costs:
        """Return costs measured in place, besides the stages' work."""
        trial = self._nearest(
            candidate.samples_of_microbatch(self.batch_size),
            candidate.num_devices,
            candidate.num_stages,
        )
        if trial is None:
            return Costs((), link=self.cluster.inside)
        if trial.num_devices == 1:  # there were no messages
            return replace(trial.costs, link=self.cluster.inside)
        return trial.costs

    def _outcome(self, candidate: Candidate, timeline: Timeline) -> Outcome:
        program = timeline.schedule.program
        costs = self._corrected(candidate)
        placement, correction = self._placement_of(candidate), self.work.correction
        step_s = self._step_s(candidate, timeline)
        num_samples = candidate.samples_of_microbatch(self.batch_size)
        gradient_bytes = sum(cost.gradient_bytes for cost in costs)
        traffic = timeline.traffic
        is_message = traffic.from_device != traffic.to_device
        return Outcome(
            candidate,
            step_s,
            self.batch_size / step_s,
            _bubble(program, costs, step_s),
            _memory(timeline, costs, placement, correction),
            self.cluster.memory_bytes,
            int(traffic.num_bytes[is_message].sum()) // program.num_steps,
            gradient_bytes if candidate.num_replicas > 1 else 0,
            self.boundaries(num_samples, candidate.num_stages),
            self._least_of(candidate, program),
            placement.delay,
            placement.versions_with(correction),
        )

    def _step_s(self, candidate: Candidate, timeline: Timeline) -> float:
        """Return what one more step adds to a full flush-free pipeline."""
        schedule = timeline.schedule
        num_steps = schedule.program.num_steps
        if num_steps == 1:
            return timeline.makespan_s
        more = schedule.with_num_steps(num_steps + _MORE_STEPS)
        longer_s = simulate(more, self.costs(candidate)).makespan_s
        return (longer_s - timeline.makespan_s) / _MORE_STEPS

    def _stages_of(self, candidate: Candidate) -> StageSums:
        num_samples = candidate.samples_of_microbatch(self.batch_size)
        p, recomputes = candidate.num_devices, candidate.recomputes
        key = num_samples, p, candidate.num_stages, recomputes
        if key not in self._stages:
            boundaries = self.boundaries(num_samples, candidate.num_stages)
            costs = self.stage_costs(num_samples, p, boundaries, recomputes=recomputes)
            self._stages[key] = StageSums(costs)
        return self._stages[key]

    def _corrected(self, candidate: Candidate) -> tuple[StageCost, ...]:
        """Return its stages' costs with the correction's memory."""
        stages, correction = self._stages_of(candidate).costs, self.work.correction
        if correction == NO_CORRECTION:
            return stages
        delays = self._placement_of(candidate).delays
        return tuple(map(correction.added_to, stages, delays))

    def _least_of(self, candidate: Candidate, program: Program) -> float:
        """Return a bound for all schedules of the same work."""
        placement = self._placement_of(candidate)
        if placement.delay:
            stages = self._stages_of(candidate)
            return stages.work_s(placement, candidate.num_microbatches)
        devices = tuple(stage.device for stage in program.stages)
        key = replace(candidate, schedule=""), devices
        if key not in self._least_s:
            costs = _as_if_whole(self.costs(candidate))
            self._least_s[key] = bound_s(program, costs)
        return self._least_s[key]

    def _placement_of(self, candidate: Candidate) -> Placement:
        """Return the schedule's placement, from as few microbatches as possible."""
        name, p, v = (
            candidate.schedule,
            candidate.num_devices,
            candidate.stages_per_device,
        )
        if (name, p, v) not in self._placements:
            schedule = _smallest(name, p, v, 1)
            if any(stage.delay for stage in schedule.program.stages):
                m = schedule.program.num_microbatches_of(0)
                schedule = _smallest(name, p, v, _FULL_STEPS + -(-p // m))
            program = schedule.program
            if not all(stage.trainable for stage in program.stages):
                raise ShapeError(f"{name} does not train all of its stages")
            if len(program.nets) > 1:
                raise ShapeError(f"{name} holds several nets: a plan is of one model")
            self._placements[name, p, v] = Placement.of(schedule)
        return self._placements[name, p, v]


def reduced_alone(cost: StageCost, link: Link, num_replicas: int) -> StageCost:
    """Return a stage's cost if its lane does nothing else during reductions."""
    ring_s = link.ring_s(cost.gradient_bytes, num_replicas)
    return replace(cost, update_s=cost.update_s + ring_s)


def _as_if_whole(costs: Costs) -> Costs:
    """Return costs whose I and W take no longer than B."""
    stages = tuple(replace(cost, split_s=0.0) for cost in costs.stages)
    return replace(costs, stages=stages)


def _made(candidate: Candidate, options: Mapping[str, Any], num_steps: int) -> Schedule:
    return make_schedule(
        candidate.schedule,
        num_devices=candidate.num_devices,
        num_microbatches=candidate.num_microbatches,
        num_replicas=candidate.num_replicas,
        stages_per_device=candidate.stages_per_device,
        num_steps=num_steps,
        **options,
    )


def _smallest(
    name: str, num_devices: int, stages_per_device: int, num_steps: int
) -> Schedule:
    """Return a schedule of this shape with few microbatches."""
    counts = (num_devices, 2 * num_devices, 4 * num_devices, 1)
    for num_microbatches in counts:
        try:
            return make_schedule(
                name,
                num_devices=num_devices,
                num_microbatches=num_microbatches,
                stages_per_device=stages_per_device,
                num_steps=num_steps,
            )
        except ShapeError as error:
            refused = error
    raise refused


def _bubble(program: Program, costs: tuple[StageCost, ...], step_s: float) -> float:
    """Return the timeline's bubble, from the devices' work alone."""
    busy_s = sum(
        program.num_microbatches_of(stage)
        * (cost.forward_s + cost.seconds(Kind.BACKWARD))
        + cost.update_s
        for stage, cost in enumerate(costs)
    )
    return max(0.0, 1.0 - busy_s / (program.num_devices * step_s))


def _memory(
    timeline: Timeline,
    costs: tuple[StageCost, ...],
    placement: Placement,
    correction: CorrectionCost,
) -> tuple[MemorySplit, ...]:
    splits = []
    num_versions, delays = placement.versions_with(correction), placement.delays
    for device, stages in enumerate(timeline.schedule.program.stages_on):
        weights = sum(costs[stage].weight_bytes for stage in stages)
        gradients = sum(costs[stage].gradient_bytes for stage in stages)
        states = sum(costs[stage].optimizer_bytes for stage in stages)
        rest = round(timeline.peak_bytes(device)) - weights - gradients - states
        old = sum(
            (costs[s].guess_bytes or costs[s].weight_bytes) * (num_versions[s] - 1)
            for s in stages
        )
        old = min(old, rest)  # not all of them need be there at the peak
        kept = sum(correction.kept_bytes(costs[s], delays[s]) for s in stages)
        splits.append(
            MemorySplit(weights, gradients, states - kept, rest - old, old, kept)
        )
    return tuple(splits)
