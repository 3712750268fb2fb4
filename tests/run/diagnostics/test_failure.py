"""A worker that fails is named, and takes all others with it, in time."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hocket.env import ExitCode
from hocket.errors import WorkerError
from hocket.run.diagnostics.flight_recorder import OpState, read_flight_recorder
from tests.run.support.forked_launch import launch_forked
from tests.run.support.forked_python import ForkedPython, start, start_python
from tests.run.support.processes import (
    START_S,
    WORKERS,
    environment,
    eventually,
    none_alive_within,
)

TIMEOUT_S: Final = 2.0
END_S: Final = 20.0  # from a failure to the end of all: grace and a busy machine
TORCHRUN_S: Final = 200.0  # starts four times Python with torch; ten on free cores

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No worker outlives its test: the test's folder is in their command lines."""
    yield
    assert none_alive_within(str(tmp_path))


def failure_of(fault: str, run_dir: Path) -> WorkerError:
    """Return what `launch` raises when rank 1 has this fault in 1B0 of step 3."""
    entry = "launched_workers:train"
    args: list[str | int] = [str(run_dir), fault, 3]
    with pytest.raises(WorkerError) as caught:
        launch_forked(entry, args, num_workers=2, run_dir=run_dir, timeout_s=TIMEOUT_S)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "reported", "code"),
    [
        ("raise", "raised ValueError at step 3 in 1B0: the spoon", ExitCode.WORKER),
        ("not-finite", "raised NonFiniteError at step 3 in 1B0", ExitCode.NON_FINITE),
        ("kill", "was killed by signal 9 (SIGKILL) at step 3 in 1B0", ExitCode.WORKER),
        (
            "crash",
            "was killed by signal 11 (SIGSEGV) at step 3 in 1B0",
            ExitCode.WORKER,
        ),
        ("exit", "ended with exit code 3 at step 3 in 1B0", ExitCode.WORKER),
    ],
)
def test_who_fails_is_on_top(
    tmp_path: Path, fault: str, reported: str, code: ExitCode
) -> None:
    """Whether it could still say so or not; the one that waited for it comes after."""
    begin_s = time.monotonic()
    error = failure_of(fault, tmp_path)
    assert time.monotonic() - begin_s < START_S + END_S
    first, rest = str(error).split("\nafter that:\n")
    assert first.startswith(f"rank 1 {reported}")
    # The line at fault, for what hocket does not raise on purpose.
    assert ('raise ValueError("the spoon is bent")' in first) == (fault == "raise")
    assert rest.startswith("  rank 0 ")
    assert "at step 3 in 0B0, waiting for dx of stage 1 from rank 1" in rest
    assert "the last ops of rank 1, newest last:\n  step     1  1F0" in rest
    assert (error.rank, error.exit_code) == (1, code)
    check_folder(tmp_path, error)


def check_folder(run_dir: Path, error: WorkerError) -> None:
    """All facts are there as JSON; no other user may read the workers' folder."""
    story = json.loads((run_dir / "failure.json").read_text())
    assert story["message"] == str(error)
    first, second = story["reports"]
    assert (first["rank"], second["rank"]) == (1, 0)
    assert [op["op"] for op in first["last_ops"]] == ["1F0", "1B0"] * 4
    [job] = (run_dir / "workers").iterdir()
    assert job.stat().st_mode & 0o777 == 0o700
    kept = {path.name for path in (job / "attempt-0").iterdir()}
    assert {"rank-0.json", "rank-0.ring", "rank-1.ring"} <= kept
    assert kept <= {"rank-0.json", "rank-0.ring", "rank-1.ring"} | {
        "rank-1.json",  # where it could still write it
        "rank-1.faults.txt",  # after a crash
    }


