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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
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
from hocket.planner.predict import Predictor, reduced_alone
from hocket.planner.replicas.buckets import (
    PLANNED_SIZES,
    BucketChoice,
    BucketSearch,
    choose_buckets,
)
from hocket.planner.stages import activation_bytes, group_layers
from hocket.planner.work import LayerCost


@dataclass(frozen=True, slots=True)
class _Parts:
    """The layers, groups and link of a candidate.

    Args:
        layers: the whole model's layers.
        boundaries: the layers at which groups 1, 2, ... begin.
        groups: the cost of each group, with whole weights.
        schedule: one step on one device.
        link: the link of the ring of all devices.
        shares_cores: whether reductions slow down other work.
        ddp_s: what DDP adds to a step, if it was measured on as many devices.
    """

    layers: tuple[LayerCost, ...]
    boundaries: tuple[int, ...]
    groups: tuple[StageCost, ...]
    schedule: Schedule
    link: Link
    shares_cores: bool
    ddp_s: float | None


def data_parallel_outcome(predictor: Predictor, candidate: Candidate) -> Outcome:
    """Predict data parallelism."""
    if candidate.schedule == REVERSE_FIRST_K:
        return _reversed_outcome(predictor, candidate)
    parts = _parts(predictor, candidate)
    timeline = _timeline(parts, candidate)
    step_s = timeline.begin_s + timeline.makespan_s  # the first gather comes before
    busy_s = sum(
        candidate.num_microbatches * (g.forward_s + g.seconds(Kind.BACKWARD))
        for g in parts.groups
    ) + sum(_update_s(g, candidate) for g in parts.groups)
    is_reduced = candidate.num_replicas > 1
    return Outcome(
        candidate,
        step_s,
        predictor.batch_size / step_s,
        max(0.0, 1.0 - busy_s / step_s),
        (_memory(parts, candidate),),
        predictor.cluster.memory_bytes,
        _gathered_bytes(parts, candidate),
        sum(g.gradient_bytes for g in parts.groups) if is_reduced else 0,
        (),
        busy_s,
    )


def data_parallel_timeline(predictor: Predictor, candidate: Candidate) -> Timeline:
    """Return the timeline of one step on one of the devices; or of a few."""
    if candidate.schedule == REVERSE_FIRST_K:
        return _chosen_buckets(predictor, candidate).timeline
    return _timeline(_parts(predictor, candidate), candidate)


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
        candidate.num_microbatches * (x.forward_s + x.seconds(Kind.BACKWARD))
        + x.update_s
        for x in stages
    )


