"""The private folder in which a job's workers leave files for each other.

What is where:

    <run>/workers/<job>/            mode 0700, a new one for each job
        job.json                    the launcher's parameters for the workers
        attempt-0/                  one per start; a restart sees none of the old
            store                   the workers of one host rendezvous here
            rank-0.ring             its last ops (flight_recorder.py)
            rank-0.json             how it failed (failure.py)
            rank-0.txt              the same to read: traceback and last ops
            first-failure           made by the first rank of this host that failed
            rank-0.faults.txt       its stacks at a crash below Python
            rank-0.result.json      what it returned

A run without a folder has this user's own one among temporary files.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hocket import env
from hocket.errors import RunError

# What may be written; what is read back is Any, as from `json.loads`.
Json: TypeAlias = (
    "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
)


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files of one worker in one attempt.

    Args:
        folder: the attempt's folder.
        rank: the worker's rank.
    """

    folder: Path
    rank: int

    @property
    def recorder(self) -> Path:
        """The file of its flight recorder."""
        return self.folder / f"rank-{self.rank}.ring"

    @property
    def report(self) -> Path:
        """The file with the report of its failure."""
        return self.folder / f"rank-{self.rank}.json"

    @property
    def text(self) -> Path:
        """The file with its traceback and its last ops, to read."""
        return self.folder / f"rank-{self.rank}.txt"

    @property
    def faults(self) -> Path:
        """The file with its stacks after a crash below Python."""
        return self.folder / f"rank-{self.rank}.faults.txt"

    @property
    def result(self) -> Path:
        """The file with what its entry function returned."""
        return self.folder / f"rank-{self.rank}.result.json"


def _jobs_dir(run_dir: Path | None) -> Path:
    """Return the folder of jobs' folders; absolute.

    Raises:
        RunError: it is this user's by name, and another user has made it.
    """
    if run_dir is None:
        run_dir = Path(tempfile.gettempdir(), f"hocket-{os.getuid()}")
        run_dir.mkdir(mode=0o700, exist_ok=True)
        if run_dir.lstat().st_uid != os.getuid():
            raise RunError(
                f"{run_dir} is another user's: set TMPDIR to your own folder"
            )
    return run_dir.absolute() / "workers"


def new_job_dir(run_dir: Path | None) -> Path:
    """Make the folder of a job that starts now."""
    parent = _jobs_dir(run_dir)
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="job-", dir=parent))


def job_dir(run_dir: Path | None, token: str) -> Path:
    """Return the folder of the job that this process is a worker of; absolute.

    Args:
        run_dir: the run's folder, if it has one.
        token: distinguishes jobs of one name: torchrun calls each "none".
    """
    if env.JOB_DIR.is_set:
        return Path(env.JOB_DIR.text())
    name = re.sub(r"[^\w.-]", "_", env.RUN_ID.text()).lstrip(".") or "job"
    return _jobs_dir(run_dir) / f"{name}-{token}"


def attempt_dir(job: Path, attempt: int) -> Path:
    """Return the folder of one attempt; made if need be, readable by this user only."""
    folder = job / f"attempt-{attempt}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def is_first_failure(attempt: Path) -> bool:
    """Return whether no other worker of this host has called this in an attempt."""
    try:
        (attempt / "first-failure").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def store_path(attempt: Path) -> Path:
    """Return the file in which the workers of one host rendezvous."""
    return attempt / "store"


def write_json(path: Path, value: object) -> None:
    """Write a whole file or none: readers never see half of it.

    Raises:
        TypeError: the value is not JSON.
        RunError: the file cannot be written; it has the message of what is lost.
    """
    text = json.dumps(value)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(text)
        written.replace(path)
    except OSError as error:
        written.unlink(missing_ok=True)
        lost = value.get("message") if isinstance(value, dict) else None
        why = f"cannot write {path}: {error.strerror or error}"
        raise RunError(f"{why}. It should say: {lost}" if lost else why) from None
