"""All workers of a job as one of them sees it, and how it joins them.

    started by      finds the others in                 gloo and NCCL listen on
    hocket.launch   a FileStore in a private folder     the loopback
    torchrun        torchrun's store (MASTER_ADDR)      the loopback on one host; else
                                                        the interface towards the others
    no launcher     no other worker                     nothing

Each attempt of a job has its own prefix in the store: a restarted worker that met the
keys of those before it would wait for processes that are gone (rendezvous.py). So has
each time that a process joins: a second pipeline must not read the keys of the first.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hocket import cuda, env
from hocket.errors import RunError, WaitError
from hocket.run.cluster.device_waits import LONG_TIMEOUT
from hocket.run.cluster.freed_memory import keep_freed_memory
from hocket.run.cluster.group import WorkerGroup, leave_group
from hocket.run.cluster.host import (
    address_towards,
    identity,
    interface_with,
    loopback_interface,
    reachable_address,
)
from hocket.run.cluster.rendezvous import Rendezvous, join_rendezvous
from hocket.run.cluster.stop import StopRequest
from hocket.run.cluster.store.deadline_store import DeadlineStore
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.diagnostics.job_folder import Json, attempt_dir, store_path

NUM_PINGS: Final = 8
JOIN_TIMEOUT_S: Final = 180.0  # starting takes longer than any op: imports, slow disks


class Backend(Enum):
    """What carries messages and collective operations between workers."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class World:
    """All workers of a job, as one of them sees it.

    Args:
        rank: this worker's rank, 0 to `world_size - 1`.
        world_size: number of workers.
        local_rank: this worker's number on its host.
        device: the device that this worker computes on.
        backend: carries messages; with gloo, those of GPUs go by way of the host.
        hosts: the host of each rank, by an identity that differs between hosts
            (run/cluster/host.py).
        address: the address at which other hosts reach this one; empty if all are on
            one host.
        clock_offset_s: the seconds to add to this host's `time.perf_counter()` to get
            rank 0's.
        timeout_s: how long to wait for another worker.
        attempt: how many times the job was restarted; equal on all workers.
        token: distinguishes this job from others of its name; equal on all workers.
        store: the store that all workers share, under this attempt's prefix.
        exchange: exchanges small values through the store.
        stop: what this worker knows of a SIGTERM to the job.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: Backend
    hosts: tuple[str, ...]
    address: str
    clock_offset_s: float
    timeout_s: float
    attempt: int
    token: str
    store: dist.Store
    exchange: StoreExchange
    stop: StopRequest

    @property
    def same_host(self) -> tuple[int, ...]:
        """The ranks on this worker's host, itself among them."""
        own = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == own)

    @property
    def carrier(self) -> torch.device:
        """Where tensors are that go between workers: gloo sends none of a GPU's."""
        return self.device if self.backend is Backend.NCCL else torch.device("cpu")

    @property
    def everyone(self) -> WorkerGroup:
        """All workers; there are several."""
        ranks = tuple(range(self.world_size))
        return WorkerGroup(None, ranks, self.rank, self.timeout_s, lambda *_: None)

    def broadcast(self, tensor: Tensor, from_rank: int, what: str) -> None:
        """Replace a tensor on the carrier by one worker's; every worker calls this."""
        if self.world_size > 1:
            self.everyone.broadcast(tensor, from_rank, what)

    def gather_json(self, value: Json, name: str = "gather") -> list[Any]:
        """Return every worker's value, by rank (`StoreExchange.gather`)."""
        return self.exchange.gather(name, value)

    def broadcast_json(
        self,
        value: Json,
        from_rank: int = 0,
        name: str = "broadcast",
        timeout_s: float | None = None,
    ) -> Any:
        """Return one worker's value (`StoreExchange.broadcast`)."""
        return self.exchange.broadcast(name, value, from_rank, timeout_s)

    def barrier(self, name: str = "barrier", timeout_s: float | None = None) -> None:
        """Return when every worker has called this (`StoreExchange.barrier`)."""
        self.exchange.barrier(name, timeout_s)

    def leave(self, why: str) -> None:
        """End the other workers' waits for this one in a store between hosts.

        Args:
            why: a sentence that names this worker's rank.
        """
        if isinstance(self.store, DeadlineStore):
            self.store.leave(why)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group; nothing can be sent afterwards.

        Args:
            failed: whether this worker leaves because of an error; another worker may
                be gone, too.
        """
        if dist.is_initialized():
            leave_group(None, failed=failed)


def join_world(
    timeout_s: float | None = None,
    backend: str | None = None,
    device: str | None = None,
) -> World:
    """Join the job that this process is a worker of.

    From now on a process that computes on a CPU keeps the memory that it frees
    (run/cluster/freed_memory.py).

    Args:
        timeout_s: how long to wait for another worker; by default what `hocket.launch`
            was given, or HOCKET_TIMEOUT_S, or 60.
        backend: "nccl" (one GPU for each worker) or "gloo" (CPUs; or GPUs, which
            several workers may share); by default what HOCKET_BACKEND says, else nccl
            for GPUs.
        device: "cuda" or "cpu"; by default what HOCKET_DEVICE says, else cuda where
            there are such devices.

    Raises:
        RunError: some of the job's variables are not set, there are too few devices,
            backend and device do not fit, or the process is in a process group already.
        WaitError: another worker did not come.
    """
    timeout_s = env.TIMEOUT_S.seconds() if timeout_s is None else timeout_s
    rank, world_size = _place()
    _refuse_a_second_group(world_size)
    local_rank = env.LOCAL_RANK.integer()
    own_device, carrier = _device_and_backend(device, backend, local_rank)
    _set_up_memory(own_device)
    shared = shared_store(rank, world_size)
    token = shared.compare_set(f"{job_prefix()}/token", "", secrets.token_hex(4))
    rendezvous = _rendezvous(shared, rank, world_size)
    own = dist.PrefixStore(f"{job_prefix()}/{rendezvous.name}", shared)
    store = with_deadline(own)
    # With torchrun's launchers, the first of them may host the store.
    holds_store = bool(store_address()) and env.AGENT_STORE.text() != "True"
    exchange = StoreExchange(store, rank, world_size, timeout_s, holds_store)
    hosts, address = _hosts_and_address(exchange)
    if world_size > 1:
        _choose_interface(hosts, address)
        _init_group(carrier, own, rank, world_size, timeout_s)
        # A worker that ends at once would break connections that others still open.
        exchange.barrier("joined", JOIN_TIMEOUT_S)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=own_device,
        backend=carrier,
        hosts=hosts,
        address=address,
        clock_offset_s=clock_offset_s(rank, hosts),
        timeout_s=timeout_s,
        attempt=rendezvous.attempt,
        token=token.decode(),
        store=store,
        exchange=exchange,
        stop=StopRequest(store, world_size),
    )


def single_process_world(device: torch.device, timeout_s: float | None = None) -> World:
    """Return a world of this process alone, even if it is a worker of a job.

    Args:
        device: the device that it computes on.
        timeout_s: see `join_world`.
    """
    timeout_s = env.TIMEOUT_S.seconds() if timeout_s is None else timeout_s
    _set_up_memory(device)
    store = dist.HashStore()
    return World(
        rank=0,
        world_size=1,
        local_rank=0,
        device=device,
        backend=Backend.GLOO,
        hosts=(identity(),),
        address="",
        clock_offset_s=0.0,
        timeout_s=timeout_s,
        attempt=0,
        token=secrets.token_hex(4),
        store=store,
        exchange=StoreExchange(store, 0, 1, timeout_s),
        stop=StopRequest(store, 1),
    )


def _set_up_memory(device: torch.device) -> None:
    if device.type == "cpu":
        keep_freed_memory()


def _place() -> tuple[int, int]:
    """Return this worker's rank, and the number of workers."""
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


