"""WPipe beside the others on MRPC: what is measured, on files that the test makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.wpipe.measure import CONTESTANTS, ENTRY, TWO_BW, measure
from hocket.errors import DataError
from hocket.schedules import SCHEDULES
from tests.bench.test_ooo_pipeline_measure import TINY, mrpc
from tests.run.support.forked import answers_of

STEPS = 5  # of a round: when it drains, two results come at once


@pytest.mark.long
@pytest.mark.timeout(150)
def test_contestants_train_in_turn_and_are_compared_with_2bw(tmp_path: Path) -> None:
    """2BW beside itself is 1; it keeps twice as much of old weights as WPipe."""
    contestants = [["pipedream-2bw", "2x1", None], ["wpipe", "2x1", None]]
    data = mrpc(tmp_path)
    found, _ = answers_of(
        ENTRY,
        [f"data.path={data}", *TINY, f"training.max_steps={3 * STEPS}"],
        contestants,
        str(tmp_path / "run"),
        STEPS,
        folder=tmp_path / "job",
        whole_s=140.0,
    )
    two_bw, wpipe = found["rows"]

    assert (found["num_rounds"], found["steps_per_round"]) == (2, STEPS)
    assert two_bw["times_as_fast"]["of_medians"] == 1.0
    assert two_bw["simulated_times_as_fast"] == two_bw["ideal_times_as_fast"] == 1.0
    assert wpipe["ideal_times_as_fast"] == pytest.approx(1.0)
    assert 0 < wpipe["old_bytes"] < two_bw["old_bytes"]
    for row in (two_bw, wpipe):
        assert row["step"]["median_ms"] > 0
        assert row["round_step"]["median_ms"] > 0
        assert 0 <= row["accuracy"] <= 1
        assert row["last_loss"] > 0


def test_the_contestants_are_those_of_the_question() -> None:
    """2BW first, then data parallelism, 1F1B, and WPipe in both forms."""
    names = [contestant.schedule for contestant in CONTESTANTS]

    assert CONTESTANTS[0] == TWO_BW
    assert {"pipedream-2bw", "1f1b", "wpipe", "wpipe-overlapped"} == set(names)
    assert set(names) <= set(SCHEDULES)
    assert {contestant.layout for contestant in CONTESTANTS} == {"2x1", "1x2"}


def test_missing_data_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    """Before any worker starts."""
    with pytest.raises(DataError, match=r"train\.tsv.*gluebenchmark\.com"):
        measure(tmp_path)
