"""Measures the cost of messages and collectives, for the simulator.

Gathers and reductions of shards are played before the first step. Of messages, two
workers send some of two sizes there and back, and take the time of the calls:

    one way = the sender's call + on the way + the receiver's call
               └ handling ┘       └── link ──┘  └ handling ┘

A line through the two sizes gives what a message costs and what a byte costs, of each
part. Before each send the sender computes for a while, as it would in training: the
receiver has gone to sleep by then, and waking it is a part of a message's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from hocket.core.costs import Link
from hocket.core.hardware import load_catalogue
from hocket.core.simulate import simulate
from hocket.model.profile.precision import clock_of, timed_rounds
from hocket.planner.cluster import Cluster, MessageCosts
from hocket.run.cluster.world import World
from hocket.run.comm.schema import Schema, schema_of
from hocket.run.comm.transport import (
    Carries,
    Channel,
    Post,
    Receiver,
    Sender,
    Transport,
)
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan

_SIZES = (1 << 12, 1 << 20)  # bytes: one that is all latency, one that is bandwidth too
_NUM_ROUNDS = 24
_NUM_WARM = 4
_RING_SIZES = 1 << 14, 1 << 23  # of a reduction: all latency; mostly bandwidth
_NUM_REDUCTIONS = 6
_COMPUTE_S = 1e-3  # before each send; longer than a receiver polls before it sleeps

# Before anything is sent, messages have usual costs, rather too high than too low: then
# few stages per device are preferred to many, and narrow boundaries to wide ones.
_ON_ONE_HOST: Final = "shared-memory"
_BETWEEN_GPUS: Final = "pcie3"
_BETWEEN_HOSTS: Final = "10gb"


def usual_cluster(
    world: World, memory_bytes: int = 0, messages: MessageCosts | None = None
) -> Cluster:
    """Return all workers as a cluster with usual links.

    The balanced cut rests on these instead of measured ones, so that the same profile
    always gives the same cut.

    Args:
        world: all workers.
        memory_bytes: the memory of each for the model.
        messages: the measured costs of messages between workers of one host, which
            orders are simulated with.
    """
    catalogue = load_catalogue()
    num_hosts = max(1, world.world_size // len(world.same_host))
    is_even = num_hosts * len(world.same_host) == world.world_size
    inside = _ON_ONE_HOST if world.device.type == "cpu" else _BETWEEN_GPUS
    return Cluster(
        world.world_size,
        memory_bytes,
        catalogue.link(inside if is_even else _BETWEEN_HOSTS),
        catalogue.link(_BETWEEN_HOSTS),
        num_hosts if is_even else 1,
        messages=messages if is_even else None,
    )


def measure_messages(world: World, transport: Transport) -> MessageCosts:
    """Measure on ranks 0 and 1, and broadcast. Every worker must call this.

    With a single worker there are no messages, and they cost nothing.
    """
    if world.world_size == 1:
        return MessageCosts(Link(), Link())
    own: list[tuple[float, float]] = []
    if world.rank < 2:
        pair = _Pair(world.rank, transport, world.device)
        one_way_s, send_s = zip(*map(pair.measure, _SIZES), strict=True)
        on_way_s = [max(0.0, a - 2 * b) for a, b in zip(one_way_s, send_s, strict=True)]
        own = [_line(_SIZES, on_way_s), _line(_SIZES, send_s)]
        transport.trim()
    link, handling = world.broadcast_json(own, name="message costs")
    return MessageCosts(_link(*link), _link(*handling))


class _Pair:
    """One of the two workers that measure."""

    def __init__(self, rank: int, transport: Transport, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._clock = clock_of(device)
        there = Channel("measure 0>1", 0, 1, Carries.PLANNED)
        back = Channel("measure 1>0", 1, 0, Carries.PLANNED)
        self._transport = transport
        self._sender: Sender
        self._receiver: Receiver
        if rank == 0:
            self._sender = transport.sender(there)
            self._receiver = transport.receiver(back)
        else:
            self._receiver = transport.receiver(there)
            self._sender = transport.sender(back)
        self._tag = 0

    def measure(self, num_bytes: int) -> tuple[float, float]:
        """Send messages of one size there and back.

        Returns:
            The median seconds of one way, and of the sender's call.
        """
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        schema = schema_of((message,))
        round_s, send_s = list[float](), []
        for span in timed_rounds(round_s, self._device, _NUM_ROUNDS, _NUM_WARM):
            with span:
                send_s.append(self._there_and_back((message,), schema))
        self._sender.flush(10.0)
        return median(round_s) / 2 - _COMPUTE_S, median(send_s[_NUM_WARM:])

    def _there_and_back(self, message: tuple[Tensor], schema: Schema) -> float:
        self._tag += 1
        self._receiver.expect([self._tag], schema)
        if self._transport.needs_order:
            posts = Post(self._sender, _agreed), Post(self._receiver, _agreed)
            order = posts if self._rank == 0 else posts[::-1]
            self._transport.plan([[post] for post in order])
        if self._rank == 0:
            spent = self._send(message, schema)
            self._receiver.receive(self._tag)
        else:
            self._receiver.receive(self._tag)
            spent = self._send(message, schema)
        self._receiver.release(self._tag)
        return spent

    def _send(self, message: tuple[Tensor], schema: Schema) -> float:
        begin = self._clock() + _COMPUTE_S  # the receive has ended by then
        while perf_counter() < begin:
            pass
        self._sender.send(self._tag, message, schema)
        return perf_counter() - begin


def _agreed() -> None:
    """Agree on nothing: both ends know what the message holds."""


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of no bytes, and of each, on a line through two sizes."""
    small_s, large_s = seconds
    rate = max(0.0, (large_s - small_s) / (sizes[1] - sizes[0]))
    return max(0.0, small_s - rate * sizes[0]), rate


