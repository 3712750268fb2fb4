"""While training, a worker that fails is named, and takes all others with it, in time.

Most jobs here are forked (tests/run/support/forked.py): nothing ends the other workers,
so each must notice by itself. Those that hocket.launch starts report what a user reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from hocket.env import ExitCode
from hocket.errors import WorkerError
from hocket.run.diagnostics.failure import worker_error
from tests.run.support import failing_workers as failing
from tests.run.support.forked import Outcome, run_forked
from tests.run.support.forked_launch import launch_forked
from tests.run.support.forked_python import start
from tests.run.support.processes import eventually, none_alive_within

TIMEOUT_S: Final = 3.0  # where it is waited out
LONG_S: Final = 60.0  # a limit that no wait reaches
BUSY_S: Final = 20.0  # what a busy machine may add
START_S: Final = 60.0  # for two Pythons to import torch there

POISONED: Final = 9  # sample of 16: microbatch 2 of 4; the second of two replicas
REPLICAS: Final = {"num_replicas": 2}
TORCH: Final = {"transport": "torch"}
FLUSH_FREE: Final = {"schedule": "wpipe"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No worker that was started with the test's folder outlives it."""
    yield
    assert none_alive_within(str(tmp_path))


def forked(
    folder: Path,
    num_workers: int,
    case: dict[str, Any],
    timeout_s: float = LONG_S,
    **settings: Any,
) -> Outcome:
    """Train with a fault, under no launcher."""
    return run_forked(
        "failing_workers:train",
        {"settings": settings, **case},
        str(folder),
        num_workers=num_workers,
        folder=folder,
        timeout_s=timeout_s,
        limit_s=TIMEOUT_S + BUSY_S,
    )


def launched(
    folder: Path, num_workers: int, case: dict[str, Any], **settings: Any
) -> WorkerError:
    """Train with a fault, as users do."""
    with pytest.raises(WorkerError) as caught:
        launch_forked(
            "failing_workers:train",
            [{"settings": settings, **case}, str(folder)],
            num_workers=num_workers,
            run_dir=folder,
            timeout_s=TIMEOUT_S,
        )
    return caught.value


def fault(rank: int, place: str, when: object, what: str) -> dict[str, Any]:
    """Which rank has which fault, where and when."""
    return {"rank": rank, "place": place, "when": str(when), "fault": what}


def story_of(outcome: Outcome) -> str:
    """What the launcher would say."""
    return str(worker_error(list(outcome.reports.values()), Path("folder")))


def check_consequences(outcome: Outcome, culprit: int) -> None:
    """All others gave up by themselves, and say where they stood; none is on top."""
    assert not outcome.hung - {culprit}
    first, *rest = story_of(outcome).splitlines()
    assert first.startswith(f"rank {culprit} ")
    place = r"(at step \d+ (in|after) \w+|before its first op)"
    for rank in set(outcome.codes) - {culprit}:
        assert outcome.codes[rank] == ExitCode.HANG
        what = r"(rank|results|evaluation|norms|the|[FB]\d)"
        said = rf"  rank {rank} gave up {place}.*: {what}"
        assert any(re.match(said, line) for line in rest), rest


def weights_of(folder: Path, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A worker's weights at the start, before the last step, and as it left them."""
    start = parameters_to_vector(failing.make_model().parameters()).detach()
    before, after = (
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float64)
        for path in (folder / f"weights-{rank}.before", folder / f"weights-{rank}")
    )
    return start, before, after


