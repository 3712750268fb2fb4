"""What one worker of a tiny model opens, asks the store and sends, of 4 to 32 workers.

    python -m bench.scale.workers

All workers are on this machine. Pipelines of four devices, and more and more replicas
of them: what a worker has to do with others grows with its own replicas alone.

    groups      process groups that it is a member of, and those that it helped to make
    requests    sets, gets and adds of the store until the first step; apart from those,
                polls, of which there are more where others are slow
    handles     open files at the end, sockets among them
    messages    that it sends in a step, and collectives that it joins
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from bench.measure import environment, write_result
from hocket.run.cluster import world as cluster
from hocket.run.cluster.group import GroupWork, WorkerGroup
from hocket.run.comm.shm.sender import SharedMemorySender

RESULTS: Final = Path(__file__).parent / "results"
DEPTH: Final = 4
NUM_MICROBATCHES: Final = 4
NUM_STEPS: Final = 4
OF_GLOO: Final = "//cpu//"  # in the keys by which the members of a group connect


_opened: Final[list[dist.Store]] = []  # torch's own stores on top hold no reference


class CountingStore(dist.Store):
    """Counts what is asked of another store, also by torch's own groups.

    Args:
        store: the other store.
        counts: where the requests are counted, by kind.
    """

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        super().__init__()
        self._store, self._counts = store, counts

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store.set`."""
        self._count("requests", key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`."""
        self._count("requests", key)
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """See `torch.distributed.Store.add`."""
        self._count("requests", key)
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `torch.distributed.Store.compare_set`."""
        self._count("requests", key)
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`."""
        self._count("polls", keys[0])
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """See `torch.distributed.Store.wait`."""
        self._count("polls", keys[0])
        self._store.wait(keys, *timeout)

    def _count(self, kind: str, key: str | bytes) -> None:
        text = key if isinstance(key, str) else key.decode()
        self._counts[f"gloo's {kind}" if OF_GLOO in text else kind] += 1


def count(counts: Counter[str]) -> None:
    """Count what this process does from now on."""
    shared_store, make = cluster.shared_store, dist.new_group
    send = SharedMemorySender.send
    reduce, gather = WorkerGroup.all_reduce, WorkerGroup.all_gather

    def opened(rank: int, world_size: int) -> dist.Store:
        _opened.append(CountingStore(shared_store(rank, world_size), counts))
        return _opened[-1]

    def made(*args: Any, **options: Any) -> Any:
        counts["groups made"] += 1
        return make(*args, **options)

    def sent(self: SharedMemorySender, *args: Any) -> None:
        counts["messages"] += 1
        send(self, *args)

    def reduced(self: WorkerGroup, tensor: Tensor, what: str) -> GroupWork:
        counts["collectives"] += 1
        return reduce(self, tensor, what)

    def gathered(
        self: WorkerGroup, into: list[Tensor], own: Tensor, what: str
    ) -> GroupWork:
        counts["collectives"] += 1
        return gather(self, into, own, what)

    replaced: list[tuple[Any, str, Any]] = [
        (cluster, "shared_store", opened),
        (dist, "new_group", made),
        (SharedMemorySender, "send", sent),
        (WorkerGroup, "all_reduce", reduced),
        (WorkerGroup, "all_gather", gathered),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def num_handles() -> tuple[int, int]:
    """Return the open files of this process, and the sockets among them."""
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(path))
        except FileNotFoundError:  # that of the listing itself
            continue
    return len(targets), sum(x.startswith("socket:") for x in targets)


def worker(num_replicas: int) -> dict[str, float]:
    """Start and train on this worker; return what it took."""
    counts: Counter[str] = Counter()
    count(counts)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin_s = perf_counter()
    layers = (x for _ in range(DEPTH) for x in (nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(NUM_MICROBATCHES * num_replicas, 8)
    with hocket.Pipeline(
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        example=(x, x),
        num_microbatches=NUM_MICROBATCHES,
        num_replicas=num_replicas,
        cut=[str(2 * stage) for stage in range(1, DEPTH)],
    ) as pipeline:
        pipeline.step((x, x))
        start_s, before = perf_counter() - begin_s, counts.copy()
        for _ in range(NUM_STEPS):
            pipeline.step((x, x))
        steps, (num_files, num_sockets) = counts - before, num_handles()
        groups = dist.distributed_c10d._world.pg_map
        return {
            "start_s": round(start_s, 2),
            "groups": len(groups),
            "groups_made": 1 + before["groups made"],
            "requests": before["requests"],
            "polls": before["polls"],
            "requests_of_gloo": before["gloo's requests"],
            "requests_of_a_step": steps["requests"] / NUM_STEPS,
            "handles": num_files,
            "sockets": num_sockets,
            "messages": steps["messages"] / NUM_STEPS,
            "collectives": steps["collectives"] / NUM_STEPS,
        }


def measured(num_workers: int) -> list[dict[str, Any]]:
    """Return a row for each worker of a job."""
    with tempfile.TemporaryDirectory() as folder:
        begin_s = perf_counter()
        found = hocket.launch(
            worker,
            [num_workers // DEPTH],
            num_workers=num_workers,
            run_dir=Path(folder),
            timeout_s=300.0,
        )
        seconds = round(perf_counter() - begin_s, 1)
    own = {"workers": num_workers, "job_s": seconds}
    return [own | {"rank": rank} | row for rank, row in enumerate(found)]


def main() -> None:
    """Count, print, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows = []
    for num_workers in arguments.workers:
        rows += measured(num_workers)
        print(rows[-num_workers], rows[-1], sep="\n", flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
