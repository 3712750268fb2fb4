"""A process group of torch.distributed, with timeouts and errors of our own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Final, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hocket import env
from hocket.errors import WaitError
from hocket.model.trace.local import local
from hocket.model.trace.state import overwrite
from hocket.run.cluster.device_waits import LONG_TIMEOUT, DeviceWaits, record_event
from hocket.run.diagnostics.flight_recorder import NO_RANK, OnWait

_IN_ORDER: Final = "gloo_in_order"


@dataclass(frozen=True, slots=True)
class GroupWork:
    """A collective operation that was started.

    Args:
        work: the operation.
        device_waits: watches the device's wait for it; None where the host waits.
    """

    work: dist.Work
    device_waits: DeviceWaits | None = None

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.work.is_completed()


@dataclass(slots=True)
class WorkerGroup:
    """Workers that run the same collective operations in the same order.

    Args:
        process_group: torch's process group; None once it is destroyed.
        ranks: the ranks of all members.
        rank: this worker's rank.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
        device_waits: watches the waits of this worker's GPU for NCCL; None for gloo.
    """

    process_group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    on_wait: OnWait
    device_waits: DeviceWaits | None = None

    def all_reduce(self, tensor: Tensor, what: str) -> GroupWork:
        """Start an all-reduce (sum) of a tensor, in place."""
        with self.peer_failure(what):
            work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        return self._started(work, tensor)

    def all_gather(self, into: list[Tensor], own: Tensor, what: str) -> GroupWork:
        """Start to gather every member's tensor into a list."""
        with self.peer_failure(what):
            work = dist.all_gather(into, own, group=self.process_group, async_op=True)
        return self._started(work, own)

    def broadcast(self, tensor: Tensor, from_rank: int, what: str) -> None:
        """Replace a tensor by one member's, of whatever type and strides."""
        tensor = local(tensor)
        group, data = self.process_group, as_bytes(tensor)
        with self.peer_failure(what):
            work = dist.broadcast(data, from_rank, group=group, async_op=True)
        self.wait(self._started(work, data), what)
        if data.data_ptr() != tensor.data_ptr():
            overwrite(tensor, data.view(tensor.dtype).view(tensor.shape))

    def wait(self, work: GroupWork, what: str) -> None:
        """Wait for an operation to end; with NCCL the device waits, not the host.

        Raises:
            WaitError: it did not end within the timeout, or a member is gone.
        """
        if not work.is_completed():
            others = [rank for rank in self.ranks if rank != self.rank]
            self.on_wait(what, others[0] if len(others) == 1 else NO_RANK)
        if work.device_waits is not None:
            ranks = ", ".join(map(str, self.ranks))
            work.device_waits.wait(work.work, f"the {what} over ranks {ranks}")
            return
        with self.peer_failure(what):
            work.work.wait(timedelta(seconds=self.timeout_s))

    def leave(self, *, failed: bool) -> None:
        """Destroy the group on this worker.

        Args:
            failed: whether an operation may be left unfinished.
        """
        group, self.process_group = self.process_group, None
        with suppress(ValueError):  # a process that left the job has left it, too
            leave_group(group, failed=failed)

    def _started(self, work: dist.Work | None, tensor: Tensor) -> GroupWork:
        assert work is not None, "this rank is a member of the group"
        is_on_host = tensor.device.type == "cpu"
        return GroupWork(work, None if is_on_host else self.device_waits)

    @contextmanager
    def peer_failure(self, what: str) -> Iterator[None]:
        """Return the error for an operation that the other members did not join."""
        try:
            yield
        except RuntimeError as error:
            raise WaitError(
                f"the {what} over ranks {', '.join(map(str, self.ranks))} did not come "
                f"together: another of them is gone, stuck, or slower than the timeout "
                f"of {self.timeout_s:g} s allows ({_gloo_error_text(error)})"
            ) from error


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, in a copy if it is not contiguous.

    gloo refuses some types, and its collectives ignore strides.
    """
    whole = tensor.detach().contiguous().resolve_conj()
    return whole.reshape(-1).view(torch.uint8)


def _gloo_error_text(error: RuntimeError) -> str:
    """Return the essence of gloo's message, without file names and advice."""
    first = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first).split(". This is typically")[0]


