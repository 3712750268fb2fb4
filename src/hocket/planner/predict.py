"""Predict candidates: cut, cost, simulate. What candidates share is worked out once.

num_samples ─▶ layers ─▶ boundaries ─▶ stage costs ┐
cluster ─▶ links                                   ├─▶ simulate ─▶ Outcome
schedule's name, shape ─▶ Schedule                 ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hocket.errors import FitError, ShapeError
from hocket.plan.costs import Costs, StageCost
from hocket.plan.op import Kind
from hocket.plan.program import Program
from hocket.plan.schedule import Schedule
from hocket.plan.simulate import simulate
from hocket.plan.timeline import Timeline
from hocket.planner.balance import Balancer
from hocket.planner.candidate import Candidate, MemorySplit, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.quick_bound import Placement, StageSums
from hocket.planner.search.bound import bound_s
from hocket.planner.stages import stage_costs
from hocket.planner.work import LayerCost, Work
from hocket.schedules import SCHEDULES, make_schedule


class Predictor:
    """Predicts candidates for one batch of one model on one cluster.

    Args:
        work: what is to be computed.
        cluster: on what.
        batch_size: samples per step, over all replicas.
    """

    def __init__(self, work: Work, cluster: Cluster, batch_size: int) -> None:
        """Begin with nothing worked out."""
        self.work = work
        self.cluster = cluster
        self.batch_size = batch_size
        self._layers: dict[int, tuple[LayerCost, ...]] = {}
        self._balancers: dict[int, Balancer] = {}
        self._stages: dict[tuple[int, int, bool], StageSums] = {}
        self._placements: dict[tuple[str, int, int], Placement] = {}
        self._least_s: dict[tuple[Candidate, tuple[int, ...]], float] = {}

    def layers(self, num_samples: int) -> tuple[LayerCost, ...]:
        """For microbatches of this size."""
        if num_samples not in self._layers:
            self._layers[num_samples] = self.work.layers(num_samples)
        return self._layers[num_samples]

    def boundaries(self, num_samples: int, num_stages: int) -> tuple[int, ...]:
        """The balanced cut.

        Raises:
            ShapeError: there are fewer layers than stages.
        """
        if num_samples not in self._balancers:
            layer_s = [x.forward_s + x.backward_s for x in self.layers(num_samples)]
            self._balancers[num_samples] = Balancer(layer_s)
        return self._balancers[num_samples].cut(num_stages)

    def bound_s(self, candidate: Candidate) -> float:
        """This candidate's order is not faster than this; see `quick_bound`.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        placement = self._placement_of(candidate)
        stages = self._stages_of(candidate)
        link = self.cluster.inside
        hop_s = link.latency_s + link.occupied_s(stages.least_message_bytes)
        return stages.bound_s(placement, candidate.num_microbatches, hop_s)

    def splits(self, candidate: Candidate) -> bool:
        """Whether its schedule splits any backward.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return self._placement_of(candidate).splits

    def outcome(self, candidate: Candidate) -> Outcome:
        """Simulate a pipeline.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return self._outcome(candidate, self.timeline(candidate))

    def timeline(self, candidate: Candidate) -> Timeline:
        """One step of it.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return simulate(self.schedule(candidate), self.costs(candidate))

    def schedule(self, candidate: Candidate) -> Schedule:
        """The order of one step; made for these costs and this memory, if it can be.

        Where none fits the memory, it is the one that misses least.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        known = {
            "costs": self.costs(candidate),
            "memory_bytes": self.cluster.memory_bytes,
        }
        taken = SCHEDULES[candidate.schedule].options
        options = {name: value for name, value in known.items() if name in taken}
        try:
            return _made(candidate, options)
        except FitError as error:
            return _made(candidate, {**options, "memory_bytes": error.needed_bytes})

    def costs(self, candidate: Candidate) -> Costs:
        """Of its stages and links."""
        cluster = self.cluster
        shape = candidate.num_devices, candidate.num_replicas
        return Costs(
            self._stages_of(candidate).costs,
            link=cluster.inside,
            links=cluster.pipeline_links(*shape),
            reduce_link=cluster.reduce_link(*shape),
        )

    def _outcome(self, candidate: Candidate, timeline: Timeline) -> Outcome:
        program = timeline.schedule.program
        costs = self._stages_of(candidate).costs
        step_s = timeline.makespan_s
        num_samples = candidate.samples_of_microbatch(self.batch_size)
        gradient_bytes = sum(cost.gradient_bytes for cost in costs)
        traffic = timeline.traffic
        is_message = traffic.from_device != traffic.to_device
        return Outcome(
            candidate,
            step_s,
            self.batch_size / step_s,
            _bubble(program, costs, step_s),
            _memory(timeline, costs),
            self.cluster.memory_bytes,
            int(traffic.num_bytes[is_message].sum()),
            gradient_bytes if candidate.num_replicas > 1 else 0,
            self.boundaries(num_samples, candidate.num_stages),
            self._least_of(candidate, program),
            max(stage.delay for stage in program.stages),
        )

    def _stages_of(self, candidate: Candidate) -> StageSums:
        num_samples = candidate.samples_of_microbatch(self.batch_size)
        key = num_samples, candidate.num_stages, candidate.recomputes
        if key not in self._stages:
            costs = stage_costs(
                self.layers(num_samples),
                self.boundaries(num_samples, candidate.num_stages),
                recomputes=candidate.recomputes,
                update_s_per_byte=self.work.update_s_per_byte,
            )
            self._stages[key] = StageSums(costs)
        return self._stages[key]

    def _least_of(self, candidate: Candidate, program: Program) -> float:
        """No order of the same work is faster: one bound for all schedules of it."""
        devices = tuple(stage.device for stage in program.stages)
        key = replace(candidate, schedule=""), devices
        if key not in self._least_s:
            self._least_s[key] = bound_s(program, self.costs(candidate))
        return self._least_s[key]

    def _placement_of(self, candidate: Candidate) -> Placement:
        """Of the schedule; from as few microbatches as will do."""
        name, p, v = (
            candidate.schedule,
            candidate.num_devices,
            candidate.stages_per_device,
        )
        if (name, p, v) not in self._placements:
            schedule = _smallest(name, p, v)
            program = schedule.program
            if not all(stage.trainable for stage in program.stages):
                raise ShapeError(f"{name} does not train all of its stages")
            if len(program.nets) > 1:
                raise ShapeError(f"{name} holds several nets: a plan is of one model")
            self._placements[name, p, v] = Placement.of(schedule)
        return self._placements[name, p, v]


