"""Where a worker stands: in the job, in the pipeline, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.run.cluster.group import GroupMaker, WorkerGroup
from hocket.run.cluster.layout import Layout, replica_group
from hocket.run.cluster.world import Backend, World
from hocket.run.comm.all_sum import AllSum, GroupAllSum, MessageAllSum
from hocket.run.comm.transport import Transport
from hocket.run.comm.transports import (
    TransportName,
    buffers_needed,
    make_transport,
    talking_ranks,
)
from hocket.run.device.device import Device
from hocket.run.device.open import open_device
from hocket.run.diagnostics.flight_recorder import FlightRecorder


@dataclass(frozen=True, slots=True)
class OpenRun:
    """What a run has opened on one worker, before it connects to the others.

    Args:
        world: the job.
        recorder: notes waits.
        store: a store with a prefix of this run's own.
        stack: closes what was opened, at the end.
        timeout_s: after which a wait for another worker ends.
    """

    world: World
    recorder: FlightRecorder
    store: dist.Store
    stack: ExitStack
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker's place in a job, and its connections.

    Args:
        world: the job.
        layout: this worker's device and replica.
        recorder: notes waits.
        transport: carries all messages.
        store: with a prefix of this pipeline's own.
        groups: makes process groups.
        timeout_s: after which a wait for another worker ends.
        lanes: the device's lanes, where the order has several on it.
    """

    world: World
    layout: Layout
    recorder: FlightRecorder
    transport: Transport
    store: dist.Store
    groups: GroupMaker
    timeout_s: float
    lanes: Device | None = None

    def with_replicas(self) -> WorkerGroup | None:
        """The workers of this one's device in all replicas; every worker must call."""
        return replica_group(self.layout, self.groups)

    def with_everyone(self) -> AllSum | None:
        """Add up norms over all workers of all replicas; every worker must call this.

        Returns:
            The sum; None where this worker is alone.
        """
        return self.with_devices(range(self.layout.num_devices), "norms")

    def with_devices(self, devices: Sequence[int], what: str) -> AllSum | None:
        """Add up over some devices, of all replicas; every worker must call this.

        Args:
            devices: the devices that take part.
            what: is added up; another word each time.

        Returns:
            The sum; None where this worker is alone, or does not take part.
        """
        layout = self.layout
        if self.world.world_size == 1:
            return None
        if self.world.backend is Backend.GLOO:
            if layout.device not in devices:
                return None
            return MessageAllSum(layout, self.transport, what, devices)
        every = (x.ranks_of(d) for d in devices for x in layout.every)
        groups = self.groups.join([tuple(sorted(chain(*every)))])
        return GroupAllSum(groups[0]) if groups else None


def open_context(
    name: TransportName,
    run: OpenRun,
    layout: Layout,
    order: Schedule | None,
    *,
    clips: bool = False,
    sanitize: bool = False,
    others: Sequence[tuple[Schedule, Layout]] = (),
) -> WorkerContext:
    """Open the transport and the lanes that an order needs. Every worker must call.

    Args:
        name: the transport that the user asked for.
        run: the run; its stack closes them, and process groups, at the end.
        layout: this worker's device and replica.
        order: what will be played; None where that is not known yet.
        clips: whether gradients are clipped.
        sanitize: whether to look for races between lanes.
        others: orders that are played later over the same transport, each with this
            worker's place in its layout.

    Raises:
        ConfigError: `sanitize`, and every device has one lane.
        RunError: shared memory was asked for, and not all workers can share it.
    """
    if sanitize and order is not None and len(order.lanes) == order.program.num_devices:
        raise ConfigError(
            "sanitize=True looks for races between the lanes of a device, and each of "
            f"the {order.program.num_devices} devices of this order has one lane: "
            "leave it out"
        )
    layouts = [] if order is None else [(order, layout), *others]
    needed = [buffers_needed(x, clips=clips) for x, _ in layouts]
    world, recorder, timeout_s = run.world, run.recorder, run.timeout_s
    transport = make_transport(
        name,
        world,
        run.store,
        recorder,
        num_buffers=max(needed, default=0),
        timeout_s=timeout_s,
        pairs={pair for x in layouts for pair in talking_ranks(*x)} or None,
    )
    run.stack.callback(transport.close)
    groups = run.stack.enter_context(
        GroupMaker(layout.rank, timeout_s, recorder.wait, layout.tp_size)
    )
    lanes = None
    num_lanes = 1 if order is None else len(order.lanes_of(layout.device))
    if num_lanes > 1:
        lanes = open_device(
            world.device, num_lanes, timeout_s=timeout_s, sanitize=sanitize
        )
        run.stack.callback(lanes.close)
    return WorkerContext(
        world, layout, recorder, transport, run.store, groups, timeout_s, lanes
    )
