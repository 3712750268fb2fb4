"""Predicts data parallelism: torch's, which a pipeline must beat, and reverse first-k.

Layers form groups of about 25 MB of weights, as torch's buckets and sharding units do;
a group is a stage of a program on one device, so that the same simulator predicts it:

    ddp    F0 F1 F2 B2 B1 B0 U2 U1 U0          R: all-reduce of a group's gradients,
                       R2 R1 R0                beside the backwards of the others

    fsdp   .  F0 F1 F2 B2 B1 .  B0 U           g: UNSHARD before each F and B, one
           g0 g1 g2    g1 g0 r2 r1 r0          ahead; r: R, a reduce-scatter

FSDP's groups are gathered and reduced for each microbatch, which is the default of
fully_shard: a step is as many repetitions as there are microbatches, each with its part
of the update. HSDP is FSDP in replicas: each r is followed by an all-reduce.

Groups of reverse first-k are of the size that is best for it (buckets.py).

Sources: Li et al., "PyTorch Distributed", arXiv:2006.15704 (buckets, overlap);
Rajbhandari et al., "ZeRO", arXiv:1910.02054; Zhao et al., "PyTorch FSDP",
arXiv:2304.11277 (prefetch of one unit).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.simulate import simulate
from hocket.core.step_end import repeat_step
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError
from hocket.passes.add_gathers import add_gathers
from hocket.planner.candidate import (
    DDP,
    ONE_DEVICE,
    REVERSE_FIRST_K,
    ZERO_1,
    Buckets,
    Candidate,
    MemorySplit,
    Outcome,
)
from hocket.planner.gathers import with_shards
from hocket.planner.predict import Predictor, gathered_bytes, with_reductions
from hocket.planner.replicas.buckets import (
    PLANNED_SIZES,
    BucketChoice,
    BucketSearch,
    choose_buckets,
)
from hocket.planner.stages import add_layers, group_layers


def data_parallel_outcome(predictor: Predictor, candidate: Candidate) -> Outcome:
    """Predict data parallelism."""
    if candidate.schedule == REVERSE_FIRST_K:
        return _reversed_outcome(predictor, candidate)
    plain = _Plain(predictor, candidate)
    timeline = plain.timeline()
    step_s = timeline.begin_s + timeline.makespan_s  # the first gather comes before
    busy_s = sum(
        candidate.num_microbatches * (g.forward_s + g.seconds(Kind.BACKWARD))
        for g in plain.groups
    ) + sum(map(plain.update_s, plain.groups))
    return Outcome(
        candidate,
        step_s,
        predictor.batch_size / step_s,
        max(0.0, 1.0 - busy_s / step_s),
        (plain.memory(timeline),),
        predictor.cluster.memory_bytes,
        plain.gathered_bytes(),
        plain.total_gradient_bytes if candidate.num_pipelines > 1 else 0,
        (),
        busy_s,
    )


def data_parallel_timeline(predictor: Predictor, candidate: Candidate) -> Timeline:
    """Return the timeline of one step on one of the devices; or of a few."""
    if candidate.schedule == REVERSE_FIRST_K:
        return _chosen_buckets(predictor, candidate).timeline
    return _Plain(predictor, candidate).timeline()


def _reversed_outcome(predictor: Predictor, candidate: Candidate) -> Outcome:
    """Predict reverse first-k with the buckets and the k that are best for it."""
    found = _chosen_buckets(predictor, candidate)
    stages = _stages_of(predictor, candidate, found.boundaries)
    weights, gradients, states = (
        sum(getattr(stage, name) for stage in stages)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    )
    busy_s = least_s(predictor, candidate)
    rest = found.peak_bytes - weights - gradients - states
    return Outcome(
        candidate,
        found.step_s,
        predictor.batch_size / found.step_s,
        max(0.0, 1.0 - busy_s / found.step_s),
        (MemorySplit(weights, gradients, states, rest),),
        predictor.cluster.memory_bytes,
        0,
        gradients,
        found.boundaries,
        busy_s,
        buckets=Buckets(found.k, tuple(stage.gradient_bytes for stage in stages)),
    )


def least_s(predictor: Predictor, candidate: Candidate) -> float:
    """Return the seconds that a device computes in a step."""
    stages = _stages_of(predictor, candidate, ())
    return sum(
        replace(stage, update_s=stage.update_s / candidate.num_shards).step_s(
            candidate.num_microbatches
        )
        for stage in stages
    )


def _chosen_buckets(predictor: Predictor, candidate: Candidate) -> BucketChoice:
    cluster, num = predictor.cluster, candidate.num_replicas
    link = cluster.reduce_link(1, num)

    @cache
    def costs(boundaries: tuple[int, ...]) -> Costs:
        found = _stages_of(predictor, candidate, boundaries)
        program = Program.chain([0] * len(found), 1, num_replicas=num)
        return with_reductions(Costs(found, reduce_link=link), cluster, program)

    search = BucketSearch(
        predictor.layers(candidate.samples_of_microbatch(predictor.batch_size)),
        lambda boundaries: costs(boundaries).stages,
        replace(costs(()), stages=()),
        num,
        candidate.num_microbatches,
        cluster.memory_bytes,
        PLANNED_SIZES,
    )
    try:
        return choose_buckets(search)
    except FitError as error:
        return choose_buckets(replace(search, memory_bytes=error.needed_bytes))


def _stages_of(
    predictor: Predictor, candidate: Candidate, boundaries: tuple[int, ...]
) -> tuple[StageCost, ...]:
    return predictor.stage_costs(
        candidate.samples_of_microbatch(predictor.batch_size),
        1,
        boundaries,
        recomputes=candidate.recomputes,
    )


def _order(program: Program) -> Iterator[Op]:
    """Return the schedule: each microbatch through all groups and back."""
    groups = range(program.num_stages)
    for microbatch in range(program.num_microbatches_of(0)):
        yield from (Op(Kind.FORWARD, group, microbatch) for group in groups)
        yield from (Op(Kind.BACKWARD, group, microbatch) for group in groups[::-1])


class _Plain:
    """The layers and groups of one candidate of torch's data parallelism.

    Attributes:
        groups: the cost of each group, with whole weights.
    """

    def __init__(self, predictor: Predictor, candidate: Candidate) -> None:
        cluster, num = predictor.cluster, candidate.num_pipelines
        num_samples = candidate.samples_of_microbatch(predictor.batch_size)
        self._layers = predictor.layers(num_samples)
        self._boundaries = group_layers(self._layers)
        self.groups = _stages_of(predictor, candidate, self._boundaries)
        self._candidate = candidate
        num_times = candidate.num_microbatches if candidate.num_shards > 1 else 1
        program = Program.chain(
            [0] * len(self.groups),
            candidate.num_microbatches // num_times,
            num_steps=num_times,
            num_replicas=candidate.num_replicas,
            num_shards=candidate.num_shards,
        )
        order = repeat_step(program, lambda _: _order(program))
        self._schedule = add_gathers(order, "run")
        self._link = cluster.reduce_link(1, num)
        self._cluster = cluster
        # What DDP adds to a step, if it was measured on as many devices.
        self._ddp_s = predictor.trials.ddp_s if num == cluster.num_devices else None

    @property
    def total_gradient_bytes(self) -> int:
        """The gradients of all groups."""
        return sum(group.gradient_bytes for group in self.groups)

    def timeline(self) -> Timeline:
        """Simulate a step."""
        name = self._candidate.schedule
        if self._candidate.num_shards > 1:
            return simulate(self._schedule, self._sharded_costs())
        groups = self.groups
        if name == ZERO_1:
            # Reduce-scatter is half of an all-reduce; the other half gathers the new
            # weights, which follows the update.
            groups = tuple(
                replace(
                    group,
                    gradient_bytes=group.gradient_bytes // 2,
                    update_s=self.update_s(group)
                    + self._half_ring_s(group.weight_bytes)
                    + self._host_s(group),
                )
                for group in groups
            )
        if name == DDP and self._ddp_s is not None:
            # What DDP adds is divided among the groups by their gradients.
            added = (
                replace(x, update_s=x.update_s + self._ddp_s * self._share(x))
                for x in groups
            )
            return simulate(self._schedule, Costs(tuple(added)))
        costs = Costs(groups, reduce_link=self._link)
        program = self._schedule.program
        return simulate(self._schedule, with_reductions(costs, self._cluster, program))

    def update_s(self, group: StageCost) -> float:
        """Return the update's seconds; each device updates its shard."""
        is_zero_1 = self._candidate.schedule == ZERO_1
        num = self._candidate.num_replicas if is_zero_1 else self._candidate.num_shards
        return group.update_s / num

    def _host_s(self, group: StageCost) -> float:
        """Return a sharded group's overhead besides messages: at least DDP's."""
        if self._ddp_s is None:
            return 0.0
        num = self._candidate.num_pipelines
        ring_s = self._link.ring_s(self.total_gradient_bytes, num)
        return max(0.0, self._ddp_s - ring_s) * self._share(group)

    def _share(self, group: StageCost) -> float:
        """Return a group's share of all gradients."""
        total = self.total_gradient_bytes
        return group.gradient_bytes / total if total else 0.0

    def _half_ring_s(self, num_bytes: int) -> float:
        """Return a gather's or reduce-scatter's seconds: half of an all-reduce."""
        return self._link.ring_s(num_bytes, self._candidate.num_replicas) / 2

    def _sharded_costs(self) -> Costs:
        """Return the costs of FSDP's groups."""
        program, shards = self._schedule.program, self._candidate.num_shards
        costs = Costs(
            self.groups,
            reduce_link=self._cluster.reduce_link(shards, program.num_replicas),
            shard_link=self._cluster.shard_link(shards),
        )
        costs = with_shards(costs, program)
        times = program.num_steps
        stages = tuple(
            replace(
                cost,
                update_s=(cost.update_s + self._host_s(cost)) / times,
                # Shards of gradients add up beside those of each microbatch.
                weight_bytes=cost.weight_bytes
                + (-(-cost.gradient_bytes // shards) if times > 1 else 0),
            )
            for cost in costs.stages
        )
        costs = replace(costs, stages=stages)
        return with_reductions(costs, self._cluster, program, self._schedule)

    def gathered_bytes(self) -> int:
        """Return the bytes of others' weights that a device receives in a step."""
        if self._candidate.schedule == ZERO_1:
            return sum(group.weight_bytes for group in self.groups)
        groups = [
            replace(x, whole_bytes=x.whole_bytes or x.weight_bytes) for x in self.groups
        ]
        return gathered_bytes(self._schedule, groups)

    def memory(self, timeline: Timeline) -> MemorySplit:
        """One device's memory: each microbatch's backward precedes the next forward."""
        name, num = self._candidate.schedule, self._candidate.num_shards
        parts = {x.name: x for layer in self._layers for x in layer.weights}.values()
        sizes = [(x.num_bytes, x.gradient_bytes, x.optimizer_bytes) for x in parts]
        weights, gradients, states = map(sum, zip(*sizes, strict=True))
        if num > 1:
            own = (
                -(-size // num)
                for x in self.groups
                for size in (x.weight_bytes, x.gradient_bytes, x.optimizer_bytes)
            )
            rest = round(timeline.peak_bytes(0)) - sum(own)
            split = -(-weights // num), -(-gradients // num), -(-states // num)
            return MemorySplit(*split, rest)
        if name == ZERO_1:
            states = -(-states // self._candidate.num_replicas)
        buckets = 0 if name == ONE_DEVICE else gradients
        return MemorySplit(weights, gradients, states, self._alive_bytes() + buckets)

    def _alive_bytes(self) -> int:
        """Return one microbatch's activations and the operators' workspace."""
        work = max(group.backward_work_bytes for group in self.groups)
        if not self._candidate.recomputes:
            return add_layers(self._layers, None).activation_bytes + work
        begins = (0, *self._boundaries)
        inputs = sum(self._layers[begin].received_bytes for begin in begins)
        return inputs + max(group.activation_bytes for group in self.groups) + work
