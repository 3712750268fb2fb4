"""What a message costs between two processes of one host: shared memory beside gloo.

    python -m bench.transport.run

All in microseconds; medians over a round's messages (for crowded, means), then medians
over the rounds.

    idle          ping-pong: from the call of send to the return of receive
    busy          the same, where each computes for a while before it answers
    crowded       as idle, beside one process more per worker that never rests; the mean
    overlapped    both compute all the time, and in each iteration send one message and
                  receive one that was sent an iteration before: what that adds to it
    send          the call, when no worker has to wait
    receive       the call, when no worker has to wait, with the release
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hocket
from bench.measure import environment, write_result
from hocket.run.cluster.world import World, join_world
from hocket.run.comm.dist.transport import TorchTransport
from hocket.run.comm.schema import message_tag, schema_of
from hocket.run.comm.shm.transport import SharedMemoryTransport
from hocket.run.comm.transport import Channel, Transport

RESULTS = Path(__file__).parent / "results"
SIZES_BYTES = (4 << 10, 16 << 10, 512 << 10, 4 << 20)
TIMEOUT_S = 60.0
BLOCK = 20  # iterations


def main() -> None:
    """Measure, show and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the workers do; `environment` reports it
    with tempfile.TemporaryDirectory() as folder:
        results = hocket.launch(
            "bench.transport.run:worker",
            [arguments.rounds],
            num_workers=2,
            run_dir=Path(folder),
        )
    rows = results[0]
    for row in rows:
        print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(num_rounds: int) -> list[dict[str, Any]]:
    """All measurements, on one of the two workers; transports take turns."""
    torch.set_num_threads(1)
    world = join_world()
    meters = [
        Meter(name, transport, num_bytes, world)
        for num_bytes in SIZES_BYTES
        for name, transport in make_transports(world, num_bytes).items()
    ]
    for _ in range(num_rounds):
        for meter in meters:
            meter.measure()
    for _ in range(num_rounds):
        for meter in meters:
            meter.measure_crowded()
    rows = [meter.row() for meter in meters]
    world.barrier("end")
    world.close()
    return rows


def make_transports(world: World, num_bytes: int) -> dict[str, Transport]:
    """Both, with channels of their own."""
    store = dist.PrefixStore(str(num_bytes), world.store)
    return {
        "gloo": TorchTransport(
            dist.PrefixStore("torch", store),
            timeout_s=TIMEOUT_S,
            group=dist.new_group(backend="gloo"),
        ),
        "shared memory": SharedMemoryTransport(
            dist.PrefixStore("shared memory", store), timeout_s=TIMEOUT_S
        ),
    }