def _chosen_buckets(predictor: Predictor, candidate: Candidate) -> BucketChoice:
    cluster, num = predictor.cluster, candidate.num_replicas
    link = cluster.reduce_link(1, num)

    @cache
    def stages(boundaries: tuple[int, ...]) -> tuple[StageCost, ...]:
        found = _stages_of(predictor, candidate, boundaries)
        if not cluster.shares_cores:
            return found
        return tuple(reduced_alone(stage, link, num) for stage in found)

    search = BucketSearch(
        predictor.cuts.layers(candidate.samples_of_microbatch(predictor.batch_size)),
        stages,
        Costs((), reduce_link=Link() if cluster.shares_cores else link),
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
    return predictor.cuts.stage_costs(
        candidate.samples_of_microbatch(predictor.batch_size),
        1,
        boundaries,
        recomputes=candidate.recomputes,
    )


def _parts(predictor: Predictor, candidate: Candidate) -> _Parts:
    num_samples = candidate.samples_of_microbatch(predictor.batch_size)
    layers = predictor.cuts.layers(num_samples)
    boundaries = group_layers(layers)
    groups = _stages_of(predictor, candidate, boundaries)
    program = Program.chain(
        [0] * len(groups),
        candidate.num_microbatches,
        num_replicas=candidate.num_replicas,
    )
    schedule = repeat_step(program, lambda _: _order(program))
    link = predictor.cluster.reduce_link(1, candidate.num_replicas)
    is_comparable = candidate.num_replicas == predictor.cluster.num_devices
    return _Parts(
        layers,
        boundaries,
        groups,
        schedule,
        link,
        predictor.cluster.shares_cores,
        predictor.trials.ddp_s if is_comparable else None,
    )


def _order(program: Program) -> Iterator[Op]:
    """Return the schedule: each microbatch through all groups and back."""
    groups = range(program.num_stages)
    for microbatch in range(program.num_microbatches_of(0)):
        yield from (Op(Kind.FORWARD, group, microbatch) for group in groups)
        yield from (Op(Kind.BACKWARD, group, microbatch) for group in groups[::-1])


def _timeline(parts: _Parts, candidate: Candidate) -> Timeline:
    if candidate.schedule == FSDP and candidate.num_replicas > 1:
        return _play_sharded(parts, candidate)
    groups = parts.groups
    if candidate.schedule == ZERO_1:
        # Reduce-scatter is half of an all-reduce; the other half gathers the new
        # weights, which follows the update.
        groups = tuple(
            replace(
                group,
                gradient_bytes=group.gradient_bytes // 2,
                update_s=_update_s(group, candidate)
                + _half_ring_s(parts.link, group.weight_bytes, candidate)
                + _host_s(parts, group, candidate),
            )
            for group in groups
        )
    if candidate.schedule == DDP and parts.ddp_s is not None:
        return simulate(parts.schedule, Costs(_with_ddp(parts, parts.ddp_s)))
    if parts.shares_cores:
        alone = [reduced_alone(x, parts.link, candidate.num_replicas) for x in groups]
        return simulate(parts.schedule, Costs(tuple(alone)))
    return simulate(parts.schedule, Costs(groups, reduce_link=parts.link))


def _with_ddp(parts: _Parts, ddp_s: float) -> tuple[StageCost, ...]:
    """Divide what DDP adds among the groups by their gradients."""
    return tuple(
        replace(group, update_s=group.update_s + ddp_s * _share(parts, group))
        for group in parts.groups
    )


def _host_s(parts: _Parts, group: StageCost, candidate: Candidate) -> float:
    """Return a sharded group's overhead besides messages: at least DDP's."""
    if parts.ddp_s is None:
        return 0.0
    total = sum(group.gradient_bytes for group in parts.groups)
    ring_s = parts.link.ring_s(total, candidate.num_replicas)
    return max(0.0, parts.ddp_s - ring_s) * _share(parts, group)


def _share(parts: _Parts, group: StageCost) -> float:
    """Return a group's share of all gradients."""
    total = sum(group.gradient_bytes for group in parts.groups)
    return group.gradient_bytes / total if total else 0.0


def _update_s(group: StageCost, candidate: Candidate) -> float:
    """Return the update's seconds; each device updates its shard."""
    is_sharded = candidate.schedule in (ZERO_1, FSDP)
    return group.update_s / (candidate.num_replicas if is_sharded else 1)


def _half_ring_s(link: Link, num_bytes: int, candidate: Candidate) -> float:
    """Return a gather's or reduce-scatter's seconds: half of an all-reduce."""
    return link.ring_s(num_bytes, candidate.num_replicas) / 2


def _play_sharded(parts: _Parts, candidate: Candidate) -> Timeline:
    """Simulate FSDP's two streams: computing and communication.

    A group's weights are gathered when the work before begins; gradients are reduced
    and scattered when they are complete.
    """
    lane = parts.schedule.lanes[0]
    computes = [i for i, op in enumerate(lane.ops) if op.kind in _COMPUTES]
    start_s, end_s = np.zeros(len(lane.ops)), np.zeros(len(lane.ops))
    gather_s = [
        _half_ring_s(parts.link, g.weight_bytes, candidate) for g in parts.groups
    ]
    scatter_s = [
        _half_ring_s(parts.link, g.gradient_bytes, candidate) for g in parts.groups
    ]
    ring_s = ready_s = gather_s[0]
    free_s = 0.0
    scattered_s = [0.0] * len(parts.groups)
    for k, i in enumerate(computes):
        op = lane.ops[i]
        start_s[i] = max(free_s, ready_s)
        end_s[i] = free_s = start_s[i] + parts.groups[op.stage].seconds(op.kind)
        following = lane.ops[computes[k + 1]] if k + 1 < len(computes) else op
        if following.stage != op.stage:  # else its weights are here already
            requested_s = end_s[i] if parts.shares_cores else start_s[i]
            ring_s = max(ring_s, requested_s) + gather_s[following.stage]
            ready_s = ring_s
        if op.kind is Kind.BACKWARD:
            ring_s = max(ring_s, end_s[i]) + scatter_s[op.stage]
            scattered_s[op.stage] = ring_s
            if parts.shares_cores:
                free_s = ring_s
    for i, op in enumerate(lane.ops):
        if op.kind is Kind.REDUCE:
            start_s[i], end_s[i] = end_s[i - 1], scattered_s[op.stage]
        elif op.kind is Kind.UPDATE:
            start_s[i] = max(free_s, scattered_s[op.stage])
            group = parts.groups[op.stage]
            took_s = _update_s(group, candidate) + _host_s(parts, group, candidate)
            end_s[i] = free_s = start_s[i] + took_s
    return Timeline(parts.schedule, (start_s,), (end_s,))


_COMPUTES: Final = frozenset({Kind.FORWARD, Kind.BACKWARD})


def _gathered_bytes(parts: _Parts, candidate: Candidate) -> int:
    """Return the bytes of others' weights that a device receives in a step."""
    if candidate.num_replicas == 1:
        return 0
    weights = [group.weight_bytes for group in parts.groups]
    if candidate.schedule == ZERO_1:
        return sum(weights)
    if candidate.schedule == FSDP:
        # once for each F and each B, but for the last group, which stays in between
        twice = 2 * sum(weights) - weights[-1]
        return candidate.num_microbatches * twice
    return 0


def _memory(parts: _Parts, candidate: Candidate) -> MemorySplit:
    """One device's memory: each microbatch's backward precedes the next forward."""
    groups, num = parts.groups, candidate.num_replicas
    weights = _distinct_bytes(parts.layers, "num_bytes")
    gradients = _distinct_bytes(parts.layers, "gradient_bytes")
    states = _distinct_bytes(parts.layers, "optimizer_bytes")
    alive = _alive_bytes(parts, candidate)
    if candidate.schedule == FSDP and num > 1:
        # Beside the shards: two groups' whole weights, and one's whole gradients.
        whole = sorted((group.weight_bytes for group in groups), reverse=True)
        gathered = sum(whole[:2]) + max(group.gradient_bytes for group in groups)
        split = -(-weights // num), -(-gradients // num), -(-states // num)
        return MemorySplit(*split, alive + gathered)
    if candidate.schedule == ZERO_1:
        states = -(-states // num)
    buckets = 0 if candidate.schedule == ONE_DEVICE else gradients
    return MemorySplit(weights, gradients, states, alive + buckets)


def _alive_bytes(parts: _Parts, candidate: Candidate) -> int:
    """Return one microbatch's activations and the operators' workspace."""
    work = max(group.backward_work_bytes for group in parts.groups)
    if not candidate.recomputes:
        return activation_bytes(parts.layers) + work
    begins = (0, *parts.boundaries)
    inputs = sum(parts.layers[begin].received_bytes for begin in begins)
    return inputs + max(group.activation_bytes for group in parts.groups) + work


def _distinct_bytes(layers: Sequence[LayerCost], what: str) -> int:
    """Return the bytes of all parameters, each counted once."""
    weights = {x.name: x for layer in layers for x in layer.weights}
    return sum(int(getattr(x, what)) for x in weights.values())
