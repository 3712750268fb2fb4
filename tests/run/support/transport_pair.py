"""Two real processes with a transport between them, and what became of both.

The processes are forked from a server that has imported torch already, so that a test
takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hocket.run.comm.dist.transport import TorchTransport
from hocket.run.comm.schema import Schema, message_tag
from hocket.run.comm.shm.transport import SharedMemoryTransport
from hocket.run.comm.staged import StagedTransport
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport
from tests.run.support.delayed_copies import DelayedCopies
from tests.run.support.fork_server import fork_server

THERE: Final = Channel("F0>1", 0, 1)
BACK: Final = Channel("B1>0", 1, 0)

SHARED: Final = "shared memory"
TORCH: Final = "torch"
STAGED: Final = "staged"
each_kind = pytest.mark.parametrize("kind", [SHARED, TORCH, STAGED])

SCHEMA: Final = Schema.parse("float32[3, 5], int64[4]")

LIMIT_S: Final = 80.0  # for one test's processes, all together


@dataclass(frozen=True)
class Settings:
    """How the transport of a test is made."""

    kind: str
    timeout_s: float = 20.0
    num_buffers: int = 4
    num_uncredited: int = 0


@dataclass
class Worker:
    """What the body of a test has in one of its processes."""

    rank: int
    store: Store
    transport: Transport
    waits: list[tuple[str, int]]
    ends: tuple[Sender, Receiver] = field(init=False)

    def __post_init__(self) -> None:
        """Make this worker's way to the other, and the way back."""
        out, back = (THERE, BACK) if self.rank == 0 else (BACK, THERE)
        self.ends = self.transport.sender(out), self.transport.receiver(back)

    def note_fault(self) -> None:
        """Say when something is about to happen to this worker."""
        self.store.set("fault", str(time.monotonic()))

    def meet(self, name: str) -> None:
        """Go on when the other worker is here too, or after `LIMIT_S`."""
        self.store.set(f"{name}/{self.rank}", "")
        until_s = time.monotonic() + LIMIT_S
        while not self.store.check([f"{name}/{1 - self.rank}"]):
            if time.monotonic() > until_s:
                return
            time.sleep(0.002)


@dataclass(frozen=True)
class Outcome:
    """How one worker ended: with a value, an error, or neither.

    Args:
        value: what its body returned.
        error: what its body raised, as text.
        kind: the type of that.
        wall_s: how long the body ran.
        end_s: when it ended, on the clock of all processes.
    """

    value: Any = None
    error: str = ""
    kind: str = ""
    wall_s: float = 0.0
    end_s: float = 0.0


Body = Callable[[Worker], Any]


def run_pair(folder: Path, settings: Settings, *bodies: Body) -> list[Outcome]:
    """Run one body in each of two processes, and hear how both ended.

    Args:
        folder: where the two meet.
        settings: of the transport.
        bodies: of rank 0 and rank 1, functions of a module.
    """
    with _started(folder, settings, bodies) as pipes:
        return [_outcome(pipe) for pipe in pipes]


def run_survivor(folder: Path, settings: Settings, *bodies: Body) -> Outcome:
    """The same where rank 1 does not live to say anything: how rank 0 ended."""
    with _started(folder, settings, bodies) as pipes:
        return _outcome(pipes[0])


def seconds_after_fault(folder: Path, outcome: Outcome) -> float:
    """How long after the other worker's fault this one ended."""
    store = dist.FileStore(str(folder / "store"), 2)
    return outcome.end_s - float(store.get("fault"))


def run_both(folder: Path, settings: Settings, body: Body) -> list[Any]:
    """Run one body in both processes, and return what both return."""
    outcomes = run_pair(folder, settings, body, body)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    return [outcome.value for outcome in outcomes]


def tags_of(schema: Schema, count: int, step: int = 0) -> list[int]:
    """The tags of one step."""
    return [message_tag(schema, step, microbatch) for microbatch in range(count)]


def content(rank: int, number: int) -> list[Tensor]:
    """Values that no other message has."""
    base = 1000.0 * rank + number
    return [torch.full((3, 5), base), torch.arange(4) + int(base)]


def same(a: Any, b: Any) -> bool:
    """Whether two messages hold equal tensors."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


@contextlib.contextmanager
def _started(
    folder: Path, settings: Settings, bodies: Sequence[Body]
) -> Iterator[list[Connection]]:
    """Run the bodies, and leave no process behind."""
    context = fork_server()
    processes, pipes = [], []
    for rank, body in enumerate(bodies):
        pipe, far = context.Pipe(duplex=False)
        arguments = (body, rank, folder / "store", settings, far)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        far.close()
        processes.append(process)
        pipes.append(pipe)
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join(10.0)


def _outcome(pipe: Connection) -> Outcome:
    """What a worker says about its end."""
    if not pipe.poll(LIMIT_S):
        return Outcome(error=f"nothing within {LIMIT_S} s", kind="timeout")
    try:
        outcome = pipe.recv()
    except EOFError:
        return Outcome(error="it was killed", kind="killed")
    assert isinstance(outcome, Outcome)
    return outcome


def _work(
    body: Body, rank: int, store: Path, settings: Settings, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    worker = _join(rank, store, settings)
    begin_s = time.monotonic()
    try:
        outcome = Outcome(body(worker))
    except Exception as error:
        outcome = Outcome(error=str(error), kind=type(error).__name__)
    end_s = time.monotonic()
    pipe.send(replace(outcome, wall_s=end_s - begin_s, end_s=end_s))
    if not outcome.error:
        # gloo loses a message that the other end has not read when this one exits.
        worker.meet("end")
    worker.transport.close()
    os._exit(0)


def _join(rank: int, path: Path, settings: Settings) -> Worker:
    store = dist.FileStore(str(path), 2)
    waits: list[tuple[str, int]] = []

    def on_wait(name: str, other: int) -> None:
        waits.append((name, other))

    if settings.kind in (SHARED, STAGED):
        transport: Transport = SharedMemoryTransport(
            store,
            timeout_s=settings.timeout_s,
            num_buffers=settings.num_buffers,
            num_uncredited=settings.num_uncredited,
            on_wait=on_wait,
        )
        if settings.kind == STAGED:
            transport = StagedTransport(
                transport,
                DelayedCopies(0.001),
                num_buffers=settings.num_buffers,
                timeout_s=settings.timeout_s,
            )
        return Worker(rank, store, transport, waits)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2
    )
    transport = TorchTransport(
        dist.PrefixStore("transport", store),
        timeout_s=settings.timeout_s,
        num_buffers=settings.num_buffers,
        on_wait=on_wait,
    )
    worker = Worker(rank, store, transport, waits)
    worker.meet("joined")  # gloo fails where the other end is gone before it connects
    return worker
