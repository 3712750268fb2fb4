"""Pools of workers that are started once, and run many programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hocket.core.schedule import Schedule
from tests.run.support.worker_pool import WorkerPool


@dataclass
class ProgramPools:
    """One pool for each number of workers; made when it is first needed.

    Args:
        folder: of the test.
        timeout_s: what workers wait for each other.
    """

    folder: Path
    timeout_s: float = 10.0
    _pools: dict[int, WorkerPool] = field(default_factory=dict)

    def difference(self, schedule: Schedule, clip_norm: float | None = None) -> float:
        """Run a program; the largest relative difference of any worker's numbers.

        Raises:
            AssertionError: a worker failed; says what each of them wrote.
        """
        program = schedule.program
        num_workers = program.num_devices * program.num_pipelines
        if num_workers not in self._pools:
            entry = "program_workers:serve"
            self._pools[num_workers] = WorkerPool(
                entry, num_workers, self.folder, self.timeout_s
            )
        clip_text = "" if clip_norm is None else repr(clip_norm)
        return max(map(float, self._pools[num_workers].ask(f"{clip_text}\n{schedule}")))

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()
