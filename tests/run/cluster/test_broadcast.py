"""Worker 0 may take its time to decide, and whatever comes of it, all come to know."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NoReturn

import pytest
import torch
import torch.distributed as dist

from hocket.errors import PlanError
from hocket.run.cluster.broadcast import decide_on_rank_0
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.world import World, single_process_world

TIMEOUT_S: Final = 0.05
LONG_S: Final = 0.5


def two_workers() -> tuple[World, World]:
    """Of one job, in which no worker waits long."""
    store = dist.HashStore()
    alone = single_process_world(torch.device("cpu"), TIMEOUT_S)
    first, second = (
        replace(
            alone,
            rank=rank,
            world_size=2,
            store=store,
            exchange=StoreExchange(store, rank, 2, TIMEOUT_S),
        )
        for rank in range(2)
    )
    return first, second


def never() -> NoReturn:
    """What only worker 0 is asked."""
    raise AssertionError


def slowly() -> int:
    """Longer than any other wait may last."""
    time.sleep(LONG_S)
    return 5


@pytest.mark.timeout(60)
def test_a_decision_may_take_longer_than_any_other_wait() -> None:
    """The others wait for it all the same."""
    first, second = two_workers()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(decide_on_rank_0, second, never, "order")
        assert decide_on_rank_0(first, slowly, "order") == 5
        assert other.result() == 5


def test_no_worker_waits_for_a_decision_that_failed() -> None:
    """Rank 0 raises its own error; the others raise PlanError."""
    first, second = two_workers()
    with pytest.raises(AssertionError):
        decide_on_rank_0(first, never, "order")
    with pytest.raises(PlanError, match=r"rank 0 failed at the order .Ass"):
        decide_on_rank_0(second, never, "order")