def _refuse_a_second_group(world_size: int) -> None:
    if world_size > 1 and dist.is_initialized():
        raise RunError(
            "this process is in a process group already: of a pipeline that is still "
            "open, or the script's own. Close the pipeline (or call `torch.distributed."
            "destroy_process_group()`) first. Or, for several pipelines at a time or "
            "a device mesh of your own, join once with `world = hocket.join_world()`, "
            "before you make them, and give each pipeline `world=world`"
        )


def _device_and_backend(
    device: str | None, backend: str | None, local_rank: int
) -> tuple[torch.device, Backend]:
    """Choose what was not given, and this worker's GPU."""
    num_devices = cuda.num_devices()
    num_workers = max(env.LOCAL_WORLD_SIZE.integer(), local_rank + 1)
    kind = device or env.DEVICE.text() or ("cuda" if num_devices else "cpu")
    asked = backend or env.BACKEND.text() or ("nccl" if kind == "cuda" else "gloo")
    carrier = choose_backend(kind, asked, num_workers, num_devices)
    if kind == "cpu":
        return torch.device("cpu"), carrier
    own = torch.device("cuda", local_rank % num_devices)
    if carrier is Backend.NCCL:
        # Loaded at its first use, a kernel waits for the device, so for a receive.
        env.CUDA_MODULE_LOADING.set_default("EAGER")
    cuda.use(own)
    return own, carrier


