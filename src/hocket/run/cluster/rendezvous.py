"""The workers of one attempt find each other under torchrun.

One store serves all attempts of a job, and no variable names the attempt: after a
failure on one host, torchrun counts a restart there, and none on a host that only
follows. So rank 0 gives each attempt a name, and accepts the workers that answer:

    rank 0                                    every other rank
    current = its own name              ──▶   reads current
    waits for all                       ◀──   <current>/here/<rank> = its own name
    <current>/go = everyone's names     ──▶   comes in, if its own is among them

A worker may read the name of an attempt that is over: its own name is not in that
attempt's `go`, and it waits until rank 0 names the next one.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

import torch.distributed as dist

from hocket.errors import WaitError
from hocket.run.cluster.store.poll import poll


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The name and number on which the workers of one attempt agree.

    Args:
        name: a name that no other attempt of the job has.
        attempt: how often the workers were started before, by the largest count of any
            launcher; larger than in any attempt before.
    """

    name: str
    attempt: int


def join_rendezvous(
    store: dist.Store, rank: int, world_size: int, restarts: int, timeout_s: float
) -> Rendezvous:
    """Wait until all workers of this attempt are there.

    Args:
        store: the job's store, the same for all attempts.
        rank: this worker's rank.
        world_size: number of workers.
        restarts: the restarts that the launcher of this host has counted.
        timeout_s: how long to wait.

    Raises:
        WaitError: ranks that the message names did not come.
    """
    if rank == 0:
        return _lead(store, world_size, restarts, timeout_s)
    return _follow(store, rank, restarts, timeout_s)


def _lead(
    store: dist.Store, world_size: int, restarts: int, timeout_s: float
) -> Rendezvous:
    """Name the attempt and wait for the others; rank 0 calls this."""
    name = uuid.uuid4().hex
    store.set("current", name)
    keys = {rank: _here(name, rank) for rank in range(1, world_size)}
    if not poll(lambda: all(store.check([key]) for key in keys.values()), timeout_s):
        late = [str(rank) for rank, key in keys.items() if not store.check([key])]
        raise WaitError(
            f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of {world_size} did "
            "not come: not started, still starting, or unable to reach the store"
        )
    others = [json.loads(store.get(key)) for key in keys.values()]
    before = int(_read(store, "attempt") or -1)
    attempt = max([before + 1, restarts, *(one["restarts"] for one in others)])
    store.set("attempt", str(attempt))
    go = {"attempt": attempt, "names": [one["name"] for one in others]}
    store.set(_go(name), json.dumps(go))
    return Rendezvous(name, attempt)


def _follow(
    store: dist.Store, rank: int, restarts: int, timeout_s: float
) -> Rendezvous:
    """Register with rank 0 and wait for its answer; every other rank calls this."""
    own = {"name": uuid.uuid4().hex, "restarts": restarts}
    current, go = "", {}

    def is_accepted() -> bool:
        nonlocal current, go
        newest = _read(store, "current")
        if newest and newest != current:
            current = newest
            store.set(_here(current, rank), json.dumps(own))
        go = json.loads(_read(store, _go(current)) or "{}")
        return own["name"] in go.get("names", ())

    if poll(is_accepted, timeout_s):
        return Rendezvous(current, go["attempt"])
    awaited = "all workers" if current else "rank 0"
    raise WaitError(
        f"rank {rank} reached the store, but {awaited} did not come to it in time: not "
        "started, still starting, or unable to reach it"
    )


def _here(name: str, rank: int) -> str:
    return f"{name}/here/{rank}"


def _go(name: str) -> str:
    return f"{name}/go"


def _read(store: dist.Store, key: str) -> str:
    """Return a key's present value; empty if it has none."""
    return store.get(key).decode() if store.check([key]) else ""