@pytest.mark.parametrize(
    ("num_workers", "bad", "culprit", "code", "said", "settings"),
    [
        (
            2,
            {"poison": [2, POISONED, "nan"]},
            1,
            ExitCode.NON_FINITE,
            "raised NonFiniteError at step 2 in 1F2: the loss is nan at step 2, stage "
            "1, microbatch 2",
            {},
        ),
        (
            4,
            {"poison": [2, POISONED, "inf"]},
            3,
            ExitCode.NON_FINITE,
            "raised NonFiniteError at step 2 in 3F0: the loss is nan at step 2, stage "
            "3, microbatch 0",
            {"schedule": "interleaved-1f1b", "num_replicas": 2},
        ),
        # The last stage's loss refuses a label out of range, and names it.
        (
            2,
            {"mislabel": [2, POISONED, failing.NUM_CLASSES]},
            1,
            ExitCode.WORKER,
            "raised IndexError at step 2 in 1F2: Target 3 is out of bounds",
            {},
        ),
    ],
)
def test_a_loss_that_is_no_number_changes_no_weight(
    tmp_path: Path,
    num_workers: int,
    bad: dict[str, Any],
    culprit: int,
    code: ExitCode,
    said: str,
    settings: dict[str, Any],
) -> None:
    """One microbatch of one replica is enough; no worker's weights are updated."""
    outcome = forked(tmp_path, num_workers, bad, **settings)
    check_consequences(outcome, culprit)
    assert outcome.codes[culprit] == code
    assert story_of(outcome).startswith(f"rank {culprit} {said}")
    for rank in range(num_workers):
        start, before, after = weights_of(tmp_path, rank)
        assert torch.equal(before, after)
        assert not torch.equal(before, start)


@pytest.mark.parametrize(
    ("num_workers", "rank", "place", "step", "settings"),
    [
        (2, 0, "0F1", 2, {}),
        (2, 1, "1B1", 2, {}),
        (2, 0, "0U", 0, {}),
        (2, 1, "wait in 1F0", 2, {}),
        (2, 1, "between steps", 1, {}),
        pytest.param(2, 1, "1F1", 2, TORCH, marks=pytest.mark.long),
        (2, 1, "wait in 1F0", 2, TORCH),
        pytest.param(4, 3, "1B0", 2, REPLICAS, marks=pytest.mark.long),
        (4, 0, "0R", 2, REPLICAS),
        pytest.param(4, 3, "1U", 2, REPLICAS, marks=pytest.mark.long),
        pytest.param(2, 1, "3B1", 2, FLUSH_FREE, marks=pytest.mark.long),
        (2, 0, "0U", 2, FLUSH_FREE),
        pytest.param(
            *(4, 2, "2R", 2, {**REPLICAS, **FLUSH_FREE}), marks=pytest.mark.long
        ),
    ],
)
def test_the_others_end_after_a_kill(
    tmp_path: Path,
    num_workers: int,
    rank: int,
    place: str,
    step: int | str,
    settings: dict[str, Any],
) -> None:
    """At any op, while it waits, or in the user's own loop: they notice at once."""
    killed = fault(rank, place, step, "kill")
    outcome = forked(tmp_path, num_workers, killed, **settings)
    assert outcome.codes[rank] == -signal.SIGKILL
    assert max(outcome.after_s.values()) < BUSY_S
    check_consequences(outcome, rank)
    where = {"between steps": "after losses", "wait in 1F0": "in 1F0, waiting for"}
    if "schedule" in settings:  # batches are read while older steps are under way
        step = r"[01]"
    place = re.escape(where.get(place, f"in {place}"))
    said = rf"rank {rank} was killed by signal 9 \(SIGKILL\) at step {step} {place}"
    assert re.match(said, story_of(outcome))


@pytest.mark.parametrize(
    ("place", "when", "after_s"),
    [("eval 1F1", "evaluate", BUSY_S), ("optimizer", "start", TIMEOUT_S + BUSY_S)],
)
def test_the_others_end_after_a_kill_outside_of_training(
    tmp_path: Path, place: str, when: str, after_s: float
) -> None:
    """In an evaluation; and while the pipeline is made, where waits go by the clock."""
    outcome = forked(tmp_path, 2, fault(1, place, when, "kill"), TIMEOUT_S)
    assert max(outcome.after_s.values()) < after_s
    check_consequences(outcome, 1)
    place = "at step 0 in eval 1F1" if when == "evaluate" else "before its first op"
    by = "rank 1 was killed by signal 9 (SIGKILL)"
    assert story_of(outcome).startswith(f"{by} {place}")


