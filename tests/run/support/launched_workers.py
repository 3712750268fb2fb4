"""Entry functions of the workers that the tests of launching start.

Also a script: `launched_workers.py RUN_DIR FAULT AT_STEP` launches `train`; under
torchrun it is a worker of `train` itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hocket import env
from hocket.errors import (
    DataError,
    NonFiniteError,
    RunError,
    WaitError,
    WorkerError,
)
from hocket.run.cluster.launch import launch
from hocket.run.cluster.reporting import report_failures
from hocket.run.cluster.world import World, join_world, ping
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.diagnostics.job_folder import Json

NEVER_S = 300.0  # longer than any test


def greet(word: str) -> Json:
    """Where this worker is, and what was broadcast to it."""
    world = join_world()
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    begin_s = time.perf_counter()
    estimate_s = ping(world.rank, 1 - world.rank)
    place: Json = {
        "word": word,
        "rank": world.rank,
        "world_size": world.world_size,
        "same_host": list(world.same_host),
        "threads": torch.get_num_threads(),
        "timeout_s": world.timeout_s,
        "offset_s": world.clock_offset_s,
        "estimate_s": estimate_s,
        "ping_s": time.perf_counter() - begin_s,
        "total": total.item(),
        "gathered": world.gather_json({"rank": world.rank}),
        "received": world.broadcast_json(f"by {world.rank}", from_rank=1),
        "own_listeners": listeners(os.getpid()),
        "launcher_listeners": listeners(env.LAUNCHER_PID.integer()),
    }
    world.barrier("end")
    world.close()
    return place


def join_again() -> Json:
    """Join twice, one after the other: what is heard, and what it takes to do so."""
    heard: list[Json] = []
    for turn in range(2):
        world = join_world()
        total = torch.tensor([1.0 + world.rank])
        dist.all_reduce(total)
        heard.append([*world.gather_json([turn, world.rank]), total.item()])
        try:
            join_world()
        except RunError as error:
            heard.append(str(error))
        world.barrier("end")
        world.close()
    return heard


def fail_until(attempt: int) -> Json:
    """Rank 1 is killed in all attempts before this one."""
    world = join_world()
    first = world.store.add("arrivals", 1)
    world.barrier()
    if world.rank == 1 and world.attempt < attempt:
        FAULTS["kill"]()
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    world.close()
    return {"attempt": world.attempt, "arrival": first, "total": total.item()}


def leave(run_dir: str, how: str) -> None:
    """Rank 1 leaves where rank 0 still waits for it, and says that all is well."""
    world = join_world()
    if world.rank == 1:
        match how:
            case "sys.exit":
                sys.exit(0)
            case "os._exit":
                os._exit(0)
            case _:
                return
    with report_failures(world, Path(run_dir)) as recorder:
        recorder.begin("0B0", 3)
        recorder.wait("dx of stage 1", 1)
        _receive(torch.zeros(4), 1)


def leave_a_process(folder: str) -> None:
    """Rank 1 starts a process that ignores signals, and is killed."""
    world = join_world()
    if world.rank == 1:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        command = (sys.executable, "-c", f"{code}; time.sleep(300)", folder)
        subprocess.Popen(command)
        FAULTS["kill"]()
    world.barrier()


def refuse() -> None:
    """Find that the user's data will not do."""
    raise DataError("3 samples, where 4 are needed")


def listeners(pid: int) -> list[str]:
    """The addresses at which a process listens, as /proc writes them."""
    sockets = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(handle))
    return [
        line.split()[1].partition(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in sockets
    ]


def train(run_dir: str, fault: str, at_step: int) -> None:
    """Send one number forth and back per step; rank 1 has a fault at one step.

    At that step, rank 1 is in 1B0, and rank 0 waits for what it should send.
    """
    world = join_world()
    with report_failures(world, Path(run_dir)) as recorder:
        for step in range(1000):
            for _ in _step(world, recorder, step):
                if world.rank == 1 and step == at_step:
                    FAULTS[fault]()
    world.close()


def _step(world: World, recorder: FlightRecorder, step: int) -> Iterator[None]:
    """One step of a two-stage pipeline; yields in the middle of the last op."""
    message = torch.zeros(4)
    if world.rank == 0:
        recorder.begin("0F0", step)
        dist.send(message, 1)
        recorder.end()
        recorder.begin("0B0", step)
        recorder.wait("dx of stage 1", 1)
        _receive(message, 1)
    else:
        recorder.begin("1F0", step)
        recorder.wait("y of stage 0", 0)
        _receive(message, 0)
        recorder.end()
        recorder.begin("1B0", step)
        yield
        dist.send(message, 0)
    recorder.end()


def _receive(message: torch.Tensor, rank: int) -> None:
    """Receive as the pipeline does: a wait that fails is a WaitError."""
    try:
        dist.recv(message, rank)
    except RuntimeError as error:
        raise WaitError(f"nothing came: {str(error).splitlines()[0]}") from error


def _raise() -> None:
    raise ValueError("the spoon is bent")


def _not_finite() -> None:
    raise NonFiniteError("the loss is nan")


def _hold_the_lock() -> None:
    """Hang in a call that never lets Python run, not even its signal handlers."""
    sum(range(10**13))


def _wait_below_python() -> None:
    """Hang in a call that lets other threads run, but goes on after a signal."""
    while True:
        ctypes.CDLL(None).sleep(int(NEVER_S))


FAULTS = {
    "none": lambda: None,
    "raise": _raise,
    "not-finite": _not_finite,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "lock": _hold_the_lock,
    "sleep": _wait_below_python,
}


def main() -> None:
    """Do what the command line says."""
    run_dir, fault, at_step = sys.argv[1:]
    if env.RANK.is_set:
        train(run_dir, fault, int(at_step))
        return
    try:
        launch(
            train,
            [run_dir, fault, int(at_step)],
            num_workers=2,
            run_dir=Path(run_dir),
            timeout_s=30.0,
        )
    except (KeyboardInterrupt, WorkerError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(env.exit_code_of(error))


if __name__ == "__main__":
    main()