@pytest.mark.parametrize("fault", ["stop", "lock"])
def test_a_hung_worker_is_found_and_ended(tmp_path: Path, fault: str) -> None:
    """Stopped, or in a call that never returns: SIGTERM would never reach it."""
    begin_s = time.monotonic()
    error = failure_of(fault, tmp_path)
    assert time.monotonic() - begin_s < START_S + TIMEOUT_S + END_S
    assert str(error).startswith("rank 1 hung at step 3 in 1B0 (for ")
    assert "  rank 0 gave up at step 3 in 0B0, waiting for dx of" in str(error)
    assert error.exit_code == ExitCode.HANG


def test_a_busy_worker_is_named_too(tmp_path: Path) -> None:
    """It answers when asked to stop, but it was what the other waited for."""
    error = failure_of("sleep", tmp_path)
    assert str(error).startswith("rank 1 was stopped at step 3 in 1B0 (for ")
    assert error.exit_code == ExitCode.HANG


def start_script(folder: Path) -> ForkedPython:
    """A user's script whose rank 1 sits in 1B0 of step 3, in a call below Python."""
    process = start([WORKERS, folder, "sleep", "3"], folder)
    there = [(3, "0B0", OpState.WAITING), (3, "1B0", OpState.BEGUN)]
    if not eventually(lambda: positions(folder) == there, START_S):
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail((folder / "err.txt").read_text())
    return process