def _made(candidate: Candidate, options: Mapping[str, Any]) -> Schedule:
    return make_schedule(
        candidate.schedule,
        num_devices=candidate.num_devices,
        num_microbatches=candidate.num_microbatches,
        num_replicas=candidate.num_replicas,
        stages_per_device=candidate.stages_per_device,
        **options,
    )


def _smallest(name: str, num_devices: int, stages_per_device: int) -> Schedule:
    """A schedule of this shape with few microbatches."""
    counts = (num_devices, 2 * num_devices, 4 * num_devices)
    for num_microbatches in counts:
        try:
            return make_schedule(
                name,
                num_devices=num_devices,
                num_microbatches=num_microbatches,
                stages_per_device=stages_per_device,
            )
        except ShapeError as error:
            refused = error
    raise refused


def _bubble(program: Program, costs: tuple[StageCost, ...], step_s: float) -> float:
    """The same as the timeline's, from what all devices have to do."""
    busy_s = sum(
        program.num_microbatches_of(stage)
        * (cost.forward_s + cost.seconds(Kind.BACKWARD))
        + cost.update_s
        for stage, cost in enumerate(costs)
    )
    return max(0.0, 1.0 - busy_s / (program.num_devices * step_s))


def _memory(
    timeline: Timeline, costs: tuple[StageCost, ...]
) -> tuple[MemorySplit, ...]:
    splits = []
    for device, stages in enumerate(timeline.schedule.program.stages_on):
        weights = sum(costs[stage].weight_bytes for stage in stages)
        gradients = sum(costs[stage].gradient_bytes for stage in stages)
        states = sum(costs[stage].optimizer_bytes for stage in stages)
        rest = round(timeline.peak_bytes(device)) - weights - gradients - states
        splits.append(MemorySplit(weights, gradients, states, rest))
    return tuple(splits)
