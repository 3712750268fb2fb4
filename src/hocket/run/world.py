"""A worker's place in its job: who else is there, where, and how to reach them.

    started by      finds the others in                        listens on
    hocket.launch   a FileStore in a private folder            loopback only
    torchrun        torchrun's store (MASTER_ADDR)             where torchrun says
    nobody          nobody else is there                       nothing

Each attempt of a job has its own prefix in the store: a restarted worker that met the
keys of those before it would wait for processes that are gone.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from hocket import env
from hocket.errors import RunError, WaitError
from hocket.run.exchange import Exchange
from hocket.run.job import Json, attempt_dir, store_path

JOIN_TIMEOUT_S: Final = 180.0  # starting takes longer than any op: imports, slow disks
NUM_PINGS: Final = 8


@dataclass(frozen=True, slots=True)
class World:
    """All workers of a job, as one of them sees it.

    Args:
        rank: this worker's, 0 to `world_size - 1`.
        world_size: number of workers.
        local_rank: this worker's number on its host.
        device: what it computes on.
        hosts: the host of each rank, by an identity that differs between machines.
        clock_offset_s: added to this host's `time.perf_counter()`, it gives rank 0's.
        timeout_s: after which a wait for another worker ends.
        attempt: how often the job was started again.
        store: shared by all workers, under this attempt's prefix.
        exchange: what small facts go through.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    hosts: tuple[str, ...]
    clock_offset_s: float
    timeout_s: float
    attempt: int
    store: dist.Store
    exchange: Exchange

    @property
    def same_host(self) -> tuple[int, ...]:
        """The ranks on this worker's host, itself among them."""
        own = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == own)

    def gather_json(self, value: Json, name: str = "gather") -> list[Any]:
        """What every worker says, by rank (`Exchange.gather`)."""
        return self.exchange.gather(name, value)

    def broadcast_json(
        self, value: Json, from_rank: int = 0, name: str = "broadcast"
    ) -> Any:
        """What one worker says (`Exchange.broadcast`)."""
        return self.exchange.broadcast(name, value, from_rank)

    def barrier(self, name: str = "barrier", timeout_s: float | None = None) -> None:
        """Go on when every worker has come here (`Exchange.barrier`)."""
        self.exchange.barrier(name, timeout_s)

    def close(self) -> None:
        """Leave the process group; nothing can be sent afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join_world(timeout_s: float | None = None, backend: str | None = None) -> World:
    """Join the job that this process is a worker of.

    Args:
        timeout_s: after which a wait for another worker ends; by default what
            `hocket.launch` was given, or HOCKET_TIMEOUT_S, or 60.
        backend: "gloo" (CPU) or "nccl" (one CUDA device per worker); by default nccl
            where there are CUDA devices.

    Raises:
        RunError: the environment names half a job, or there are too few devices.
        WaitError: somebody did not come.
    """
    timeout_s = env.TIMEOUT_S.seconds() if timeout_s is None else timeout_s
    rank, world_size = _place()
    local_rank = env.LOCAL_RANK.integer()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(backend, local_rank)
    attempt = env.ATTEMPT.integer()
    prefix = f"hocket/{env.RUN_ID.text()}/{attempt}"
    store = dist.PrefixStore(prefix, _store(rank, world_size, attempt))
    exchange = Exchange(store, rank, world_size, timeout_s)
    hosts = _hosts(exchange)
    if world_size > 1:
        _init_group(backend, store, rank, world_size, timeout_s, hosts)
        # Whoever ends at once would break off what another still connects.
        exchange.barrier("joined", JOIN_TIMEOUT_S)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        hosts=hosts,
        clock_offset_s=_clock_offset_s(rank, hosts),
        timeout_s=timeout_s,
        attempt=attempt,
        store=store,
        exchange=exchange,
    )


def _place() -> tuple[int, int]:
    """This worker's rank, and the number of workers."""
    needed = [env.RANK, env.WORLD_SIZE]
    if not env.JOB_DIR.is_set:
        needed += [env.MASTER_ADDR, env.MASTER_PORT]
    missing = [variable.name for variable in needed if not variable.is_set]
    if len(missing) == len(needed):
        return 0, 1
    if missing:
        raise RunError(
            f"the environment names a job, but not {' and '.join(missing)}; start the "
            "workers with torchrun or hocket.launch, or unset RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT to run alone"
        )
    rank, world_size = env.RANK.integer(), env.WORLD_SIZE.integer()
    if not 0 <= rank < world_size:
        raise RunError(f"RANK={rank} must be 0 to WORLD_SIZE - 1 = {world_size - 1}")
    return rank, world_size


