"""Loaders in a pipeline: each worker reads its part, and training is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support import forked

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]
TIMEOUT_S: Final = 5.0  # where a worker waits in vain


def answers_of(
    function: str, folder: Path, *args: Any, num_workers: int = 2, **more: Any
) -> list[dict[str, Any]]:
    """What each worker returned."""
    entry = f"loader_workers:{function}"
    return forked.answers_of(
        entry, *args, num_workers=num_workers, folder=folder, **more
    )


def test_first_reads_inputs_and_last_reads_targets(tmp_path: Path) -> None:
    """The stage between reads nothing; weights and losses are as from whole batches."""
    answers = answers_of("in_parts", tmp_path, 1, 0, num_workers=3)
    sides = [{side for side, _ in each["parts"]["read"]} for each in answers]
    assert sides == [{"inputs"}, set(), {"targets"}]
    for answer in answers:
        check_equal(answer)


@pytest.mark.parametrize("reading_workers", [0, 2])
def test_replicas_read_their_own_rows(tmp_path: Path, reading_workers: int) -> None:
    """Together each row once; the last batch is smaller, and so is an evaluation's."""
    answers = answers_of("in_parts", tmp_path, 2, reading_workers)
    for answer in answers:
        check_equal(answer)
    if reading_workers:  # they read in processes of their own
        return
    rows = [
        row
        for answer in answers
        for side, each in answer["parts"]["read"]
        if side == "inputs"
        for row in each
    ]
    assert sorted(rows) == list(range(40))


def check_equal(answer: dict[str, Any]) -> None:
    """All but what was read."""
    parts, whole = answer["parts"], answer["whole"]
    for name in ("losses", "evaluated", "weights", "place"):
        assert parts[name] == whole[name], name
    assert len(parts["losses"]) == 4


@pytest.mark.parametrize("reading_workers", [0, 2])
def test_training_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, reading_workers: int
) -> None:
    """Losses as in one go; the pipeline closes though processes still read ahead."""
    folders = [tmp_path / "broken", tmp_path / "whole"]
    broken = answers_of("broken_off", folders[0], reading_workers)
    whole = answers_of("in_parts", folders[1], 1, 0)
    for answer in broken:
        assert answer["losses"] == whole[0]["parts"]["losses"]
        assert answer["place"] == whole[0]["parts"]["place"]


def test_other_data_on_one_worker_is_noticed(tmp_path: Path) -> None:
    """Though no worker sees what another has read."""
    reported = answers_of("other_data", tmp_path, timeout_s=TIMEOUT_S)
    assert any("ranks 1 and 0 have different batches" in each for each in reported), (
        reported
    )


def test_a_last_batch_too_small_is_reported_at_once(tmp_path: Path) -> None:
    """As of a DataLoader, before anything is trained."""
    for reported in answers_of("last_batch", tmp_path):
        assert "26 samples in batches of 12 leave a last batch of 2" in reported


@pytest.mark.parametrize("ending", [0, 1])
@pytest.mark.parametrize(
    ("schedule", "evaluates"),
    [("1f1b", False), ("1f1b", True), ("pipedream-2bw", False)],
)
def test_batches_that_end_early_on_one_rank_are_found_at_once(
    tmp_path: Path, schedule: str, ending: int, evaluates: bool
) -> None:
    """Not a timeout later; the error names both counts."""
    outcome = forked.run_forked(
        "loader_workers:one_ends_early",
        schedule,
        ending,
        evaluates,
        num_workers=2,
        folder=tmp_path,
        timeout_s=50.0,
    )
    error = outcome.reports[ending]
    assert error.kind == "DataError"
    assert f"rank {ending} ended after 7 batches" in error.message
    assert f"rank {1 - ending} has yielded" in error.message
    assert "50.0 s" not in outcome.reports[1 - ending].message