def _link(latency_s: float, s_per_byte: float) -> Link:
    return Link(latency_s, 1.0 / s_per_byte if s_per_byte > 0 else inf)


def measure_ring(world: World) -> Link | None:
    """Measure an all-reduce of all workers at once. Every worker must call this.

    Returns:
        The link of a ring; None for a single worker.
    """
    if world.world_size == 1:
        return None
    own_s = [_reduced_s(world, size) for size in _RING_SIZES]
    num_messages = 2 * (world.world_size - 1)
    ring_s, s_per_byte = _line(_RING_SIZES, world.broadcast_json(own_s, name="ring"))
    return _link(ring_s / num_messages, s_per_byte * world.world_size / num_messages)


def _reduced_s(world: World, num_bytes: int) -> float:
    gradients = torch.zeros(num_bytes // 4, device=world.device)
    everyone, seconds = world.everyone, list[float]()
    for span in timed_rounds(seconds, world.device, _NUM_REDUCTIONS - 1):
        world.barrier("ring")
        with span:
            everyone.wait(everyone.all_reduce(gradients, "ring"), "ring")
    return median(seconds)


def with_measured_gathers(plan: Plan, executor: Executor, world: World) -> Plan:
    """Return a plan with gathers and reductions of shards as measured.

    Each layer is a collective of its own, with copies before and behind it: a link that
    was measured with one message knows nothing of these. Every worker must call this,
    before the first step.

    Args:
        plan: what was decided.
        executor: this worker's; no gradient is there.
        world: the job.
    """
    if executor.shards is None:
        return plan
    costs, program = plan.costs, plan.schedule.program
    measured = {str(n): _gathered_s(executor, n, world) for n in executor.runners}
    everywhere = world.gather_json(measured, "seconds of gathers and reductions")
    seconds = [
        [
            median(x)
            for x in zip(
                *(own[str(n)] for own in everywhere if str(n) in own), strict=True
            )
        ]
        for n in range(program.num_stages)
    ]
    believed_s = sum(costs.reduce_s(n, program) for n, x in enumerate(seconds) if x[1])
    longer = sum(x[1] for x in seconds) / believed_s if believed_s else 1.0
    link = costs.reduce_link
    costs = replace(
        costs,
        stages=tuple(
            replace(cost, unshard_s=gather_s)
            for cost, (gather_s, _) in zip(costs.stages, seconds, strict=True)
        ),
        reduce_link=replace(
            link,
            latency_s=link.latency_s * longer,
            bytes_per_s=link.bytes_per_s / longer,
        ),
    )
    return replace(
        plan, costs=costs, predicted=simulate(plan.schedule, costs, executor.plan.gates)
    )


def _gathered_s(executor: Executor, stage: int, world: World) -> tuple[float, float]:
    """Return the seconds of a stage's gather and of its reduction; 0 without one."""
    shards, updater = executor.shards, executor.updaters.get(stage)
    assert shards is not None
    gather_s, reduce_s = list[float](), list[float]()
    # As many rounds on all workers, and few: over a slow link each takes seconds.
    for span in timed_rounds(gather_s, world.device, 3):
        with span:
            shards.unshard(stage)
            shards.take(stage)
        shards.reshard(stage)
    if updater is None or updater.reducer is None:
        return median(gather_s), 0.0
    shards.unshard(stage)
    shards.take(stage)
    for span in timed_rounds(reduce_s, world.device, 3):
        with span:
            updater.reducer.start()
            updater.reducer.finish()
    shards.reshard(stage)
    updater.forget()
    return median(gather_s), median(reduce_s)