def _device(backend: str, local_rank: int) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if backend != "nccl":
        raise RunError(f"backend {backend!r}: hocket knows 'gloo' and 'nccl'")
    num_devices = torch.cuda.device_count()
    num_workers = env.LOCAL_WORLD_SIZE.integer()
    if max(num_workers, local_rank + 1) > num_devices:
        raise RunError(
            f"{num_workers} workers on this host, but {num_devices} CUDA devices; nccl "
            "needs one per worker: start fewer, or use the CPU with backend='gloo'"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _store(rank: int, world_size: int, attempt: int) -> dist.Store:
    """Where the workers of this attempt meet."""
    if env.JOB_DIR.is_set:
        path = store_path(attempt_dir(Path(env.JOB_DIR.text()), attempt))
        return dist.FileStore(str(path), -1)
    if world_size == 1 and not env.MASTER_ADDR.is_set:
        return dist.HashStore()
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    except dist.DistError as error:
        address = f"{env.MASTER_ADDR.text()}:{env.MASTER_PORT.text()}"
        raise WaitError(
            f"rank {rank} cannot reach the store at {address} (MASTER_ADDR, "
            f"MASTER_PORT): {error}"
        ) from error
    return store


def _hosts(exchange: Exchange) -> tuple[str, ...]:
    """Wait until every worker has started, and learn where it is."""
    patient = dataclasses.replace(
        exchange,
        store=dist.PrefixStore("join", exchange.store),
        timeout_s=max(JOIN_TIMEOUT_S, exchange.timeout_s),
    )
    return tuple(str(host) for host in patient.gather("hosts", _host()))


def _host() -> str:
    """This machine's identity: equal for workers that share its clock and its name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _init_group(
    backend: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    hosts: tuple[str, ...],
) -> None:
    if len(set(hosts)) == 1:
        # Without this, both may listen where the network can reach them.
        for variable in (env.GLOO_INTERFACE, env.NCCL_INTERFACE):
            variable.set_default(_loopback())
    dist.init_process_group(
        "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _loopback() -> str:
    """The loopback interface: `lo` on Linux, `lo0` elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


def _clock_offset_s(rank: int, hosts: tuple[str, ...]) -> float:
    """How far rank 0's clock is ahead of this host's; one remote rank after another."""
    offset_s = 0.0
    for other, host in enumerate(hosts):
        if host != hosts[0] and rank in {0, other}:
            offset_s = ping(rank, 0 if rank else other)
    return offset_s if rank else 0.0


def ping(rank: int, peer: int) -> float:
    """How far rank 0's clock is ahead, by messages there and back.

    The fastest of eight rounds is the one that waited least; the error is at most half
    of its time. Rank 0 calls it at the same time as the other.

        other   sent_s ──▶                ──▶ back_s
        rank 0             its clock_s

    Args:
        rank: of this worker.
        peer: 0, or on rank 0 the other worker.
    """
    best_s = float("inf")
    offset_s = 0.0
    for clock_s, sent_s, back_s in _rounds(rank, peer):
        if back_s - sent_s < best_s:
            best_s = back_s - sent_s
            offset_s = clock_s - (sent_s + back_s) / 2
    return offset_s


def _rounds(rank: int, peer: int) -> Iterator[tuple[float, float, float]]:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_PINGS):
        sent_s = time.perf_counter()
        if rank == 0:
            dist.recv(message, peer)
            message[0] = time.perf_counter()
            dist.send(message, peer)
        else:
            dist.send(message, peer)
            dist.recv(message, peer)
            yield message.item(), sent_s, time.perf_counter()
