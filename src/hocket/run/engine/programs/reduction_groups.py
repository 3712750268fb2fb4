"""Which workers add up gradients (R), gather outputs (G) and add up losses.

Collectives of one group must begin in one order on all members. Ops R and G do, since
`check` proves it. Where a device has several lanes, an op of one lane and a collective
that follows from an op of another have no order: each then has a group of its own.
"""

from __future__ import annotations

from hocket.core.schedule import Schedule
from hocket.run.cluster.group import WorkerGroup
from hocket.run.engine.worker_context import WorkerContext


class ReductionGroups:
    """This worker's groups. Every worker must make them at the same time.

    Args:
        schedule: what is played.
        context: this worker's.
        replicas: this worker and its replicas; None where there is one replica.
    """

    def __init__(
        self, schedule: Schedule, context: WorkerContext, replicas: WorkerGroup | None
    ) -> None:
        self._context = context
        self._replicas = replicas
        program = schedule.program
        self._apart = len(schedule.lanes) > program.num_devices
        self._stages: dict[int, WorkerGroup | None] = dict.fromkeys(
            range(program.num_stages), replicas
        )
        made: dict[object, WorkerGroup | None] = {}
        for stage in sorted(program.reduced_stages | program.gathered_stages):
            copies = program.copies_of[stage]
            if len(copies) == 1 and not self._apart:
                continue
            devices = tuple(sorted({program.stages[copy].device for copy in copies}))
            key = copies if self._apart else devices
            if key not in made:
                made[key] = self._joined(devices)
            self._stages[stage] = made[key]

    def reduces(self, stage: int) -> WorkerGroup | None:
        """Return the workers that add up a stage's gradients."""
        return self._stages[stage]

    def losses(self) -> WorkerGroup | None:
        """Return the workers that add up losses; every worker must call this."""
        return self._context.with_replicas() if self._apart else self._replicas

    def _joined(self, devices: tuple[int, ...]) -> WorkerGroup | None:
        layout = self._context.layout
        ranks = tuple(
            sorted(rank for device in devices for rank in layout.replicas_of(device))
        )
        if len(ranks) == 1:
            return None
        groups = self._context.groups.join([ranks])
        return groups[0] if groups else None