class Meter:
    """Measures one size on one transport, a little at a time.

    Args:
        name: of the transport.
        transport: between the two workers.
        num_bytes: of a message.
        world: both workers.
    """

    def __init__(
        self, name: str, transport: Transport, num_bytes: int, world: World
    ) -> None:
        self._name = name
        self._num_bytes = num_bytes
        self._world = world
        there, back = Channel("F0>1", 0, 1), Channel("B1>0", 1, 0)
        out, into = (there, back) if world.rank == 0 else (back, there)
        self._sender = transport.sender(out)
        self._receiver = transport.receiver(into)
        self._tensor = torch.randn(num_bytes // 4)
        self._schema = schema_of([self._tensor])
        self._number = 0
        self._weight = torch.randn(128, 128)
        self._samples_us: dict[str, list[float]] = {}

    def measure(self) -> None:
        """One round of everything, on both workers at the same time."""
        count = 20 if self._num_bytes > 1 << 20 else 100
        self._keep("idle", median(self._ping_pong(count, _nothing)))
        self._keep("busy", median(self._ping_pong(count, self._work)))
        self._keep("overlapped", self._overlapped(count // 10))
        self._calls()

    def measure_crowded(self) -> None:
        """One round beside others that compute."""
        count = 20 if self._num_bytes > 1 << 20 else 100
        with restless_neighbour():
            self._keep("crowded", mean(self._ping_pong(count, _nothing)))

    def row(self) -> dict[str, Any]:
        """Medians over the rounds, in microseconds."""
        middles = {
            f"{name}_us": round(median(samples), 2)
            for name, samples in self._samples_us.items()
        }
        return {"transport": self._name, "num_bytes": self._num_bytes, **middles}

    def _keep(self, name: str, seconds: float) -> None:
        self._samples_us.setdefault(name, []).append(seconds * 1e6)

    def _work(self) -> None:
        """About a third of a millisecond of a stage's kind of work."""
        x = self._weight
        for _ in range(8):
            x = torch.tanh(x @ self._weight)

    def _tags(self, count: int) -> list[int]:
        first, self._number = self._number, self._number + count
        return [message_tag(self._schema, first + i, 0) for i in range(count)]

    def _ping_pong(self, count: int, work: Callable[[], None]) -> list[float]:
        """Each message's seconds from send to receive: both read one clock."""
        tags = self._tags(count)
        self._receiver.expect(tags, self._schema)
        sent_s, came_s = [], []
        dist.barrier()
        for tag in tags:
            if self._world.rank == 1:
                self._receive(tag)
                came_s.append(perf_counter())
            work()
            sent_s.append(perf_counter())
            self._send(tag)
            if self._world.rank == 0:
                self._receive(tag)
                came_s.append(perf_counter())
        self._sender.flush(TIMEOUT_S)
        both: list[Any] = self._world.gather_json({"sent": sent_s, "came": came_s})
        return [
            float(came - sent)
            for one, other in (both, both[::-1])
            for sent, came in zip(one["sent"], other["came"], strict=True)
        ]

    def _overlapped(self, num_blocks: int) -> float:
        """Seconds per iteration that messages add, in blocks with and without them."""
        with_s, without_s = [], []
        for _ in range(num_blocks):
            with_s.append(self._block(self._tags(BLOCK)))
            without_s.append(self._block([]))
        return (median(with_s) - median(without_s)) / BLOCK

    def _block(self, tags: list[int]) -> float:
        """Seconds of some iterations of work, with as many messages as there are tags.

        The first message leaves before the clock starts, and the last one is received
        after it has stopped.
        """
        self._receiver.expect(tags, self._schema)
        dist.barrier()
        for tag in tags[:1]:
            self._send(tag)
        begin = perf_counter()
        for i in range(BLOCK):
            self._work()
            if tags[i + 1 :]:
                self._send(tags[i + 1])
                self._receive(tags[i])
        seconds = perf_counter() - begin
        for tag in tags[-1:]:
            self._receive(tag)
        self._sender.flush(TIMEOUT_S)
        return seconds

    def _calls(self) -> None:
        """The calls of four messages, sent and received when the other is done."""
        tags = self._tags(4)
        self._receiver.expect(tags, self._schema)
        dist.barrier()
        for tag in tags:
            begin = perf_counter()
            self._send(tag)
            self._keep("send", perf_counter() - begin)
        dist.barrier()
        sleep(0.002)  # gloo's own threads are still at it
        for tag in tags:
            begin = perf_counter()
            self._receive(tag)
            self._keep("receive", perf_counter() - begin)
        self._sender.flush(TIMEOUT_S)

    def _send(self, tag: int) -> None:
        self._sender.send(tag, (self._tensor,), self._schema)

    def _receive(self, tag: int) -> tuple[Tensor, ...]:
        tensors = self._receiver.receive(tag)
        self._receiver.release(tag)
        return tensors


@contextlib.contextmanager
def restless_neighbour() -> Iterator[None]:
    """One more process that computes all the time; it ends by itself if we do not."""
    program = (
        "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _nothing() -> None:
    """The work of those who do none."""


if __name__ == "__main__":
    main()
