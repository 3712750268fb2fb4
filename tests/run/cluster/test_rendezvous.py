"""Workers of one attempt find each other in a store that served earlier ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from hocket.errors import WaitError
from hocket.run.cluster.rendezvous import Rendezvous, join_rendezvous
from tests.run.support.processes import eventually

PATIENT_S = 20.0


def meet_all(store: dist.Store, restarts: Sequence[int]) -> list[Rendezvous]:
    """One attempt in which every worker comes; `restarts` as each host counts."""
    size = len(restarts)
    with ThreadPoolExecutor(size) as pool:
        coming = [
            pool.submit(join_rendezvous, store, rank, size, restarts[rank], PATIENT_S)
            for rank in range(size)
        ]
        return [one.result() for one in coming]


def test_all_agree_on_a_name_and_a_number() -> None:
    """However many there are; one alone too."""
    store = dist.HashStore()
    for size in (1, 2, 5):
        first, *others = meet_all(store, [0] * size)
        assert all(other == first for other in others)


def test_hosts_may_count_restarts_differently() -> None:
    """Torchrun counts one only where the worker failed; no number comes twice."""
    store = dist.HashStore()
    counted = [(0, 0), (0, 1), (1, 1), (3, 1)]
    attempts = [meet_all(store, restarts)[0] for restarts in counted]
    assert [attempt.attempt for attempt in attempts] == [0, 1, 2, 3]
    assert len({attempt.name for attempt in attempts}) == len(counted)


def test_who_comes_before_rank_0_waits_for_its_attempt() -> None:
    """It reads the name of the attempt before, which has long begun without it."""
    store = dist.HashStore()
    [old, _] = meet_all(store, [0, 0])
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(join_rendezvous, store, 1, 2, 1, PATIENT_S)
        # It has put itself on the old list, where only the earlier rank 1 was.
        eventually(lambda: _restarts_at(store, old.name) == 1, 5.0)
        assert not early.done()
        new = join_rendezvous(store, 0, 2, 0, PATIENT_S)
        assert early.result() == new
    assert (old.attempt, new.attempt) == (0, 1)


def _restarts_at(store: dist.Store, name: str) -> int:
    reported: dict[str, int] = json.loads(store.get(f"{name}/here/1"))
    return reported["restarts"]


def test_an_attempt_that_died_while_meeting_is_forgotten() -> None:
    """Rank 0 was killed before all had come: those left meet its successor."""
    store = dist.HashStore()
    with pytest.raises(WaitError, match="ranks 1, 2 of 3 did not come"):
        join_rendezvous(store, 0, 3, 0, 0.05)
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[Rendezvous]] = [
            pool.submit(join_rendezvous, store, rank, 3, 0, PATIENT_S)
            for rank in (1, 2)
        ]
        new = join_rendezvous(store, 0, 3, 1, PATIENT_S)
        assert [one.result() for one in waiting] == [new, new]


def test_who_waits_in_vain_says_for_whom() -> None:
    """For rank 0, or for the others, whom only rank 0 can name."""
    store = dist.HashStore()
    with pytest.raises(WaitError, match=r"^rank 1 reached the store, but rank 0 did"):
        join_rendezvous(store, 1, 3, 0, 0.05)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(join_rendezvous, store, 1, 3, 0, 0.5)
        first = pool.submit(join_rendezvous, store, 0, 3, 0, 0.3)
    with pytest.raises(WaitError, match=r"^rank 2 of 3 did not come"):
        first.result()
    with pytest.raises(WaitError, match=r"^rank 1 .* but all workers did not come"):
        other.result()


def test_in_a_file_too(tmp_path: Path) -> None:
    """Any store will do."""
    first, second = (dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join_rendezvous, first, 1, 2, 0, PATIENT_S)
        assert join_rendezvous(second, 0, 2, 0, PATIENT_S) == other.result()
