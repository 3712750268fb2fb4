"""The store in which a job's workers meet: a file, torchrun's, or one in memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist

from hocket import env
from hocket.errors import WaitError
from hocket.run.cluster.store.deadline_store import DeadlineStore
from hocket.run.diagnostics.job_folder import attempt_dir, store_path

JOIN_TIMEOUT_S: Final = 180.0  # starting takes longer than any op: imports, slow disks


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
