"""Joining a job, and telling each other small facts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hocket import cuda
from hocket.errors import RunError, SchemaError, WaitError
from hocket.run.cluster.reporting import report_failures
from hocket.run.cluster.store.store_exchange import MAX_BYTES, StoreExchange
from hocket.run.cluster.world import choose_backend, join_world


def exchanges(world_size: int, timeout_s: float) -> list[StoreExchange]:
    """The ends of all workers, in one process."""
    store = dist.HashStore()
    return [
        StoreExchange(store, rank, world_size, timeout_s) for rank in range(world_size)
    ]


def test_alone_without_a_job() -> None:
    """A plain `python train.py` is a world of one, with no process group."""
    world = join_world()
    assert (world.rank, world.world_size, world.same_host) == (0, 1, (0,))
    assert world.device == torch.device("cpu")
    assert world.gather_json({"a": [1, None]}) == [{"a": [1, None]}]
    assert world.broadcast_json("b") == "b"
    world.barrier()
    assert not dist.is_initialized()
    world.close()


def test_half_a_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ran alone by mistake would train another model than the rest."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="not MASTER_ADDR and MASTER_PORT"):
        join_world()


def test_a_rank_beyond_the_world_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has both numbers."""
    job = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="RANK=2 must be 0 to WORLD_SIZE - 1 = 1"):
        join_world()


def test_backends_that_are_not_there() -> None:
    """The way out is in the message."""
    with pytest.raises(RunError, match="'gloo' and 'nccl'"):
        join_world(backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="torch finds no CUDA device here"):
            join_world(device="cuda")


