"""A killed worker is replaced, and the job ends with the weights of an unharmed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from hocket.errors import WorkerError
from tests.run.support import restarting_workers as restarting
from tests.run.support.forked import answers_of
from tests.run.support.forked_launch import launch_forked
from tests.run.support.network import ADDRESSES, PORT, codes_of, outputs, two_hosts
from tests.run.support.processes import none_alive_within
from tests.run.support.restarting_workers import NUM_STEPS, WEIGHTS, Kill

SCRIPT: Final = Path(restarting.__file__)
TRAIN: Final = "tests.run.support.restarting_workers:train"
WHOLE_S: Final = 240.0

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No worker that was started with the test's folder outlives it."""
    yield
    assert none_alive_within(str(tmp_path))


def launched(folder: Path, kills: list[Kill], max_restarts: int) -> list[Any]:
    """Train on two workers of this host."""
    reported: Any = list(kills)
    return launch_forked(
        TRAIN,
        [str(folder), reported],
        num_workers=2,
        run_dir=folder,
        max_restarts=max_restarts,
    )


@cache
def unharmed() -> dict[str, Tensor]:
    """The weights when no worker is killed, and none could be replaced."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        reported = answers_of(TRAIN, str(folder), [], folder=folder)
        assert reported == [{"attempt": 0, "first": 0}] * 2
        return weights(folder)


def weights(folder: Path) -> dict[str, Tensor]:
    """What rank 0 left at the end."""
    state: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)
    return state


def check_unharmed(folder: Path) -> None:
    """Bit for bit."""
    expected, found = unharmed(), weights(folder)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


# Where a worker is killed, and the step from which the next attempt goes on.
PLACES: Final = [
    ("start", "", 0),
    ("joined", "", 0),
    ("{rank}F0", "0", 0),
    ("{rank}B1", "3", 2),
    ("save", "3", 2),
    ("sync", "3", 2),
    ("{rank}U", str(NUM_STEPS - 1), 6),
]
EVERY_RUN: Final = {(1, "{rank}B1")}  # the others take minutes

CASES: Final = [
    pytest.param(
        rank,
        place.format(rank=rank),
        when,
        first,
        marks=[] if (rank, place) in EVERY_RUN else [pytest.mark.long],
    )
    for place, when, first in PLACES
    for rank in range(2)
]


@pytest.mark.parametrize(("rank", "place", "when", "first"), CASES)
def test_a_killed_worker_is_replaced(
    tmp_path: Path, rank: int, place: str, when: str, first: int
) -> None:
    """Wherever it was: the next attempt goes on from the last whole checkpoint."""
    kill = Kill(rank=rank, place=place, when=when)
    assert launched(tmp_path, [kill], 1) == [{"attempt": 1, "first": first}] * 2
    check_unharmed(tmp_path)


@pytest.mark.long
def test_workers_may_be_killed_again(tmp_path: Path) -> None:
    """Each time the job loses a few steps, and none of what it had saved."""
    kills = [
        Kill(rank=0, place="0B0", when="3"),
        Kill(rank=1, place="start", when=""),
        Kill(rank=1, place="save", when="5"),
    ]
    assert launched(tmp_path, kills, 3) == [{"attempt": 3, "first": 4}] * 2
    check_unharmed(tmp_path)


@pytest.mark.long  # as tests/run/cluster/test_launch.py has it, with a pipeline
def test_attempts_are_bounded(tmp_path: Path) -> None:
    """One more failure than restarts ends the job, with that failure on top."""
    kills = [Kill(rank=1, place="1F0", when="0")] * 2
    with pytest.raises(WorkerError, match=r"^rank 1 was killed .* at step 0 in 1F0"):
        launched(tmp_path, kills, 1)
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.network
@pytest.mark.parametrize(
    ("have_names", "rank", "place", "when", "first"),
    [
        (False, 1, "1B1", "3", 2),
        pytest.param(True, 0, "0B1", "3", 2, marks=pytest.mark.long),
        pytest.param(True, 0, "start", "", 0, marks=pytest.mark.long),
        pytest.param(True, 1, "start", "", 0, marks=pytest.mark.long),
        pytest.param(True, 1, "joined", "", 0, marks=pytest.mark.long),
        pytest.param(True, 0, "sync", "3", 2, marks=pytest.mark.long),
        pytest.param(True, 1, "save", "5", 4, marks=pytest.mark.long),
        pytest.param(True, 1, "1U", "7", 6, marks=pytest.mark.long),
    ],
)
def test_torchrun_replaces_workers_on_two_hosts(
    tmp_path: Path, have_names: bool, rank: int, place: str, when: str, first: int
) -> None:
    """Its hosts count restarts differently, and its one store serves all attempts.

    Where a host's name does not lead to it, torchrun needs two options more.
    """
    kills = [Kill(rank=rank, place=place, when=when)]
    meet = [
        *("--rdzv-backend", "c10d", "--rdzv-id", "restarts"),
        *("--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"),
        *("--nproc-per-node", "1", "--max-restarts", "2"),
    ]
    more: list[list[str]] = [[], []]
    if not have_names:
        more = [
            ["--local-addr", address, "--rdzv-conf", f"is_host={1 - host}"]
            for host, address in enumerate(ADDRESSES)
        ]
    with two_hosts(have_names=have_names) as hosts:
        script = [str(SCRIPT), str(tmp_path), json.dumps(kills)]
        launchers = [
            hosts.torchrun(host, [*meet, *more[host]], script, tmp_path)
            for host in range(2)
        ]
        codes = codes_of(launchers, WHOLE_S, tmp_path)
    assert codes == [0, 0], outputs(tmp_path)
    reported = [
        json.loads((tmp_path / f"rank-{rank}.result.json").read_text())
        for rank in range(2)
    ]
    assert reported[0] == reported[1]
    assert reported[0]["first"] == first
    assert reported[0]["attempt"] >= 1
    check_unharmed(tmp_path)
