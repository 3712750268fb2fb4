"""Pools of workers that are started once, and run many programs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from hocket.core.schedule import Schedule
from tests.run.support.forked import start_forked
from tests.run.support.program_workers import END

LIMIT_S: Final = 60.0  # for one program, on a busy machine


@dataclass
class _Pool:
    """The workers of one job."""

    folder: Path
    workers: list[BaseProcess]
    num_programs: int = 0


@dataclass
class ProgramPools:
    """One pool for each number of workers; made when it is first needed.

    Args:
        folder: of the test.
        timeout_s: what workers wait for each other.
    """

    folder: Path
    timeout_s: float = 10.0
    _pools: dict[int, _Pool] = field(default_factory=dict)
    _num_made: int = 0

    def difference(self, schedule: Schedule, clip_norm: float | None = None) -> float:
        """Run a program; the largest relative difference of any worker's numbers.

        Raises:
            AssertionError: a worker failed; says what each of them wrote.
        """
        program = schedule.program
        num_workers = program.num_devices * program.num_replicas
        pool = self._pools.get(num_workers) or self._start(num_workers)
        path = pool.folder / f"{pool.num_programs}.txt"
        clip_text = "" if clip_norm is None else repr(clip_norm)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(f"{clip_text}\n{schedule}")
        unfinished.rename(path)
        answers = [path.with_suffix(f".{rank}") for rank in range(num_workers)]
        until_s = time.monotonic() + LIMIT_S
        while not all(answer.exists() for answer in answers):
            if time.monotonic() > until_s or not all(
                x.is_alive() for x in pool.workers
            ):
                time.sleep(0.5)  # for reports of those that have just found out
                self._end(num_workers)
                raise AssertionError(self._reported(pool))
            time.sleep(0.002)
        pool.num_programs += 1
        return max(float(answer.read_text()) for answer in answers)

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            (pool.folder / f"{pool.num_programs}.txt").write_text(END)
        until_s = time.monotonic() + LIMIT_S
        for num_workers, pool in [*self._pools.items()]:
            for worker in pool.workers:
                worker.join(max(0.0, until_s - time.monotonic()))
            self._end(num_workers)

    def _start(self, num_workers: int) -> _Pool:
        self._num_made += 1
        folder = self.folder / f"pool-{self._num_made}"
        folder.mkdir()
        workers = start_forked(
            "tests.run.support.program_workers:serve",
            str(folder),
            num_workers=num_workers,
            folder=folder,
            timeout_s=self.timeout_s,
        )
        pool = self._pools[num_workers] = _Pool(folder, workers)
        return pool

    def _end(self, num_workers: int) -> None:
        pool = self._pools.pop(num_workers)
        for worker in pool.workers:
            worker.kill()
            worker.join()

    def _reported(self, pool: _Pool) -> str:
        reports = sorted(pool.folder.glob("job/attempt-0/rank-?.json"))
        outputs = sorted(pool.folder.glob("rank-*.txt"))
        return "\n".join(
            f"{path.name}: {path.read_text()[-3000:]}" for path in (*reports, *outputs)
        )
