"""Two processes on one GPU: what gloo can send, and copies through shared memory.

rank 0   GPU ──▶ pinned shared memory ──▶ flag = n
rank 1                flag = n ──▶ pinned shared memory ──▶ GPU ──▶ flag = -n
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.gpu.checked import Row, Setting, by_name, run_check, synchronize
from bench.gpu.part_process import end, start_python

TIMEOUT: Final = timedelta(seconds=10)
JOB_TIMEOUT_S: Final = 45.0
NUM_COPIES: Final = 8
GIGA: Final = 1e9
SHARED: Final = Path("/dev/shm")
RANKS: Final = range(2)


def exchange(setting: Setting) -> Row:
    """Start two processes; each one's rows, by rank."""
    # CUDA pins no pages of a file on a disk.
    with TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as name:
        folder = Path(name)
        options = json.dumps([str(setting.device), setting.quick, name])
        arguments = ["-m", "bench.gpu.two_processes", options]
        workers = [
            start_python([*arguments, str(rank)], folder / f"{rank}.txt")
            for rank in RANKS
        ]
        deadline_s = time.monotonic() + JOB_TIMEOUT_S
        exit_codes = [end(worker, deadline_s) for worker in workers]
        files = [folder / f"{rank}.json" for rank in RANKS]
        rows = [json.loads(x.read_text()) if x.exists() else [] for x in files]
        outputs = [folder / f"{rank}.txt" for rank in RANKS]
        printed = [x.read_text()[-2000:] if x.exists() else "" for x in outputs]
    every = [row for of_rank in rows for row in of_rank]
    holds = exit_codes == [0, 0] and all(row["holds"] for row in every)
    return {"exit_codes": exit_codes, "ranks": rows, "printed": printed, "holds": holds}


CHECKS: Final = by_name(exchange)


def main() -> None:
    """What each of the two processes does; rows are kept after each check."""
    options, rank_text = sys.argv[1:]
    device, quick, name = json.loads(options)
    rank, folder = int(rank_text), Path(name)
    setting = Setting(torch.device(device), quick, folder)
    store = dist.FileStore(str(folder / "store"), len(RANKS))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=len(RANKS), timeout=TIMEOUT
    )
    rows: list[Row] = []
    for check in (all_reduce, staged_copies, send):  # what may crash comes last
        rows.append(run_check(check.__name__, partial(check, setting, rank)))
        (folder / f"{rank}.json").write_text(json.dumps(rows))
        store.wait([_arrived(store, check, rank)], 2 * TIMEOUT)
    dist.destroy_process_group()


def all_reduce(setting: Setting, rank: int) -> Row:
    """gloo adds tensors of the device."""
    x = torch.full((4,), float(rank + 1), device=setting.device)
    dist.all_reduce(x)
    return {"found": x.tolist(), "holds": x.tolist() == [3.0] * 4}


def send(setting: Setting, rank: int) -> Row:
    """gloo sends tensors of the device; its documentation says that it does not."""
    x = torch.full((4,), float(rank), device=setting.device)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    if work is not None:
        work.wait(TIMEOUT)
    return {"found": x.tolist(), "holds": x.tolist() == [0.0] * 4}


def staged_copies(setting: Setting, rank: int) -> Row:
    """From one process's device to the other's, through pinned shared memory."""
    num_bytes = setting.size(64, 1) << 20
    shared = _shared(setting.folder / "shared", num_bytes)
    flag = _shared(setting.folder / "flag", 8).view(torch.int64)
    pinned = _pin(shared, setting)
    own = torch.full((num_bytes,), rank, dtype=torch.uint8, device=setting.device)
    seconds = []
    for i in range(1, NUM_COPIES + 1):
        begin_s = time.perf_counter()
        if rank == 0:
            own.fill_(i)
            shared.copy_(own, non_blocking=True)
            synchronize(setting.device)
            flag.fill_(i)
            _wait_for(flag, -i)
        else:
            _wait_for(flag, i)
            own.copy_(shared, non_blocking=True)
            synchronize(setting.device)
            flag.fill_(-i)
        seconds.append(time.perf_counter() - begin_s)
    last = int(own[-1])
    return {
        "pinned": pinned,
        "gb_per_s": num_bytes / min(seconds) / GIGA,
        "holds": last == NUM_COPIES,
    }


def _arrived(store: dist.Store, check: Callable[..., Any], rank: int) -> str:
    """Say that this rank is done with a check; the key to wait for before the next."""
    store.set(f"{check.__name__}-{rank}", "")
    return f"{check.__name__}-{1 - rank}"


def _shared(path: Path, num_bytes: int) -> torch.Tensor:
    """Memory that both processes have; zero at first."""
    return torch.from_file(str(path), True, num_bytes, dtype=torch.uint8)


def _pin(shared: torch.Tensor, setting: Setting) -> bool:
    """Let the GPU read and write this memory by itself; whether it can."""
    if not setting.on_gpu:
        return False
    register = torch.cuda.cudart().cudaHostRegister
    return int(register(shared.data_ptr(), shared.numel(), 0)) == 0


def _wait_for(flag: torch.Tensor, value: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT.total_seconds()
    while int(flag[0]) != value:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the flag is {int(flag[0])}, never {value}")


if __name__ == "__main__":
    main()
