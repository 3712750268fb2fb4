"""Where a worker stands: in the job, in the pipeline, and how it reaches the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hocket.core.schedule import Schedule
from hocket.run.cluster.group import Group, join_groups
from hocket.run.cluster.layout import Layout, replica_group
from hocket.run.cluster.world import World
from hocket.run.comm.all_sum import SumOfAll, SumOfGroup, SumOfMessages
from hocket.run.comm.transport import Transport
from hocket.run.diagnostics.flight_recorder import Ring
from hocket.run.engine.point_to_point import Mail
from hocket.run.engine.results import Results


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's place.

    Args:
        world: the job.
        layout: this worker's device and replica.
        ring: told of waits.
        transport: carries all messages.
        store: with a prefix of this pipeline's own.
        timeout_s: after which a wait for another worker ends.
    """

    world: World
    layout: Layout
    ring: Ring
    transport: Transport
    store: dist.Store
    timeout_s: float

    def with_replicas(self) -> Group | None:
        """The workers of this one's device in all replicas; every worker must call."""
        return replica_group(self.layout, self.timeout_s, self.ring.wait)

    def with_everyone(self, what: str = "norms") -> SumOfAll | None:
        """All workers of all replicas, if there are several; every worker must call.

        Args:
            what: they add up; another word each time.
        """
        if self.world.world_size == 1:
            return None
        if self.world.device.type == "cpu":
            return SumOfMessages(self.layout, self.transport, what)
        ranks = tuple(range(self.world.world_size))
        (group,) = join_groups([ranks], self.world.rank, self.timeout_s, self.ring.wait)
        return SumOfGroup(group)

    def mail(self, schedule: Schedule) -> Mail:
        """What carries messages in training."""
        return Mail(
            schedule,
            self.layout.device,
            self.layout.ranks,
            self.transport,
            self.store,
            prefix="",
            timeout_s=self.timeout_s,
        )

    def results(self, schedule: Schedule, replicas: Group | None) -> Results:
        """What hands round the losses, which the last stage's device knows."""
        last_device = schedule.program.stages[-1].device
        return Results(
            self.layout.ranks,
            last_device,
            self.layout.device,
            self.transport,
            replicas if self.layout.device == last_device else None,
            self.store,
            timeout_s=self.timeout_s,
        )
