"""The starting process's side of a job's process: a thread plays it at the gates.

    job's process ──pipe──▶ thread here ──▶ JobGates ──▶ policy
                  ◀────────             ◀── when the gate opens

Whatever ends the process, a signal too, ends the thread: it leaves the gates, and the
other jobs go on. A job that hangs is killed, and all that it has started with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Final

import torch

from hocket import cuda, env
from hocket.errors import RunError, WaitError
from hocket.run.cluster.start import end_with_launcher
from hocket.run.device.open import open_device
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode, Point
from hocket.sharing.running.gate import Gates, JobGates, StoppedError
from hocket.sharing.running.job import Job
from hocket.sharing.running.processes.messages import (
    Message,
    error_as_json,
    error_of,
    forecast_as_json,
    forecast_of,
    loss_value,
    receive,
    received_job,
    send,
    set_sent_settings,
)
from hocket.sharing.running.random_state import JobRandom, default_generators
from hocket.sharing.running.runner import JobRunner, SharedSettings

_START_S: Final = 300.0  # to import torch on a busy machine, or from a slow disk
_END_S: Final = 10.0  # from its last message to its end


class JobProcess:
    """One job's process, and the thread that plays it at the gates.

    Args:
        sent: the job.
        gates: the gates of all jobs.

    Attributes:
        error: what ended it, if it was not the end of its batches.
    """

    def __init__(self, sent: Message, gates: JobGates) -> None:
        self.name = sent["name"]
        self.error: BaseException | None = None
        self.made = threading.Event()
        self.thread = threading.Thread(
            target=self._play, name=f"hocket job {self.name}", daemon=True
        )
        self._sent, self._gates = sent, gates
        self._losses: list[float] = []
        self._connection, far_end = Pipe()
        path = [str(Path(part).absolute()) for part in sys.path]
        with far_end:
            number = far_end.fileno()
            self._process = Popen(
                [sys.executable, "-c", PROGRAM, str(number), json.dumps(path)],
                env=env.with_variables(
                    {env.LAUNCHER_PID: str(os.getpid()), env.SHARED_JOB: self.name}
                ),
                stdin=DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )
        self._ended = os.pidfd_open(self._process.pid)
        with contextlib.suppress(OSError):  # `wait_until_started` says why it ended
            send(self._connection, "job", job=sent)

    def wait_until_started(self) -> None:
        """Wait until the process has imported torch and the job's function.

        Raises:
            RunError: it ended before.
            WaitError: it takes five minutes.
        """
        try:
            found = self._receive(_START_S)
        except EOFError:
            raise RunError(f"job {self.name!r}: {self._how_it_ended()}") from None
        if found is None:
            raise WaitError(
                f"the process of job {self.name!r} did not start within {_START_S:.0f} "
                "s: is the machine busy, or a disk slow?"
            )

    def abandon(self) -> None:
        """Kill the process and what it has started: it hangs."""
        done = f"iteration {len(self._losses)}" if self.made.is_set() else "make"
        self.error = WaitError(
            f"{done} took longer than timeout_s={self._sent['timeout_s']:g}: its "
            "process was killed"
        )
        self._kill()

    def join(self, *, is_hung: bool) -> None:
        """Wait for the end of the process.

        Args:
            is_hung: whether it was abandoned; makes no difference.
        """
        self.thread.join(_END_S)

    def close_after(self, error: object, *_: object) -> None:
        """Wait for the end of the process, or kill it; nothing of it is left behind.

        Args:
            error: what has ended the call, if something has: then nothing waits.
        """
        if error is None and not isinstance(self.error, WaitError):
            wait([self._ended], _END_S)
        self._kill()
        self._process.wait()
        self.thread.join(_END_S)  # it may wait for these
        self._connection.close()
        os.close(self._ended)

    def loss_values(self) -> tuple[float, ...]:
        """Return the losses; nan where a step returned nothing."""
        return tuple(self._losses)

    def _play(self) -> None:
        try:
            send(self._connection, "make")
            while self._play_one(self._received()):
                pass
        except StoppedError:
            pass
        except (EOFError, OSError):
            self.error = self.error or RunError(self._how_it_ended())
        except Exception as error:
            self.error = error
            raise
        finally:
            with contextlib.suppress(OSError):
                send(self._connection, "stop")
            self.made.set()
            self._gates.leave(self.name)

    def _received(self) -> Message:
        found = self._receive(None)
        assert found is not None
        return found

    def _receive(self, timeout_s: float | None) -> Message | None:
        """Wait for a message; return None after the timeout.

        A process that this one has started may hold the pipe open: so its end counts,
        and not the pipe's alone.

        Raises:
            EOFError: the process has ended.
        """
        ready = wait([self._connection, self._ended], timeout_s)
        if self._connection in ready:
            try:
                return receive(self._connection)
            except OSError:
                raise EOFError from None
        if ready:
            raise EOFError
        return None

    def _play_one(self, message: Message) -> bool:
        """Do what a message asks for; return whether more may come."""
        name, gates = self.name, self._gates
        match message["say"]:
            case "made":
                self.made.set()
                gates.wait_for_others(name)
                self._open()
            case "wait":
                gates.pass_through(name, Point[message["point"]])
                self._open()
            case "backward":
                gates.begin_backward(name)
            case "pause":
                gates.pause(name)
            case "finish":
                self._losses.append(message["loss"])
                gates.finish(
                    name,
                    kind=message["kind"],
                    goes_on=message["goes_on"],
                    is_watched=message["is_watched"],
                )
                self._open()
            case "observe":
                seen = forecast_of(message["seen"])
                self._open(gates.observe(name, seen, message["left"], message["grown"]))
            case last:
                self.error = error_of(message) if last == "error" else None
                return False
        return True

    def _open(self, static_bytes: float = 0.0) -> None:
        """Let the job go on."""
        send(
            self._connection,
            "open",
            mode=self._gates.mode.value,
            must_watch=self._gates.must_watch(self.name),
            static=static_bytes,
        )

    def _kill(self) -> None:
        """Kill the process and what it has started, as long as it has its number."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _how_it_ended(self) -> str:
        """Say how the process ended; it has closed its pipe, or is gone."""
        wait([self._ended], _END_S)
        self._kill()
        code = self._process.wait()
        step = f"in iteration {len(self._losses)}"
        if not self.made.is_set():
            step = "before it was made"
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            by = known.get(-code, f"signal {-code}")
            return f"its process was ended by {by} {step}"
        return f"its process exited with code {code} {step}"


# A job's own process: the same runner as in a thread, at gates that are elsewhere.
#
# What `python -c` runs, with the starting process's search path.
PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hocket.sharing.running.processes.job_process import main; "
    "main(int(sys.argv[1]))"
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


def _run(connection: Connection, sent: Message) -> None:
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


def _runner(connection: Connection, sent: Message, job: Job) -> JobRunner:
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
