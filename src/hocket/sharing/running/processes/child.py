"""A job's own process: the same runner as in a thread, at gates that are elsewhere."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from hocket import cuda, env
from hocket.run.cluster.start import end_with_launcher
from hocket.run.device.open import open_device
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode, Point
from hocket.sharing.running.gates import Gates, StoppedError
from hocket.sharing.running.job import Job
from hocket.sharing.running.processes.messages import (
    Message,
    error_as_json,
    forecast_as_json,
    loss_value,
    receive,
    send,
)
from hocket.sharing.running.processes.sent_job import (
    SentJob,
    received_job,
    set_sent_settings,
)
from hocket.sharing.running.random_state import JobRandom, default_generators
from hocket.sharing.running.runner import JobRunner, SharedSettings

# What `python -c` runs, with the starting process's search path.
PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hocket.sharing.running.processes.child import main; main(int(sys.argv[1]))"
)


class RemoteGates(Gates):
    """The gates of the starting process.

    Args:
        connection: the pipe to it.

    Attributes:
        losses: the runner's; each is sent when its iteration has ended.
    """

    def __init__(self, connection: Connection) -> None:
        self.losses: list[Any] = []
        self._connection = connection
        self._mode = Mode.TURNS
        self._must_watch = False

    @property
    def mode(self) -> Mode:
        """See `Gates`: as of the last answer."""
        return self._mode

    def wait_for_others(self, name: str) -> None:
        """See `Gates`."""
        self._ask("made")

    def leave(self, name: str) -> None:
        """See `Gates`: the end of the process says so."""

    def pass_through(self, name: str, point: Point) -> None:
        """See `Gates`."""
        self._ask("wait", point=point.name)

    def begin_backward(self, name: str) -> None:
        """See `Gates`."""
        self._send("backward")

    def pause(self, name: str) -> None:
        """See `Gates`."""
        self._send("pause")

    def finish(self, name: str, *, kind: str, goes_on: bool, is_watched: bool) -> None:
        """See `Gates`."""
        values = {"kind": kind, "goes_on": goes_on, "is_watched": is_watched}
        self._ask("finish", loss=loss_value(self.losses[-1]), **values)

    def must_watch(self, name: str) -> bool:
        """See `Gates`: as of the last answer."""
        return self._must_watch

    def observe(
        self, name: str, seen: Forecast, left_bytes: float, grown_bytes: float
    ) -> float:
        """See `Gates`."""
        values = {"left": left_bytes, "grown": grown_bytes}
        answer = self._ask("observe", seen=forecast_as_json(seen), **values)
        return float(answer["static"])

    def _send(self, say: str, **values: Any) -> None:
        try:
            send(self._connection, say, **values)
        except OSError:
            raise StoppedError from None

    def _ask(self, say: str, **values: Any) -> Message:
        """Send a message, and wait for the answer; the starting process may be gone."""
        self._send(say, **values)
        try:
            answer = receive(self._connection)
        except (EOFError, OSError):
            raise StoppedError from None
        if answer["say"] != "open":
            raise StoppedError
        self._mode = Mode(answer["mode"])
        self._must_watch = answer["must_watch"]
        return answer


def main(descriptor: int) -> None:
    """Run the job that is sent through a pipe; end with the process at its other end.

    Args:
        descriptor: the pipe's.
    """
    end_with_launcher(env.LAUNCHER_PID.integer())
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)
    with contextlib.suppress(EOFError, ConnectionError):  # the other end is gone
        _run(connection, receive(connection)["job"])


def _run(connection: Connection, sent: SentJob) -> None:
    job = received_job(sent)
    send(connection, "ready")
    receive(connection)
    try:
        runner = _runner(connection, sent, job)
    except Exception as error:
        send(connection, "error", **error_as_json(error))
        return
    runner.run()  # in this thread: what it forks ends with this process
    if runner.error is None:
        send(connection, "end")
    else:
        send(connection, "error", **error_as_json(runner.error))


def _runner(connection: Connection, sent: SentJob, job: Job) -> JobRunner:
    """Return the job's runner; it starts no work yet."""
    device = torch.device(sent["device"])
    set_sent_settings(sent["settings"])
    if device.type == "cuda":
        cuda.use(device)
        if sent["memory_bytes"] is not None:
            cuda.limit_bytes(device, sent["memory_bytes"])
    gates = RemoteGates(connection)
    runner = JobRunner(
        job,
        SharedSettings(gates, Mode(sent["mode"]), sent["num_iterations"]),
        open_device(device, 1, timeout_s=sent["timeout_s"]),
        JobRandom(device, default_generators(device), sent["seed"]),
    )
    gates.losses = runner.losses
    return runner
