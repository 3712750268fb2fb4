"""NCCL with one rank: what communicators cost, and messages to itself.

Where there is no GPU, the communicators are gloo's, and messages are copies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.gpu.checked import NEEDS_A_GPU, Row, Setting, by_name, seconds_of
from hocket.run.comm.dist.ordered import OrderedTransport
from hocket.run.comm.dist.pair_wires import NcclWires, PairWires, WireMessage
from hocket.run.comm.dist.transport import TorchTransport
from hocket.run.comm.schema import message_tag, schema_of
from hocket.run.comm.transport import Carries, Channel, Post

NUM_MESSAGES: Final = 20
NUM_GROUPS: Final = 10
TIMEOUT: Final = timedelta(seconds=20)
MIB: Final = 2**20


def lazy_start(setting: Setting) -> Row:
    """Without a device, the first collective makes the communicator."""
    with _job(setting) as row:
        row.update(_all_reduces(setting))
    return row


def eager_start(setting: Setting) -> Row:
    """With `device_id`, the start makes the communicator."""
    if not setting.on_gpu:
        return NEEDS_A_GPU
    with _job(setting, device_id=setting.device) as row:
        row.update(_all_reduces(setting))
    return row


def groups(setting: Setting) -> Row:
    """Seconds and memory of ten groups with a communicator each."""
    with _job(setting) as row:
        x = torch.ones(16, device=setting.device)
        dist.all_reduce(x)
        before = _used_bytes(setting)
        made = []

        def make() -> None:
            made.append(dist.new_group([0], timeout=TIMEOUT))
            dist.all_reduce(x, group=made[-1])

        seconds = [seconds_of(setting.device, make) for _ in range(NUM_GROUPS)]
        row["group_s"] = [round(one, 4) for one in seconds]
        if before is not None:
            used = (_used_bytes(setting) or 0) - before
            row["mib_per_group"] = round(used / NUM_GROUPS / MIB, 2)
    return row


def own_messages(setting: Setting) -> Row:
    """Messages of hocket's own transport, which this rank sends to itself."""
    with _job(setting) as row:
        wires = _wires(setting)
        transport = OrderedTransport(
            TorchTransport(dist.HashStore(), timeout_s=TIMEOUT.total_seconds()),
            wires,
            device=setting.device,
            timeout_s=TIMEOUT.total_seconds(),
        )
        channel = Channel("F0>0", 0, 0, Carries.PLANNED)
        sender, receiver = transport.sender(channel), transport.receiver(channel)
        content = torch.arange(setting.size(MIB, 64), device=setting.device)
        schema = schema_of((content,))
        wrong = torch.zeros((), dtype=torch.int64, device=setting.device)

        def exchange(number: int) -> None:
            tag = message_tag(schema, number, 0)
            receiver.expect([tag], schema)
            transport.plan([[Post(end, lambda: None) for end in (sender, receiver)]])
            sender.send(tag, (content + number,), schema)
            (came,) = receiver.receive(tag)
            wrong.add_((came != content + number).sum())
            receiver.release(tag)

        seconds = [
            seconds_of(setting.device, partial(exchange, number))
            for number in range(NUM_MESSAGES)
        ]
        row["message_s"] = [round(one, 6) for one in seconds]
        row["holds"] = wrong.item() == 0
        row["close_s"] = seconds_of(setting.device, transport.close)
    return row


def abort(setting: Setting) -> Row:
    """Abort a communicator, and leave its group."""
    with _job(setting) as row:
        wires = _wires(setting)
        flat = torch.ones(2, 16, device=setting.device)
        wires.post(
            0, [WireMessage(flat[0], sends=True), WireMessage(flat[1], sends=False)]
        )
        row["abort_s"] = seconds_of(setting.device, wires.abort)
        row["leave_s"] = seconds_of(setting.device, lambda: wires.close(failed=True))
    return row


CHECKS: Final = by_name(lazy_start, eager_start, groups, own_messages, abort)


class _Copies(PairWires):
    """Copies what this rank sends to itself."""

    def post(self, peer: int, transfers: Sequence[WireMessage]) -> _Copied:
        """See `PairWires.post`."""
        assert peer == 0
        sent = [x.flat for x in transfers if x.sends]
        received = [x.flat for x in transfers if not x.sends]
        for into, flat in zip(received, sent, strict=True):
            into.copy_(flat)
        return _Copied()

    def record_event(self) -> _Copied:
        """See `PairWires.record_event`."""
        return _Copied()

    def abort(self) -> None:
        """See `PairWires.abort`."""

    def close(self, *, failed: bool) -> None:
        """See `PairWires.close`."""


class _Copied:
    """A copy that has ended."""

    def is_completed(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    query = is_completed


def _wires(setting: Setting) -> PairWires:
    if not setting.on_gpu:
        return _Copies()
    return NcclWires([(0, 0)], 0, setting.device, TIMEOUT.total_seconds())


@contextmanager
def _job(setting: Setting, **options: Any) -> Iterator[Row]:
    """A process group of this process alone; yields what its start cost."""
    backend = "nccl" if setting.on_gpu else "gloo"
    torch.ones(1, device=setting.device)
    before = _used_bytes(setting)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)

        def start() -> None:
            dist.init_process_group(
                backend, store=store, rank=0, world_size=1, timeout=TIMEOUT, **options
            )

        row: Row = {"backend": backend, "start_s": seconds_of(setting.device, start)}
        if before is not None:
            row["start_mib"] = ((_used_bytes(setting) or 0) - before) / MIB
        try:
            yield row
        finally:
            stop = dist.destroy_process_group
            row["stop_s"] = seconds_of(setting.device, stop)


def _all_reduces(setting: Setting) -> Row:
    """Seconds of the first all-reduce, and of another."""
    x = torch.ones(MIB, device=setting.device)
    before = _used_bytes(setting)
    first_s, next_s = (
        seconds_of(setting.device, lambda: dist.all_reduce(x)) for _ in range(2)
    )
    row: Row = {"first_s": first_s, "next_s": next_s, "holds": float(x[0]) == 1.0}
    if before is not None:
        row["first_mib"] = ((_used_bytes(setting) or 0) - before) / MIB
    return row


def _used_bytes(setting: Setting) -> int | None:
    """All processes' memory on the GPU; None on a CPU."""
    if not setting.on_gpu:
        return None
    free, total = torch.cuda.mem_get_info(setting.device)
    return total - free
