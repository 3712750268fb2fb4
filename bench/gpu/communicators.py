"""What NCCL's communicators cost with one rank; gloo's, where there is no GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.gpu.checked import NEEDS_A_GPU, Row, Setting, by_name, seconds_of

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


CHECKS: Final = by_name(lazy_start, eager_start, groups)


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