def positions(folder: Path) -> list[tuple[int, str, OpState]]:
    """Step, op and state of each worker, by rank."""
    rings = [read_flight_recorder(path) for path in sorted(folder.rglob("rank-*.ring"))]
    newest = [
        recorder.entries[-1] for recorder in rings if recorder and recorder.entries
    ]
    return [(entry.step, entry.op, entry.state) for entry in newest]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)],
)
def test_a_signal_ends_all_with_one_line(
    tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    """Ctrl-C reaches the whole process group, SIGTERM the launcher alone."""
    process = start_script(tmp_path)
    if number is signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(END_S) == code
    assert (tmp_path / "err.txt").read_text() == (
        f"stopped by {number.name}: rank 0 at step 3 in 0B0, rank 1 at step 3 in 1B0\n"
    )
    assert not (tmp_path / "workers").exists()


def test_a_worker_answers_from_a_wait_below_python(tmp_path: Path) -> None:
    """Rank 0 sits in gloo for 30 s, but a signal is answered within seconds."""
    process = start_script(tmp_path)
    [recorder] = tmp_path.rglob("rank-0.ring")
    found = read_flight_recorder(recorder)
    assert found is not None
    os.kill(found.pid, signal.SIGTERM)
    assert process.wait(END_S) == ExitCode.WORKER
    reported = (tmp_path / "err.txt").read_text()
    place = "at step 3 in 0B0, waiting for dx of stage 1 from rank 1"
    assert reported.startswith(f"rank 0 was stopped {place} (for ")
    assert "    dist.recv(message, rank)\n" in reported


def test_a_second_ctrl_c_does_not_leave_workers(tmp_path: Path) -> None:
    """It comes while the first is being answered."""
    process = start_script(tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(END_S) != 0
    assert none_alive_within(str(tmp_path))


def test_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """Only the kernel is left to end them."""
    process = start_script(tmp_path)
    process.kill()
    process.wait(END_S)
    assert none_alive_within(str(tmp_path), END_S)


@pytest.mark.timeout(TORCHRUN_S + 40.0)
def test_two_jobs_of_torchrun_share_a_folder(tmp_path: Path) -> None:
    """torchrun calls both "none", and the script changes the working directory.

    The first job to end removed the other's files, which then ended with
    FileNotFoundError; so did a single job after os.chdir.
    """
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from hocket.run.cluster.reporting import open_flight_recorder\n"
        "from hocket.run.cluster.store.poll import poll\n"
        "from hocket.run.cluster.world import join_world\n"
        "own, other, folder = *sys.argv[1:], Path.cwd()\n"
        "world = join_world()\n"
        "with open_flight_recorder(world, None):\n"
        "    os.chdir('/')\n"
        "    (folder / own).touch()\n"
        "    assert poll((folder / other).exists, 200)\n"
        "world.close()\n"
    )
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    jobs = [
        start_python(
            ["-m", "torch.distributed.run", f"--master-port={port}", script, *names],
            (tmp_path / f"out-{names[0]}.txt", tmp_path / f"err-{names[0]}.txt"),
            environment(),
            cwd=tmp_path,
        )
        for port, names in zip(ports, (("one", "two"), ("two", "over")), strict=True)
    ]
    assert jobs[0].wait(TORCHRUN_S) == 0, (tmp_path / "err-one.txt").read_text()
    (tmp_path / "over").touch()
    assert jobs[1].wait(TORCHRUN_S) == 0, (tmp_path / "err-two.txt").read_text()
    assert not (tmp_path / "workers").exists()


@pytest.mark.timeout(TORCHRUN_S + 40.0)
@pytest.mark.parametrize("is_written", [False, True])
def test_torchrun_shows_an_error_that_came_before_the_first_step(
    tmp_path: Path, *, is_written: bool
) -> None:
    """Last on the screen: what, where and the way out; the user's own file stays."""
    script = tmp_path / "bad.py"
    script.write_text(
        "import json, os, sys, torch, hocket\n"
        "if len(sys.argv) > 1:\n"
        "    with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "        json.dump({'message': 'my own words'}, file)\n"
        "model, loss = torch.nn.Linear(2, 2), torch.nn.functional.mse_loss\n"
        "hocket.Pipeline(model, loss, optimizer=torch.optim.SGD, example=loss,\n"
        "    num_microbatches=-3)\n"
    )
    options = ["--standalone", "--nproc-per-node=1"]
    own = ["own"] if is_written else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    done = subprocess.run(  # forked processes have no sys.excepthook
        [*torchrun, str(script), *own],
        capture_output=True,
        text=True,
        timeout=TORCHRUN_S,
        check=False,
    )
    assert done.returncode == 1
    reported = done.stderr
    summary = reported[reported.index("Root Cause (first observed failure):") :]
    said = "rank 0: ConfigError: num_microbatches is -3: it must be at least 1"
    assert (said in summary) == (not is_written)
    assert ('bad.py", line 6' in summary) == (not is_written)
    assert "<string>" not in summary
    assert ("my own words" in summary) == is_written
    assert reported.count("ConfigError: num_microbatches") == 2 - is_written


@pytest.mark.timeout(TORCHRUN_S + 40.0)
def test_torchrun_shows_each_report_once(tmp_path: Path) -> None:
    """The user's line, step and last ops, in few lines; all of it in a file.

    torchrun looks so rarely that rank 0 gives up before torchrun stops it.
    """
    options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=4"]
    torchrun = ["-m", "torch.distributed.run", *options]
    process = start([*torchrun, WORKERS, tmp_path, "raise", "3"], tmp_path)
    assert process.wait(TORCHRUN_S) == 1
    reported = (tmp_path / "err.txt").read_text()
    own = [
        x for x in reported.splitlines() if not re.match(r"[WE]\d{4} |Traceback|  ", x)
    ]
    own = own[: next(i for i, x in enumerate(own) if x.startswith("torch.distributed"))]
    assert own[0] == "rank 1 raised ValueError at step 3 in 1B0: the spoon is bent"
    assert own[1] == "the last ops of rank 1, newest last:"
    assert own[2].startswith("the whole traceback: ")
    assert own[3].startswith(
        "rank 0 gave up at step 3 in 0B0, waiting for dx of stage 1"
    )
    assert not any(line.startswith("rank") for line in own[4:])
    assert reported.count('    raise ValueError("the spoon is bent")\n') == 1
    [whole] = tmp_path.rglob("rank-1.txt")
    assert "ValueError: the spoon is bent\n" in whole.read_text()
    summary = reported[reported.index("Root Cause (first observed failure):") :]
    assert "rank 1 raised ValueError at step 3 in 1B0: the spoon is bent" in summary