def choose_backend(
    device: str, backend: str, num_workers: int, num_devices: int
) -> Backend:
    """Return a backend that was asked for, if it fits.

    Args:
        device: "cuda" or "cpu".
        backend: "nccl" or "gloo".
        num_workers: the workers on this host.
        num_devices: the CUDA devices on this host.

    Raises:
        RunError: it does not; says what would.
    """
    if device not in ("cuda", "cpu"):
        raise RunError(f"device {device!r}: hocket computes on 'cuda' and 'cpu'")
    if backend not in [known.value for known in Backend]:
        raise RunError(f"backend {backend!r}: hocket knows 'gloo' and 'nccl'")
    if device == "cuda" and not num_devices:
        raise RunError(
            "device 'cuda', but torch finds no CUDA device here: `hocket doctor` says "
            "why; or compute on the CPU (HOCKET_DEVICE=cpu)"
        )
    if backend == "nccl" and device == "cpu":
        raise RunError(
            "backend 'nccl' carries nothing between CPUs: take 'gloo', or GPUs"
        )
    if backend == "nccl" and num_workers > num_devices:
        raise RunError(
            f"{num_workers} workers on this host, but {num_devices} CUDA devices; nccl "
            "needs one for each worker: start fewer, let workers share GPUs by way of "
            "the host (HOCKET_BACKEND=gloo), or use the CPU (HOCKET_DEVICE=cpu)"
        )
    return Backend(backend)


def _rendezvous(shared: dist.Store, rank: int, world_size: int) -> Rendezvous:
    """Find the workers of this attempt, and return its store and number."""
    restarts = env.ATTEMPT.integer()
    if not store_address():  # the store is new for each attempt, not for each pipeline
        times = shared.add(f"{job_prefix()}/{restarts}/joined/{rank}", 1)
        return Rendezvous(f"{restarts}/{times}", restarts)
    store = with_deadline(dist.PrefixStore(f"{job_prefix()}/rendezvous", shared))
    return join_rendezvous(store, rank, world_size, restarts, JOIN_TIMEOUT_S)


def _hosts_and_address(exchange: StoreExchange) -> tuple[tuple[str, ...], str]:
    """Return the host of each rank, and this host's reachable address."""
    joining = dataclasses.replace(
        exchange,
        store=dist.PrefixStore("join", exchange.store),
        timeout_s=max(JOIN_TIMEOUT_S, exchange.timeout_s),
    )
    master = env.MASTER_ADDR.text()
    towards_store = address_towards(master) if store_address() else ""
    gathered = joining.gather("hosts", [identity(), towards_store])
    hosts = tuple(str(host) for host, _ in gathered)
    others = [str(at) for host, at in gathered if host != hosts[exchange.rank]]
    return hosts, reachable_address(towards_store, others) if others else ""


