"""Workers of one job that are started once, and answer one text after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from hocket.run.cluster.world import World, join_world
from tests.run.support.forked import start_forked

LIMIT_S: Final = 60.0  # for one text, on a busy machine
END: Final = "end"
SHORT_S: Final = 0.002  # between two looks for a file
LONG_S: Final = 0.1  # the same, of workers that have waited for a second: tests go on


@dataclass
class WorkerPool:
    """The workers; started when they are first asked, and again after a failure.

    Args:
        entry: `module:function` of a folder, which calls `serve_texts`.
        num_workers: of the job.
        folder: of the test.
        timeout_s: what workers wait for each other.
        limit_s: what a text may take.
    """

    entry: str
    num_workers: int
    folder: Path
    timeout_s: float = 10.0
    limit_s: float = LIMIT_S
    _workers: list[BaseProcess] = field(default_factory=list)
    _job: Path = Path()
    _num_jobs: int = 0
    _num_texts: int = 0

    def ask(self, text: str) -> list[str]:
        """Give a text to all workers; what each answers, by rank.

        Raises:
            AssertionError: a worker failed; says what each of them wrote.
        """
        if not self._workers:
            self._start()
        path = self._job / f"{self._num_texts}.txt"
        unfinished = path.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.rename(path)
        answers = [path.with_suffix(f".{rank}") for rank in range(self.num_workers)]
        until_s = time.monotonic() + self.limit_s
        while not all(answer.exists() for answer in answers):
            is_late = time.monotonic() > until_s
            if is_late or not all(worker.is_alive() for worker in self._workers):
                time.sleep(0.5)  # for reports of those that have just found out
                self.end()
                raise AssertionError(self._reported())
            time.sleep(SHORT_S)
        self._num_texts += 1
        return [answer.read_text() for answer in answers]

    def close(self) -> None:
        """Let the workers end by themselves."""
        if self._workers:
            (self._job / f"{self._num_texts}.txt").write_text(END)
        until_s = time.monotonic() + self.limit_s
        for worker in self._workers:
            worker.join(max(0.0, until_s - time.monotonic()))
        self.end()

    def end(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []

    def _start(self) -> None:
        self._num_jobs, self._num_texts = self._num_jobs + 1, 0
        name = f"{self.num_workers}-workers-{self._num_jobs}"
        self._job = self.folder / name
        self._job.mkdir()
        self._workers = start_forked(
            self.entry,
            str(self._job),
            num_workers=self.num_workers,
            folder=self._job,
            timeout_s=self.timeout_s,
        )

    def _reported(self) -> str:
        reports = sorted(self._job.glob("job/attempt-0/rank-?.json"))
        outputs = sorted(self._job.glob("rank-*.txt"))
        return "\n".join(
            f"{path.name}: {path.read_text()[-3000:]}" for path in (*reports, *outputs)
        )


def serve_texts(folder: str, answer: Callable[[World, str], str]) -> None:
    """Answer the texts that appear in a folder, one by one, until one says `END`.

    A text is in a file with its number; each rank leaves its answer beside it.
    """
    world = join_world()
    number = 0
    while True:
        path, pause_s = Path(folder) / f"{number}.txt", SHORT_S
        while not path.exists():
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, LONG_S)
        text = path.read_text()
        if text == END:
            world.close()
            return
        answered = path.with_suffix(f".{world.rank}.new")
        answered.write_text(answer(world, text))
        answered.rename(path.with_suffix(f".{world.rank}"))
        number += 1
