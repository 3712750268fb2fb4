"""Predict candidates: cut, cost, simulate. What candidates share is worked out once.

num_samples ─▶ layers ─▶ boundaries ─▶ stage costs ┐
cluster ─▶ links                                   ├─▶ simulate ─▶ Outcome
schedule's name, shape ─▶ Schedule                 ┘
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import numpy as np

from hocket.errors import ShapeError
from hocket.plan.arrays import Floats
from hocket.plan.costs import Costs, StageCost
from hocket.plan.op import Kind
from hocket.plan.program import Program
from hocket.plan.schedule import Schedule
from hocket.plan.simulate import simulate
from hocket.plan.timeline import Timeline
from hocket.planner.balance import Balancer
from hocket.planner.candidate import Candidate, MemorySplit, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.stages import stage_costs
from hocket.planner.work import LayerCost, Work
from hocket.schedules import make_schedule


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
        self._stages: dict[tuple[int, int, bool], _Stages] = {}
        self._devices: dict[tuple[str, int, int], tuple[int, ...]] = {}

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
        """No order of this candidate's work is faster than this; see `_Stages`.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        devices = self._devices_of(candidate)
        stages = self._stages_of(candidate)
        link = self.cluster.inside
        hop_s = link.latency_s + link.occupied_s(stages.least_message_bytes)
        return stages.bound_s(devices, candidate.num_microbatches, hop_s)

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
        """The order of one step.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        return make_schedule(
            candidate.schedule,
            num_devices=candidate.num_devices,
            num_microbatches=candidate.num_microbatches,
            num_replicas=candidate.num_replicas,
            stages_per_device=candidate.stages_per_device,
        )

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
            max(stage.delay for stage in program.stages),
        )

    def _stages_of(self, candidate: Candidate) -> _Stages:
        num_samples = candidate.samples_of_microbatch(self.batch_size)
        key = num_samples, candidate.num_stages, candidate.recomputes
        if key not in self._stages:
            costs = stage_costs(
                self.layers(num_samples),
                self.boundaries(num_samples, candidate.num_stages),
                recomputes=candidate.recomputes,
                update_s_per_byte=self.work.update_s_per_byte,
            )
            self._stages[key] = _Stages(costs)
        return self._stages[key]

    def _devices_of(self, candidate: Candidate) -> tuple[int, ...]:
        """Where the schedule puts its stages; from as few microbatches as will do."""
        name, p, v = (
            candidate.schedule,
            candidate.num_devices,
            candidate.stages_per_device,
        )
        if (name, p, v) not in self._devices:
            program = _smallest(name, p, v).program
            if not all(stage.trainable for stage in program.stages):
                raise ShapeError(f"{name} does not train all of its stages")
            devices = tuple(stage.device for stage in program.stages)
            self._devices[name, p, v] = devices
        return self._devices[name, p, v]


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


class _Stages:
    """The costs of all stages, and a bound on the time of any order of their work.

    A device's first op is the forward of its first stage, which waits for all stages
    before; its last backward is that stage's, and all stages before follow:

        device d   │ fill │ m x (F + B) of all its stages │ drain │

    Args:
        costs: of each stage.
    """

    def __init__(self, costs: tuple[StageCost, ...]) -> None:
        """Add up what comes before each stage."""
        self.costs = costs
        self._forward_s = np.array([cost.forward_s for cost in costs])
        self._backward_s = np.array([cost.seconds(Kind.BACKWARD) for cost in costs])
        both = (self._forward_s + self._backward_s).tolist()
        self._before_s: Floats = np.array([0.0, *accumulate(both)])

    @cached_property
    def least_message_bytes(self) -> int:
        """Of those between neighbouring stages, there and back."""
        there = (cost.output_bytes for cost in self.costs[:-1])
        back = (cost.input_grad_bytes for cost in self.costs[1:])
        return min((*there, *back), default=0)

    @cached_property
    def _update_s(self) -> Floats:
        return np.array([cost.update_s for cost in self.costs])

    def bound_s(
        self, devices: tuple[int, ...], num_microbatches: int, hop_s: float
    ) -> float:
        """The least that a step takes on stages that are placed so.

        Args:
            devices: of each stage.
            num_microbatches: per step.
            hop_s: of a message from stage to stage.
        """
        of = np.array(devices)
        num_devices = int(of.max()) + 1
        work_s = np.zeros(num_devices)
        np.add.at(work_s, of, self._forward_s + self._backward_s)
        update_s = np.zeros(num_devices)
        np.add.at(update_s, of, self._update_s)
        first = np.full(num_devices, of.size)
        np.minimum.at(first, of, np.arange(of.size))
        num_hops = np.concatenate(([0], np.cumsum(of[1:] != of[:-1])))[first]
        fill_and_drain_s = self._before_s[first] + 2 * num_hops * hop_s
        bounds: Floats = num_microbatches * work_s + np.maximum(
            fill_and_drain_s, update_s
        )
        return float(bounds.max())


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