def _choose_interface(hosts: Sequence[str], address: str) -> None:
    """Choose the interface of gloo and NCCL, unless the user has.

    Left alone, gloo takes the address that this host's name leads to. That may be
    one that the whole network can reach, where one host is all; and among several it
    may be the loopback, which leads other hosts to themselves.
    """
    alone = len(set(hosts)) == 1
    name = loopback_interface() if alone else interface_with(address)
    if name:
        env.GLOO_INTERFACE.set_default(name)
        env.NCCL_INTERFACE.set_default(name)


def _init_group(
    backend: Backend, store: dist.Store, rank: int, world_size: int, timeout_s: float
) -> None:
    is_gloo = backend is Backend.GLOO
    if not is_gloo:
        env.NCCL_ERROR_HANDLING.set_default("0")
    try:
        dist.init_process_group(
            "gloo" if is_gloo else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s) if is_gloo else LONG_TIMEOUT,
        )
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise WaitError(
            f"rank {rank} met the others in the store, but could not connect to all of "
            f"them over the interface {env.GLOO_INTERFACE.text() or 'of its name'}: a "
            "firewall between the hosts, or the wrong interface (GLOO_SOCKET_IFNAME, "
            f"NCCL_SOCKET_IFNAME); `hocket doctor` says more ({reason})"
        ) from error


def shared_store(rank: int, world_size: int) -> dist.Store:
    """Return the store in which the workers rendezvous, over all attempts.

    Raises:
        WaitError: the store cannot be reached.
    """
    if env.JOB_DIR.is_set:
        job = Path(env.JOB_DIR.text())
        path = store_path(attempt_dir(job, env.ATTEMPT.integer()))
        return dist.FileStore(str(path), -1)
    if world_size == 1 and not env.MASTER_ADDR.is_set:
        return dist.HashStore()
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    except dist.DistError as error:
        raise WaitError(
            f"rank {rank} cannot reach the store at {store_address()} (MASTER_ADDR, "
            f"MASTER_PORT): {error}. Run `hocket doctor` on this host and on "
            "MASTER_ADDR: it checks names, ports and the network"
        ) from error
    return store


def store_address() -> str:
    """Return the store's address; empty if it is on no network."""
    if env.JOB_DIR.is_set or not env.MASTER_ADDR.is_set:
        return ""
    return f"{env.MASTER_ADDR.text()}:{env.MASTER_PORT.text()}"


def job_prefix() -> str:
    """Return what this job's keys begin with, in a store that others may use."""
    return f"hocket/{env.RUN_ID.text()}"


def with_deadline(store: dist.Store) -> dist.Store:
    """Add a deadline for answers to a store that is reached over a network."""
    address = store_address()
    return DeadlineStore(store, address) if address else store


def clock_offset_s(rank: int, hosts: Sequence[str]) -> float:
    """Return how far rank 0's clock is ahead of this host's; 0 on its own host.

    Every worker must call this; one remote rank after another has its turn.

    Args:
        rank: this worker's rank.
        hosts: the host of each rank.
    """
    offset_s = 0.0
    for other, host in enumerate(hosts):
        if host != hosts[0] and rank in {0, other}:
            offset_s = ping(rank, 0 if rank else other)
    return offset_s if rank else 0.0


def ping(rank: int, peer: int) -> float:
    """Return how far rank 0's clock is ahead; both ranks call this at the same time.

    The fastest of eight rounds is the one that waited least; the error is at most half
    of its time:

        other   sent_s ──▶                ──▶ back_s
        rank 0             its clock_s

    Args:
        rank: this worker's rank.
        peer: the other rank: 0, or on rank 0 the worker that measures.
    """
    message = torch.zeros(1, dtype=torch.float64)
    rounds = [(math.inf, 0.0)]  # how long each took, and the offset that it found
    for _ in range(NUM_PINGS):
        if rank == 0:
            dist.recv(message, peer)
            message[0] = time.perf_counter()
            dist.send(message, peer)
            continue
        sent_s = time.perf_counter()
        dist.send(message, peer)
        dist.recv(message, peer)
        back_s = time.perf_counter()
        rounds.append((back_s - sent_s, message.item() - (sent_s + back_s) / 2))
    return min(rounds)[1]