@pytest.mark.parametrize(
    ("device", "backend", "num_workers", "num_devices", "way_out"),
    [
        ("tpu", "gloo", 1, 1, "'cuda' and 'cpu'"),
        ("cuda", "mpi", 1, 1, "'gloo' and 'nccl'"),
        ("cuda", "gloo", 1, 0, "HOCKET_DEVICE=cpu"),
        ("cpu", "nccl", 1, 1, "take 'gloo', or GPUs"),
        ("cuda", "nccl", 2, 1, "2 workers .* 1 CUDA devices.*HOCKET_BACKEND=gloo"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(
    device: str, backend: str, num_workers: int, num_devices: int, way_out: str
) -> None:
    """NCCL takes one worker for each GPU."""
    with pytest.raises(RunError, match=way_out):
        choose_backend(device, backend, num_workers, num_devices)


@pytest.mark.parametrize(
    ("device", "backend", "num_workers"),
    [("cuda", "nccl", 1), ("cuda", "gloo", 2), ("cpu", "gloo", 9)],
)
def test_device_and_backend_are_chosen_apart(
    device: str, backend: str, num_workers: int
) -> None:
    """With gloo, workers share a GPU."""
    assert choose_backend(device, backend, num_workers, 1).value == backend


@pytest.mark.parametrize(
    ("backend", "given", "expected"),
    [("nccl", "", "EAGER"), ("nccl", "LAZY", "LAZY"), ("gloo", "", "")],
)
def test_kernels_are_loaded_before_messages_of_nccl(
    backend: str, given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's first use may wait for a receive; the user's own choice stands."""
    at_start: list[str | None] = []
    monkeypatch.setenv("CUDA_MODULE_LOADING", given)
    monkeypatch.setattr(cuda, "num_devices", lambda: 1)
    monkeypatch.setattr(
        cuda, "use", lambda _: at_start.append(os.environ["CUDA_MODULE_LOADING"])
    )
    with closing(join_world(device="cuda", backend=backend)) as world:
        assert world.device == torch.device("cuda", 0)
    assert at_start == [expected]


def test_everyone_hears_everyone() -> None:
    """In as many rounds as they like, mixed with broadcasts and barriers."""
    with ThreadPoolExecutor(3) as pool:

        def talk(own: StoreExchange) -> list[object]:
            heard: list[object] = []
            for turn in range(3):
                heard += own.gather("gather", [own.rank, turn])
                heard.append(own.broadcast("broadcast", own.rank, from_rank=turn))
                own.barrier("barrier")
            return heard

        heard = list(pool.map(talk, exchanges(3, 20.0)))
    assert (
        heard
        == [
            [
                [0, 0],
                [1, 0],
                [2, 0],
                0,
                [0, 1],
                [1, 1],
                [2, 1],
                1,
                [0, 2],
                [1, 2],
                [2, 2],
                2,
            ]
        ]
        * 3
    )


def test_who_does_not_come_is_named() -> None:
    """All of them; and only the speaker, where one speaks."""
    with pytest.raises(WaitError, match=r"waited 0\.05 s at 'plan' for ranks 1, 2$"):
        exchanges(3, 0.05)[0].gather("plan", "x")
    with pytest.raises(WaitError, match=r"^rank 0 .* at 'seed' for rank 2$"):
        exchanges(3, 0.05)[0].broadcast("seed", "x", from_rank=2)
    with pytest.raises(WaitError, match=r"waited 0\.1 s at 'end' for ranks 0, 2$"):
        exchanges(3, 60.0)[1].barrier("end", timeout_s=0.1)


def test_who_holds_the_store_leaves_a_barrier_last() -> None:
    """Else the others would look for their keys in a store that is gone."""
    store = dist.HashStore()
    first, second = (
        StoreExchange(store, rank, 2, 0.2, rank_0_holds_store=True) for rank in range(2)
    )
    store.set("exchange/0/end/1", "")  # rank 1 has come, and has not looked yet
    with pytest.raises(WaitError, match=r"^rank 0 waited 0\.2 s at 'end' for rank 1$"):
        first.barrier("end")
    second.turn += 1
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.barrier, "again", 20.0)
        first.barrier("again", 20.0)
        other.result()


def test_exchanges_are_small() -> None:
    """The store is no place for weights."""
    [own] = exchanges(1, 1.0)
    with pytest.raises(SchemaError, match="exchanges are for at most 16,777,216"):
        own.gather("weights", "x" * MAX_BYTES)


def test_a_good_end_leaves_nothing(tmp_path: Path) -> None:
    """No ring, no report, no folder."""
    with report_failures(join_world(), tmp_path) as recorder:
        recorder.begin("0F0", 0)
        recorder.end()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_goes_on_with_its_last_ops(tmp_path: Path) -> None:
    """What prints the traceback prints them too; the report is in the folder."""

    def fail() -> None:
        with report_failures(join_world(), tmp_path) as recorder:
            recorder.begin("0F0", 3)
            recorder.end()
            recorder.begin("0B0", 3)
            int("no")

    with pytest.raises(ValueError, match="no") as caught:
        fail()
    title, ops, *lines = caught.value.__notes__[0].splitlines()
    assert title == "rank 0 failed at step 3 in 0B0"
    assert ops == "the last ops of rank 0, newest last:"
    assert [line.split()[:3] for line in lines] == [
        ["step", "3", "0F0"],
        ["step", "3", "0B0"],
    ]
    assert len(list(tmp_path.rglob("rank-0.json"))) == 1


_CALLBACK = """
import signal, sys, time, weakref
from pathlib import Path
from hocket.run.cluster.reporting import report_failures
from hocket.run.cluster.world import join_world

class Thing:
    pass

signal.signal(signal.SIGINT, signal.default_int_handler)
things = [Thing()]
kept = weakref.ref(things[0], lambda _: signal.raise_signal(int(sys.argv[1])))
try:
    with report_failures(join_world(), Path(sys.argv[2])):
        things.clear()
        time.sleep(60)
except BaseException as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, "StoppedBySignal"), (signal.SIGINT, "KeyboardInterrupt")],
)
def test_a_signal_in_a_callback_is_not_lost(
    number: signal.Signals, raised: str, tmp_path: Path
) -> None:
    """Python ignores what a weak reference's callback raises: it comes once more."""
    ended = subprocess.run(
        [sys.executable, "-c", _CALLBACK, str(int(number)), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert ended.stdout == f"{raised}\n"
    assert ended.stderr == "rank 0 was stopped before its first op\n"