@pytest.mark.parametrize(
    ("num_workers", "rank", "place", "what", "settings"),
    [
        (2, 1, "1B1", "stop", {}),
        (2, 0, "0F1", "stop", TORCH),
        (2, 0, "loader", "sleep", {}),
        (4, 3, "1R", "stop", REPLICAS),
    ],
)
def test_the_others_end_when_one_hangs(
    tmp_path: Path,
    num_workers: int,
    rank: int,
    place: str,
    what: str,
    settings: dict[str, Any],
) -> None:
    """Stopped at an op, or in a loader that never comes to an end."""
    hangs = fault(rank, place, 2, what)
    outcome = forked(tmp_path, num_workers, hangs, TIMEOUT_S, **settings)
    assert outcome.hung == {rank}
    assert max(outcome.after_s.values()) < TIMEOUT_S + BUSY_S
    check_consequences(outcome, rank)
    op = "next batch" if place == "loader" else place
    assert story_of(outcome).startswith(f"rank {rank} hung at step 2 in {op} (for ")


@pytest.mark.parametrize(
    ("rank", "place", "op"),
    [
        (0, "forward of layer 0", "0F0"),
        (0, "backward of layer 0", "0B0"),
        (1, "loss", "1F0"),
        (0, "optimizer", "0U"),
        (1, "loader", "next batch"),
    ],
)
def test_an_error_in_the_users_code_is_named_first(
    tmp_path: Path, rank: int, place: str, op: str
) -> None:
    """With its traceback; what it does to the others comes after that."""
    outcome = forked(tmp_path, 2, fault(rank, place, 2, "raise"))
    check_consequences(outcome, rank)
    assert outcome.codes[rank] == ExitCode.WORKER
    first, rest = story_of(outcome).split("after that:\n")
    assert first.startswith(
        f"rank {rank} raised ValueError at step 2 in {op}: the spoon is bent\n"
    )
    assert 'raise ValueError("the spoon is bent")' in first
    assert "tests/run/support/failing_workers.py" in first
    assert rest.startswith(f"  rank {1 - rank} gave up ")


def test_the_launcher_names_the_root_cause(tmp_path: Path) -> None:
    """What failed first on top, then what came of it, then its last ops."""
    error = launched(tmp_path, 2, {"poison": [2, POISONED, "nan"]})
    story = str(error)
    assert (error.rank, error.exit_code) == (1, ExitCode.NON_FINITE)
    assert story.startswith("rank 1 raised NonFiniteError at step 2 in 1F2: the loss")
    assert re.search(r"\nafter that:\n  rank 0 (gave up|was stopped) at step 2 ", story)
    assert "the last ops of rank 1, newest last:\n  step     " in story
    assert "the last ops of rank 0" not in story  # they are in its report
    assert story.count("\n") < 25
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == story


def test_a_kill_at_the_very_start_ends_all(tmp_path: Path) -> None:
    """Before the workers have found each other, when no other could report it."""
    error = launched(tmp_path, 2, fault(1, "join", "start", "kill"))
    by = "rank 1 was killed by signal 9 (SIGKILL) before its first op"
    assert str(error).startswith(by)
    assert error.exit_code == ExitCode.WORKER


@pytest.mark.long  # as tests/run/diagnostics/test_failure.py has it, with two workers
def test_a_model_that_never_returns_is_found(tmp_path: Path) -> None:
    """It could still answer; but all others waited for it, some through others."""
    sleeps = fault(3, "forward of layer 7", 2, "sleep")
    error = launched(tmp_path, 4, sleeps, **REPLICAS)
    assert re.match(r"rank 3 (hung|was stopped) at step 2 in 1F0 \(for ", str(error))
    assert error.exit_code == ExitCode.HANG


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        pytest.param(signal.SIGTERM, ExitCode.TERMINATED, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_training_with_one_line(
    tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    """Ctrl-C reaches the whole process group, SIGTERM the launcher alone."""
    process = start(["-m", "tests.run.support.failing_workers", tmp_path], tmp_path)
    try:
        assert eventually(lambda: trains(tmp_path), START_S)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(BUSY_S) == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    place = r"at step \d+ (in|after) [\w ()]+"
    said = rf"stopped by {number.name}: rank 0 {place}, rank 1 {place}\n"
    assert re.fullmatch(said, (tmp_path / "err.txt").read_text())
    assert (tmp_path / "out.txt").read_text() == ""
    assert not (tmp_path / "workers").exists()


def trains(folder: Path) -> bool:
    """Whether the workers of a script have come to their first steps."""
    return (folder / "weights-0.before").exists()