def uses_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group, or the job's, carries GPUs' tensors by NCCL."""
    return "nccl" in str(dist.get_backend_config(group))


def leave_group(group: dist.ProcessGroup | None, *, failed: bool) -> None:
    """Destroy a process group, or abort it after an error.

    NCCL finalises a communicator together with its peers, so destroying a group of a
    peer that is gone may hang. An abort is local.

    Args:
        group: the group; None for all of the job's.
        failed: whether an operation may be left unfinished.
    """
    if failed and uses_nccl(group):
        # torch has no public function that aborts a group and forgets it.
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def new_group(
    ranks: Sequence[int], timeout_s: float, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group. Every worker must call this.

    Args:
        ranks: the ranks of its members.
        timeout_s: the timeout of the members' waits for each other; torch's own is 30
            minutes.
        backend: the backend; the job's when not given.

    Raises:
        WaitError: a member did not come.
    """
    is_nccl = backend == "nccl" or (backend is None and uses_nccl())
    timeout = LONG_TIMEOUT if is_nccl else timedelta(seconds=timeout_s)
    try:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    except RuntimeError as error:
        raise WaitError(
            f"ranks {', '.join(map(str, ranks))} did not all come to make a group "
            f"within {timeout_s:g} s ({_gloo_error_text(error)})"
        ) from error
    return cast(dist.ProcessGroup, group)


@dataclass(eq=False)
class GroupMaker:
    """Makes a run's process groups, and destroys them at the end of a `with` block.

    Each gloo group has two threads, and those of a peer that has gone may spin. A run
    that changes its layout asks for its groups `again`, and makes only those that no
    earlier layout had.

    Args:
        rank: this worker's rank.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
        tp_size: the neighbours that each have groups of their own, in the same way.
    """

    rank: int
    timeout_s: float
    on_wait: OnWait
    tp_size: int = 1

    def __post_init__(self) -> None:
        # Those of equal members, in the order of making; None where it is no member.
        self._made: dict[tuple[int, ...], list[WorkerGroup | None]] = {}
        self._num_given: Counter[tuple[int, ...]] = Counter()

    def again(self) -> None:
        """From now on, hand out the groups that there are, before making others.

        Every worker must call this, when no operation is under way.
        """
        self._num_given.clear()

    def join(self, all_ranks: Sequence[tuple[int, ...]]) -> list[WorkerGroup]:
        """Make groups and return this worker's. Every worker must call this.

        Each collective of a group ends before the next one begins.

        Args:
            all_ranks: the ranks of each group's members, of this worker's tp rank or of
                all; the same on every worker.

        Raises:
            WaitError: a member did not come.
        """
        own = []
        backend = None if uses_nccl() else in_order_backend()
        for ranks in chain(*map(self._on_every_tp_rank, all_ranks)):
            made = self._made.setdefault(ranks, [])
            if self._num_given[ranks] == len(made):
                group = new_group(ranks, self.timeout_s, backend)
                is_member = self.rank in ranks
                made.append(self._member(group, ranks) if is_member else None)
            member = made[self._num_given[ranks]]
            self._num_given[ranks] += 1
            if member is not None:
                own.append(member)
        return own

    def _on_every_tp_rank(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the group of each tp rank; itself if it spans several."""
        size = self.tp_size
        (place, *others) = {rank % size for rank in ranks}
        return [
            tuple(rank - place + other for rank in ranks)
            for other in ([place] if others else range(size))
        ]

    def __enter__(self) -> Self:
        """Return the maker."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Destroy the groups; after an error, an operation may be unfinished."""
        while self._made:
            for member in reversed(self._made.popitem()[1]):
                if member is not None:
                    member.leave(failed=kind is not None)

    def _member(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> WorkerGroup:
        waits = None
        if uses_nccl(group):
            record = partial(record_event, torch.device("cuda"))
            waits = DeviceWaits(self.timeout_s, group.abort, record)
        return WorkerGroup(group, ranks, self.rank, self.timeout_s, self.on_wait, waits)


def in_order_backend() -> str:
    """Return the name of gloo's backend that runs collectives in the order of posts.

    torch's own gives two threads to each group, so that two reductions share the
    network and the first to begin ends late. Where a forward waits for it, that time
    is lost. torch knows this one from the first call on.
    """
    if _IN_ORDER not in dist.Backend.backend_list:
        dist.Backend.register_backend(_IN_ORDER, _one_thread, devices=["cpu", "cuda"])
    return _IN_ORDER


def _one_thread(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stub
    options._threads = 1
    options._timeout = timeout
    interface = env.GLOO_INTERFACE.text()
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=interface)
        if interface
        else dist.ProcessGroupGloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, rank, size, options)
