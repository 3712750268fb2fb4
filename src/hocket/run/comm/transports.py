"""Chooses a transport for each two workers."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final, Literal, TypeAlias

import torch.distributed as dist

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.dataflow import Value, is_sent, makes, needs
from hocket.core.op import MESSAGES
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import RunError
from hocket.run.cluster.group import new_group
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import Backend, World
from hocket.run.comm.dist.ordered import OrderedTransport
from hocket.run.comm.dist.pair_wires import NcclWires, PairWires
from hocket.run.comm.dist.transport import TorchTransport
from hocket.run.comm.shm.transport import SharedMemoryTransport, memory_domain
from hocket.run.comm.staged import StagedTransport
from hocket.run.comm.transport import NUM_BUFFERS, Channel, Receiver, Sender, Transport
from hocket.run.device.copies import copies_of
from hocket.run.diagnostics.flight_recorder import FlightRecorder, OnWait

TransportName: TypeAlias = Literal["auto", "shared-memory", "torch"]

_NUM_UNCREDITED: Final = 3  # small messages; their slots come on top of what is needed


@dataclass(eq=False)
class MixedTransport(Transport):
    """Uses shared memory between workers that can share it, else torch.distributed.

    Args:
        near: the transport to the ranks in `neighbours`.
        far: the transport to all others.
        neighbours: the ranks that can share memory with this one.
    """

    near: Transport
    far: Transport
    neighbours: frozenset[int]

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        return self._towards(channel.to_rank).sender(channel)

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        return self._towards(channel.from_rank).receiver(channel)

    def trim(self) -> None:
        """See `Transport.trim`."""
        self.near.trim()
        self.far.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        self.near.close()
        self.far.close()

    def _towards(self, rank: int) -> Transport:
        return self.near if rank in self.neighbours else self.far


def make_transport(
    name: TransportName,
    world: World,
    store: dist.Store,
    recorder: FlightRecorder,
    *,
    num_buffers: int,
    timeout_s: float,
    pairs: Iterable[tuple[int, int]] | None = None,
) -> Transport:
    """Make the transport that the user asked for. Every worker must call this.

    Args:
        name: "auto" uses shared memory wherever two workers can share it.
        world: all workers.
        store: a store with a prefix of this pipeline's own.
        recorder: records waits.
        num_buffers: receive buffers per flow that the schedule needs.
        timeout_s: how long a wait may take.
        pairs: the ranks that talk to each other; each two of all, when not given.

    Raises:
        RunError: shared memory was asked for, and not all workers can share it.
    """
    num_buffers = max(NUM_BUFFERS, num_buffers)
    neighbours = frozenset() if name == "torch" else _neighbours(world)
    if name == "shared-memory" and len(neighbours) < world.world_size:
        others = sorted(set(range(world.world_size)) - neighbours)
        raise RunError(
            f"rank {world.rank} cannot share memory with ranks {others}: they are on "
            "another host, or this system has no memory to share; use "
            'transport="auto" or "torch"'
        )
    copies = copies_of(world.device)
    # Threads send staged messages; one thread alone may note its waits.
    on_wait = recorder.wait if copies is None else _in_this_thread(recorder.wait)
    near = SharedMemoryTransport(
        dist.PrefixStore("shared memory", store),
        timeout_s=timeout_s,
        num_buffers=num_buffers + _NUM_UNCREDITED,
        num_uncredited=_NUM_UNCREDITED,
        on_wait=on_wait,
    )
    far = TorchTransport(
        dist.PrefixStore("torch", store),
        timeout_s=timeout_s,
        num_buffers=num_buffers,
        on_wait=on_wait,
        group=_own_group(world, neighbours, timeout_s),
    )
    mixed = MixedTransport(near, far, neighbours)
    host: Transport = mixed
    if copies is not None:
        host = StagedTransport(
            mixed, copies, num_buffers=num_buffers, timeout_s=timeout_s
        )
    wires = pair_wires(world, pairs)
    if wires is None:
        return host
    return OrderedTransport(
        host,
        wires,
        device=world.device,
        timeout_s=timeout_s,
        num_buffers=num_buffers,
        on_wait=on_wait,
    )


def talking_ranks(order: Schedule, layout: Layout) -> set[tuple[int, int]]:
    """Return the ranks that send messages of a schedule to each other.

    Args:
        order: the schedule.
        layout: the ranks by device and replica.

    Returns:
        The pairs of all replicas, and ranks 0 and 1, which measure links.
    """
    stages = order.program.stages
    devices = {(stages[a].device, stages[b].device) for a, b in order.program.flows}
    return {(0, 1)} | {
        pair
        for (a, b), own in product(devices, layout.every)
        if a != b
        for pair in zip(own.ranks_of(a), own.ranks_of(b), strict=True)
    }


def pair_wires(
    world: World, pairs: Iterable[tuple[int, int]] | None
) -> PairWires | None:
    """Return what moves messages from GPU to GPU; None where all go by the host.

    Every worker must call this.

    Args:
        world: all workers.
        pairs: the ranks that talk to each other; each two of all, if it is None.
    """
    if world.backend is not Backend.NCCL or world.world_size == 1:
        return None
    if pairs is None:
        pairs = combinations(range(world.world_size), 2)
    return NcclWires(pairs, world.rank, world.device, world.timeout_s)


def _in_this_thread(on_wait: OnWait) -> OnWait:
    """Call a function in the calling thread only, and ignore calls in others."""
    here = threading.current_thread()

    def note(what: str, rank: int) -> None:
        if threading.current_thread() is here:
            on_wait(what, rank)

    return note


def buffers_needed(order: Schedule, *, clips: bool = False) -> int:
    """Return enough buffers that no sender waits for a busy receiver, with headers.

    Each step's messages follow a header, which takes a buffer until the receiver reads
    any of them: one header where steps end before others begin, and where they overlap
    as many as there are steps, or messages, under way.

    Args:
        order: the schedule whose messages they hold.
        clips: whether updates wait for other devices' norms. With replicas these may be
            sent as late as another update, a step's messages behind the gradients: a
            worker that waits reads none of these messages, and the worker that is
            waited for must send all.
    """
    program = order.program
    most = max(net.num_microbatches for net in program.nets)
    late = most if clips and program.num_pipelines > 1 else 0
    messages = max(check(order).num_buffers, buffers_without_waiting(order), late)
    num_steps = program.num_steps - order.num_repeats + 1 if order.body else 1
    return messages + min(messages, num_steps)


def _neighbours(world: World) -> frozenset[int]:
    """Return the ranks that can share memory of the host with this one."""
    own = f"rank {world.rank}"
    with contextlib.suppress(RunError):  # a system without: torch carries all
        own = memory_domain()
    places = world.gather_json(own, "places")
    return frozenset(r for r, other in enumerate(places) if other == own)


def _own_group(
    world: World, neighbours: frozenset[int], timeout_s: float
) -> dist.ProcessGroup | None:
    """Make a gloo group for this transport, if any worker needs torch.distributed.

    Every worker must take part, so all agree on whether any needs it.
    """
    if world.world_size in (1, len(neighbours)):
        return None
    return new_group(range(world.world_size), timeout_s, "gloo")


# `check` proves how few buffers avoid a deadlock. With so few a sender may still wait
# for a reader that is busy with other work, which costs time that no formula counts:
#
#     d1 sends        1F0 1F1 1F2 1F3         d0 holds four messages before it reads
#     d0 is busy      0F2 0F3 0F4 0F5 2F0     the first: with three, d1 would stop
def buffers_without_waiting(schedule: Schedule) -> int:
    """Return the most messages of one flow that are sent and not yet read.

    The times are those of equal stages.

    Args:
        schedule: one that `check` accepts, without explicit messages.
    """
    program = schedule.program
    made_s: dict[Value, float] = {}
    read_s: dict[tuple[Value, int], float] = {}
    for span in simulate(schedule, Costs.uniform()).spans:
        device = schedule.lanes[span.lane].device
        if span.op.kind in MESSAGES:
            continue
        for value in makes(span.op, program):
            made_s[value] = span.end_s
        for value in needs(span.op, program):
            if is_sent(value, device, program):
                last = read_s.get((value, device), 0.0)
                read_s[value, device] = max(last, span.start_s)
    changes: dict[object, list[tuple[float, int]]] = defaultdict(list)
    for (value, device), end_s in read_s.items():
        flow = (value.fact, value.stage, device)
        changes[flow] += [(made_s[value], 1), (end_s, -1)]
    return max((_most_at_once(flow) for flow in changes.values()), default=1)


def _most_at_once(changes: list[tuple[float, int]]) -> int:
    """Return the highest sum; at one instant, sends count before reads."""
    most = count = 0
    for _, change in sorted(changes, key=lambda pair: (pair[0], -pair[1])):
        count += change
        most = max(most, count)
    return most
