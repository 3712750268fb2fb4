"""Predicts data parallelism: torch's, which a pipeline must beat, and reverse first-k.

Layers form groups of about 25 MB of weights, as torch's buckets and sharding units do;
a group is a stage of a program on one device, so that the same simulator predicts it:

    ddp    F0 F1 F2 B2 B1 B0 U2 U1 U0          R: all-reduce of a group's gradients,
                       R2 R1 R0                beside the backwards of the others

    fsdp   .  F0 F1 F2 B2 B1 .  B0 U           g: gather a group's weights before each F
           g0 g1 g2    g1 g0 r2 r1 r0          and B, one ahead; r: reduce and scatter

Groups of reverse first-k are of the size that is best for it (buckets.py).

Sources: Li et al., "PyTorch Distributed", arXiv:2006.15704 (buckets, overlap);
Rajbhandari et al., "ZeRO", arXiv:1910.02054; Zhao et al., "PyTorch FSDP",
arXiv:2304.11277 (prefetch of one unit).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np

from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.simulate import simulate
from hocket.core.step_end import repeat_step
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError
from hocket.planner.candidate import (
    DDP,
    FSDP,
    ONE_DEVICE,
    REVERSE_FIRST_K,
    ZERO_1,
    Buckets,
    Candidate,
    MemorySplit,
    Outcome,
)
from hocket.planner.predict import Predictor, with_reductions
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
        (plain.memory(),),
        predictor.cluster.memory_bytes,
        plain.gathered_bytes(),
        plain.total_gradient_bytes if candidate.num_replicas > 1 else 0,
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
    return sum(stage.step_s(candidate.num_microbatches) for stage in stages)


def _chosen_buckets(predictor: Predictor, candidate: Candidate) -> BucketChoice:
    cluster, num = predictor.cluster, candidate.num_replicas
    link = cluster.reduce_link(1, num)

    @cache
    def stages(boundaries: tuple[int, ...]) -> tuple[StageCost, ...]:
        found = _stages_of(predictor, candidate, boundaries)
        return with_reductions(found, cluster, link, num)[0]

    search = BucketSearch(
        predictor.layers(candidate.samples_of_microbatch(predictor.batch_size)),
        stages,
        Costs((), reduce_link=with_reductions((), cluster, link, num)[1]),
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
        cluster, num = predictor.cluster, candidate.num_replicas
        num_samples = candidate.samples_of_microbatch(predictor.batch_size)
        self._layers = predictor.layers(num_samples)
        self._boundaries = group_layers(self._layers)
        self.groups = _stages_of(predictor, candidate, self._boundaries)
        self._candidate = candidate
        program = Program.chain(
            [0] * len(self.groups), candidate.num_microbatches, num_replicas=num
        )
        self._schedule = repeat_step(program, lambda _: _order(program))
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
        name, num = self._candidate.schedule, self._candidate.num_replicas
        if name == FSDP and num > 1:
            return self._play_sharded()
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
        groups, link = with_reductions(groups, self._cluster, self._link, num)
        return simulate(self._schedule, Costs(groups, reduce_link=link))

    def update_s(self, group: StageCost) -> float:
        """Return the update's seconds; each device updates its shard."""
        is_sharded = self._candidate.schedule in (ZERO_1, FSDP)
        return group.update_s / (self._candidate.num_replicas if is_sharded else 1)

    def _host_s(self, group: StageCost) -> float:
        """Return a sharded group's overhead besides messages: at least DDP's."""
        if self._ddp_s is None:
            return 0.0
        num = self._candidate.num_replicas
        ring_s = self._link.ring_s(self.total_gradient_bytes, num)
        return max(0.0, self._ddp_s - ring_s) * self._share(group)

    def _share(self, group: StageCost) -> float:
        """Return a group's share of all gradients."""
        total = self.total_gradient_bytes
        return group.gradient_bytes / total if total else 0.0

    def _half_ring_s(self, num_bytes: int) -> float:
        """Return a gather's or reduce-scatter's seconds: half of an all-reduce."""
        return self._link.ring_s(num_bytes, self._candidate.num_replicas) / 2

    def _play_sharded(self) -> Timeline:
        """Simulate FSDP's two streams: computing and communication.

        A group's weights are gathered when the work before begins; gradients are
        reduced and scattered when they are complete.
        """
        ops, groups = self._schedule.lanes[0].ops, self.groups
        computes = [i for i, op in enumerate(ops) if op.kind in _COMPUTES]
        start_s, end_s = np.zeros(len(ops)), np.zeros(len(ops))
        gather_s = [self._half_ring_s(group.weight_bytes) for group in groups]
        scatter_s = [self._half_ring_s(group.gradient_bytes) for group in groups]
        ring_s = ready_s = gather_s[0]
        free_s = 0.0
        scattered_s = [0.0] * len(groups)
        for i, after in zip(computes, [*computes[1:], computes[-1]], strict=True):
            op, following = ops[i], ops[after]
            start_s[i] = max(free_s, ready_s)
            end_s[i] = free_s = start_s[i] + groups[op.stage].seconds(op.kind)
            if following.stage != op.stage:  # else its weights are here already
                requested_s = end_s[i] if self._cluster.shares_cores else start_s[i]
                ring_s = max(ring_s, requested_s) + gather_s[following.stage]
                ready_s = ring_s
            if op.kind is Kind.BACKWARD:
                ring_s = max(ring_s, end_s[i]) + scatter_s[op.stage]
                scattered_s[op.stage] = ring_s
                if self._cluster.shares_cores:
                    free_s = ring_s
        for i, op in enumerate(ops):
            if op.kind is Kind.REDUCE:
                start_s[i], end_s[i] = end_s[i - 1], scattered_s[op.stage]
            elif op.kind is Kind.UPDATE:
                start_s[i] = max(free_s, scattered_s[op.stage])
                group = groups[op.stage]
                took_s = self.update_s(group) + self._host_s(group)
                end_s[i] = free_s = start_s[i] + took_s
        return Timeline(self._schedule, (start_s,), (end_s,))

    def gathered_bytes(self) -> int:
        """Return the bytes of others' weights that a device receives in a step."""
        name, weights = self._candidate.schedule, [x.weight_bytes for x in self.groups]
        if self._candidate.num_replicas == 1 or name not in (ZERO_1, FSDP):
            return 0
        if name == ZERO_1:
            return sum(weights)
        # once for each F and each B, but for the last group, which stays in between
        twice = 2 * sum(weights) - weights[-1]
        return self._candidate.num_microbatches * twice

    def memory(self) -> MemorySplit:
        """One device's memory: each microbatch's backward precedes the next forward."""
        name, num = self._candidate.schedule, self._candidate.num_replicas
        parts = {x.name: x for layer in self._layers for x in layer.weights}.values()
        weights = sum(x.num_bytes for x in parts)
        gradients = sum(x.gradient_bytes for x in parts)
        states = sum(x.optimizer_bytes for x in parts)
        alive = self._alive_bytes()
        if name == FSDP and num > 1:
            # Beside the shards: two groups' whole weights, and one's whole gradients.
            whole = sorted((group.weight_bytes for group in self.groups), reverse=True)
            gathered = sum(whole[:2]) + max(x.gradient_bytes for x in self.groups)
            split = -(-weights // num), -(-gradients // num), -(-states // num)
            return MemorySplit(*split, alive + gathered)
        if name == ZERO_1:
            states = -(-states // num)
        buckets = 0 if name == ONE_DEVICE else gradients
        return MemorySplit(weights, gradients, states, alive + buckets)

    def _alive_bytes(self) -> int:
        """Return one microbatch's activations and the operators' workspace."""
        work = max(group.backward_work_bytes for group in self.groups)
        if not self._candidate.recomputes:
            return add_layers(self._layers, None).activation_bytes + work
        begins = (0, *self._boundaries)
        inputs = sum(self._layers[begin].received_bytes for begin in begins)
        return inputs + max(group.activation_bytes for group in self.groups) + work


_COMPUTES: Final = frozenset({Kind.FORWARD, Kind.BACKWARD})
