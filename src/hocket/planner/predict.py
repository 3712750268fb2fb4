"""Predicts candidates: makes their orders, prices and simulates them.

cuts    ─▶ costs of stages ┐
cluster ─▶ links           ├─▶ simulate ─▶ Outcome
orders  ─▶ Schedule        ┘

Costs of a model's cuts: layers, balanced boundaries, stages; as measured in trials.

num_samples ─▶ layers ─▶ boundaries ─▶ stage costs
               trials ─▶ measured in place ───┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.arrays import Floats
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError, ShapeError
from hocket.passes.add_gathers import Keeps, add_gathers, drop_gathers
from hocket.planner.balance import Balancer
from hocket.planner.candidate import Candidate, MemorySplit, Outcome
from hocket.planner.cluster import Cluster
from hocket.planner.gathers import choose_gathers, with_copies, with_shards
from hocket.planner.orders import Placement, StageSums, make_order, placement_of
from hocket.planner.search.problem import bound_s
from hocket.planner.stages import (
    NO_TRIALS,
    MeasuredTrials,
    StageSlowdown,
    as_measured,
    nearest,
    stage_costs,
)
from hocket.planner.work import ModelCosts
from hocket.schedules import SCHEDULES, options_of

_MORE_STEPS: Final = 2


@dataclass(eq=False)
class Predictor:
    """Predicts candidates for one batch of one model on one cluster.

    Args:
        work: the model's costs.
        cluster: the devices.
        batch_size: samples per step, over all replicas.
        trials: the measured trials on these devices.
        clips: whether updates without a flush need all gradients of their group.

    Attributes:
        layers: returns the layers' costs for microbatches of a size; cached.
    """

    work: ModelCosts
    cluster: Cluster
    batch_size: int
    trials: MeasuredTrials = NO_TRIALS
    clips: bool = False

    def __post_init__(self) -> None:
        """Begin with empty caches."""
        self.layers = cache(self.work.layers)
        self._balancer = cache(lambda n: Balancer.of(self.layers(n), self.cluster.hop))
        self._sums = cache(self._make_sums)
        self._placements: dict[tuple[str, int, int], Placement | ShapeError] = {}
        self._made_costs = cache(self._make_costs)
        self._collectives = cache(self._make_collectives)
        self._keeps: dict[Candidate, Keeps] = {}  # how long sharded stages are whole
        self._least_s: dict[tuple[Candidate, tuple[int, ...]], float] = {}
        self._last_order: tuple[Candidate, Schedule] | None = None
        self._found: dict[Candidate, Schedule] = {}  # orders that took a search

    def boundaries(self, num_samples: int, num_stages: int) -> tuple[int, ...]:
        """Return the balanced cut.

        Raises:
            ShapeError: there are fewer layers than stages.
        """
        return self._balancer(num_samples).cut(num_stages)

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
        stages = self._added(num_samples, boundaries, recomputes)
        trial = nearest(self.trials.cuts, num_samples, num_devices, len(stages))
        if trial is None:
            return stages
        if trial.is_of(num_samples, num_devices, boundaries):
            return tuple(map(as_measured, stages, trial.costs.stages))
        same = self._added(trial.num_samples, trial.boundaries, False)
        return tuple(map(StageSlowdown.of(trial.costs.stages, same).slowed, stages))

    def _make_sums(
        self, num_samples: int, num_devices: int, num_stages: int, recomputes: bool
    ) -> StageSums:
        """Return the sums; raises ShapeError if there are fewer layers than stages."""
        boundaries = self.boundaries(num_samples, num_stages)
        costs = self.stage_costs(
            num_samples, num_devices, boundaries, recomputes=recomputes
        )
        return StageSums(costs)

    def _added(
        self, num_samples: int, boundaries: tuple[int, ...], recomputes: bool
    ) -> tuple[StageCost, ...]:
        """Return stages as sums of layers."""
        return stage_costs(
            self.layers(num_samples),
            boundaries,
            recomputes=recomputes,
            update_s_per_byte=self.work.update_s_per_byte,
        )

    def bound_s(self, candidate: Candidate) -> float:
        """Return a lower bound of this candidate's step; see `StageSums`.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        placement = self.placement(candidate)
        stages = self._sums_of(candidate)
        link = self._in_place(candidate).link
        hop_s = link.latency_s + link.occupied_s(stages.least_message_bytes)
        return stages.bound_s(
            placement,
            candidate.num_microbatches,
            hop_s,
            *self._collectives(replace(candidate, schedule="")),
            num_shards=candidate.num_shards,
        )

    def tight_bound_s(self, candidate: Candidate) -> float:
        """Return the bound of all orders of the same work; see `search.bound`.

        It takes longer than `bound_s`, and is seldom lower.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        placement = self.placement(candidate)
        if placement.delay:
            stages = self._sums_of(candidate)
            return stages.work_s(placement, candidate.num_microbatches)
        key = replace(candidate, schedule=""), placement.devices
        if key not in self._least_s:
            program = _program(candidate, placement.devices)
            costs = with_reductions(self._costs(candidate), self.cluster, program)
            costs = _as_if_whole(costs)
            self._least_s[key] = bound_s(program, costs)
        return self._least_s[key]

    def outcome(self, candidate: Candidate) -> Outcome:
        """Simulate a pipeline and return its outcome.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        timeline = self.timeline(candidate)
        program, traffic = timeline.schedule.program, timeline.traffic
        stages = self._costs(candidate).stages
        placement = self.placement(candidate)
        step_s = self._step_s(candidate, timeline)
        is_message = traffic.from_device != traffic.to_device
        sent_bytes = int(traffic.num_bytes[is_message].sum()) // program.num_steps
        is_reduced = candidate.num_pipelines > 1
        return Outcome(
            candidate,
            step_s,
            self.batch_size / step_s,
            _bubble(program, stages, step_s),
            _memory(timeline, stages, placement),
            self.cluster.memory_bytes,
            sent_bytes + gathered_bytes(timeline.schedule, stages),
            sum(cost.gradient_bytes for cost in stages) if is_reduced else 0,
            self.boundaries(self._num_samples(candidate), candidate.num_stages),
            self.tight_bound_s(candidate),
            placement.delay,
            placement.num_versions,
        )

    def timeline(self, candidate: Candidate) -> Timeline:
        """Return the timeline of one step; of a flush-free order, of a few.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        timeline = simulate(self.schedule(candidate), self.costs(candidate))
        most_bytes = self.cluster.memory_bytes
        if candidate.num_shards == 1 or candidate in self._keeps:
            return timeline
        self._keeps[candidate] = "step"
        if timeline.most_bytes <= most_bytes:
            return timeline
        costs, order = self._costs(candidate), drop_gathers(timeline.schedule)
        keeps: Keeps = "op"
        with suppress(FitError):
            keeps = choose_gathers(order, costs, most_bytes)
        self._keeps[candidate] = keeps
        return self.timeline(candidate)

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return the order of one step, made for these costs and memory if possible.

        Backwards stay whole if no op waits for their I, as in the runtime. If no order
        fits the memory, it is the one that misses least. Sharded stages have the order
        of as many replicas, and are whole as long as memory allows.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        if candidate.num_shards > 1:
            replicas, shards = candidate.num_replicas, candidate.num_shards
            twin = replace(candidate, num_replicas=replicas * shards, num_shards=1)
            order = with_copies(self.schedule(twin), replicas, shards)
            return add_gathers(order, self._keeps.get(candidate, "step"))
        known = {
            "costs": self.costs(candidate),
            "memory_bytes": self.cluster.memory_bytes,
        }
        taken = SCHEDULES[candidate.schedule].options
        options: dict[str, Any] = {
            name: value for name, value in known.items() if name in taken
        }
        if not options:
            return self._order_of(replace(candidate, recomputes=False))
        if candidate not in self._found:
            self._found[candidate] = self._search(candidate, options)
        return self._found[candidate]

    def _search(self, candidate: Candidate, options: dict[str, Any]) -> Schedule:
        """Return an order that is made for these costs and memory."""
        placement = self.placement(candidate)
        try:
            return make_order(candidate, placement, options)
        except FitError as error:
            options["memory_bytes"] = error.needed_bytes
            return make_order(candidate, placement, options)

    def _order_of(self, candidate: Candidate) -> Schedule:
        """Return a schedule that does not depend on costs; the last one is cached."""
        if self._last_order is None or self._last_order[0] != candidate:
            is_late = self.clips and "late_updates" in options_of(candidate.schedule)
            options = {"late_updates": True} if is_late else {}
            order = make_order(candidate, self.placement(candidate), options)
            self._last_order = candidate, order
        return self._last_order[1]

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of its stages and links."""
        costs, cluster = self._costs(candidate), self.cluster
        if not cluster.shares_cores:  # then the order does not matter, nor its name
            return costs
        order = self.schedule(candidate) if candidate.num_shards > 1 else None
        program = _program(candidate, self.placement(candidate).devices)
        return with_reductions(costs, cluster, program, order)

    def _costs(self, candidate: Candidate) -> Costs:
        """Return the same where no reduction or gather disturbs other work."""
        return self._made_costs(replace(candidate, schedule=""))

    def _make_costs(self, candidate: Candidate) -> Costs:
        p, r, s = candidate.num_devices, candidate.num_replicas, candidate.num_shards
        costs = replace(
            self._in_place(candidate),
            stages=self._sums_of(candidate).costs,
            links=self.cluster.pipeline_links(p, r, s),
            reduce_link=self.cluster.reduce_link(p * s, r),
        )
        if s == 1:
            return costs
        costs = replace(costs, shard_link=self.cluster.shard_link(s))
        return with_shards(costs, _program(candidate, range(candidate.num_stages)))

    def _make_collectives(self, candidate: Candidate) -> tuple[Floats, Floats]:
        """Return the seconds of each stage's reduction, and of one gather of it."""
        costs, stages = self._costs(candidate), range(candidate.num_stages)
        program = _program(candidate, stages)
        gathers_s = np.array([cost.unshard_s for cost in costs.stages])
        if self.cluster.shares_cores:  # a part of the update
            gathers_s[:] = 0.0
        return np.array([costs.reduce_s(x, program) for x in stages]), gathers_s

    def _in_place(self, candidate: Candidate) -> Costs:
        """Return costs measured in place, besides the stages' work."""
        messages = self.cluster.messages
        if messages is not None:
            return messages.costs()
        trial = nearest(
            self.trials.cuts,
            self._num_samples(candidate),
            candidate.num_devices,
            candidate.num_stages,
        )
        link = self.cluster.inside
        if trial is None:
            return Costs((), link=link)
        return (
            replace(trial.costs, link=link) if trial.num_devices == 1 else trial.costs
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

    def _num_samples(self, candidate: Candidate) -> int:
        return candidate.samples_of_microbatch(self.batch_size)

    def _sums_of(self, candidate: Candidate) -> StageSums:
        return self._sums(
            self._num_samples(candidate),
            candidate.num_devices,
            candidate.num_stages,
            candidate.recomputes,
        )

    def placement(self, candidate: Candidate) -> Placement:
        """Return its schedule's placement; cached, as is that there is none.

        Raises:
            ShapeError: the schedule does not take its numbers.
        """
        key = candidate.schedule, candidate.num_devices, candidate.stages_per_device
        if key not in self._placements:
            try:
                self._placements[key] = placement_of(*key)
            except ShapeError as error:
                self._placements[key] = error
        found = self._placements[key]
        if isinstance(found, ShapeError):
            raise found.with_traceback(None)
        if candidate.num_shards > 1 and not found.takes_shards:
            raise ShapeError(
                f"{candidate.schedule} has old weights, copies or several lanes on a "
                "device, and no order of sharded stages"
            )
        return found


def _program(candidate: Candidate, devices: Sequence[int]) -> Program:
    """Return what a candidate computes, with its stages on these devices."""
    return Program.chain(
        devices,
        candidate.num_microbatches,
        num_replicas=candidate.num_replicas,
        num_shards=candidate.num_shards,
    )


def with_reductions(
    costs: Costs, cluster: Cluster, program: Program, order: Schedule | None = None
) -> Costs:
    """Return the costs where reductions and gathers disturb what runs beside them.

    Where devices share cores, a lane does nothing else during a reduction or a gather:
    it is a part of the update, and the link takes no time.

    Args:
        costs: those of the stages alone.
        cluster: the devices.
        program: what is computed.
        order: where the stages are sharded: the order of all steps, with gathers.
    """
    if not cluster.shares_cores:
        return costs
    num_gathers = Counter(_gathered(order))
    alone = (
        replace(
            cost,
            update_s=cost.update_s
            + costs.reduce_s(stage, program)
            + num_gathers[stage] / program.num_steps * cost.unshard_s,
            unshard_s=0.0,
        )
        for stage, cost in enumerate(costs.stages)
    )
    free = Link()
    return replace(costs, stages=tuple(alone), reduce_link=free, shard_link=None)


def gathered_bytes(order: Schedule, stages: Sequence[StageCost]) -> int:
    """Return the bytes of whole weights that are gathered on one of all shards."""
    return sum(stages[stage].whole_bytes for stage in _gathered(order))


def _gathered(order: Schedule | None) -> Iterator[int]:
    """Yield the stage of each gather."""
    for lane in order.lanes if order else ():
        yield from (op.stage for op in lane.ops if op.kind is Kind.UNSHARD)


def _as_if_whole(costs: Costs) -> Costs:
    """Return costs whose I and W take no longer than B."""
    stages = tuple(replace(cost, split_s=0.0) for cost in costs.stages)
    return replace(costs, stages=stages)


def _bubble(program: Program, costs: tuple[StageCost, ...], step_s: float) -> float:
    """Return the timeline's bubble, from the devices' work alone."""
    counts = map(program.num_microbatches_of, range(program.num_stages))
    busy_s = sum(cost.step_s(m) for cost, m in zip(costs, counts, strict=True))
    return max(0.0, 1.0 - busy_s / (program.num_devices * step_s))


def _memory(
    timeline: Timeline, costs: tuple[StageCost, ...], placement: Placement
) -> tuple[MemorySplit, ...]:
    splits = []
    num_versions = placement.num_versions
    for device, stages in enumerate(timeline.schedule.program.stages_on):
        weights = sum(costs[stage].weight_bytes for stage in stages)
        # Whole ones come and go, as the whole weights of shards.
        num_shards = timeline.schedule.program.num_shards
        gradients = sum(-(-costs[s].gradient_bytes // num_shards) for s in stages)
        states = sum(costs[stage].optimizer_bytes for stage in stages)
        rest = round(timeline.peak_bytes(device)) - weights - gradients - states
        old = sum(costs[s].weight_bytes * (num_versions[s] - 1) for s in stages)
        old = min(old, rest)  # not all of them need be there at the peak
        splits.append(MemorySplit(weights, gradients, states, rest - old, old))
    return tuple(splits)
