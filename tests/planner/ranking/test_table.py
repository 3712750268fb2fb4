"""Tables and JSON of rankings: rows, their order, their width, what limits them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from hocket.planner.rank import Search, rank
from hocket.planner.ranking.table import LIMITS, Paper, to_text
from tests.planner.toys import EVERYTHING, MIB, cluster, ranked, work

pytestmark = pytest.mark.xdist_group("rankings")  # in one process, which keeps them


def test_json_has_keys_that_stay() -> None:
    """A program that reads it finds the same keys in every release of one format."""
    document = ranked(work(8), cluster(4), 16, Search()).to_json()
    assert json.loads(json.dumps(document)) == document
    assert set(document) == {
        "format",
        "model",
        "how",
        "cluster",
        "batch_size",
        "num_candidates",
        "num_simulated",
        "num_beaten",
        "num_too_long",
        "notes",
        "best",
        "outcomes",
    }
    assert document["format"] == 1
    assert document["best"] in document["outcomes"]
    assert set(document["best"]) == {
        "schedule",
        "num_devices",
        "num_replicas",
        "stages_per_device",
        "num_microbatches",
        "recomputes",
        "num_shards",
        "samples_per_microbatch",
        "is_data_parallel",
        "step_s",
        "samples_per_s",
        "bubble_fraction",
        "bound_s",
        "gap",
        "limit",
        "fits",
        "missing_bytes",
        "peak_bytes",
        "memory",
        "message_bytes",
        "reduce_bytes",
        "delay",
        "num_versions",
        "stages",
        "buckets",
    }
    assert set(document["best"]["memory"][0]) == {
        "weight_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "version_bytes",
        "total_bytes",
    }


@pytest.mark.parametrize("num_rows", [4, 12, 40])
def test_the_choice_and_its_rivals_are_rows(num_rows: int) -> None:
    """Never more rows than asked for, in order, and no outcome twice."""
    ranking = ranked(work(8), cluster(4), 16, EVERYTHING)
    rows = ranking.rows(num_rows)
    shown = [outcome for row in rows for outcome in row]

    assert len(rows) <= num_rows
    assert len({x.candidate for x in shown}) == len(shown)
    for one in (ranking.best, ranking.best_pipeline, ranking.best_data_parallel):
        assert one in shown
    speeds = [row[0].samples_per_s for row in rows]
    assert all(a >= b * (1 - 1e-4) for a, b in pairwise(speeds))


def test_equal_outcomes_share_a_row() -> None:
    """Two schedules are one order where there is one microbatch."""
    asked = Search(("gpipe", "1f1b"), num_devices=(4,), num_microbatches=(1,))
    text = str(rank(work(8), cluster(4), 16, asked))
    assert "1f1b = gpipe" in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_is_no_wider_than_asked_for(width: int) -> None:
    """Columns are left out, names wrapped; the first is always the choice's mark."""
    ranking = ranked(work(8), cluster(4), 16, Search())
    text = to_text(ranking, Paper(width=width))
    assert max(map(len, text.splitlines())) <= width
    assert len([x for x in text.splitlines() if x.startswith("> ")]) == 2  # and rule
    assert "limited" in text


@pytest.mark.parametrize("width", [80, 140])
def test_what_is_printed_is_explained_beside_it(width: int) -> None:
    """Columns below the table, letters above the picture; notes are of its rows."""
    ranking = ranked(work(8), cluster(4), 16, Search())
    lines = to_text(ranking, Paper(width=width)).splitlines()
    names = [line.split("  ")[0] for line in lines]
    for column in ("schedule", "layout", "stages", "microbatches", "limited by", "gap"):
        assert names.count(column) == 1
    text = " ".join(lines)
    limits = {ranking.limit_of(row[0]) for row in ranking.rows()}
    assert all((f"{word} (" in text) == (word in limits) for word in LIMITS)
    assert "F forward, B backward" in text
    shown = {x.candidate.schedule for row in ranking.rows() for x in row}
    for note in ranking.notes:
        assert shown & set(re.findall(r"[\w-]+", note))
    for name in {"chimera", "v-min"} - shown:
        assert name not in text


def test_what_limits_a_row_is_what_its_devices_wait_for() -> None:
    """The bubble with few microbatches, messages over slow links, the work alone."""

    def limit(m: int, latency_s: float = 0.0) -> str:
        free = cluster(4, bytes_per_s=float("inf"), latency_s=latency_s)
        asked = Search(
            ("gpipe",),
            num_devices=(4,),
            num_microbatches=(m,),
            recompute=(False,),
            data_parallel=False,
        )
        ranking = rank(work(8), free, m, asked)
        assert ranking.best is not None
        return ranking.limit_of(ranking.best)

    assert limit(4) == "bubble"
    assert limit(128) == "work"
    assert limit(4, latency_s=10.0) == "messages"


def test_the_table_is_always_the_same(golden: Callable[[str, str], None]) -> None:
    """Sorted by numbers, and equal numbers by what the candidate is."""
    ranking = rank(
        work(8, weight_bytes=256 * MIB, activation_bytes=32 * MIB),
        cluster(4, memory_bytes=5 * 2**30, bytes_per_s=1e10, latency_s=1e-5),
        32,
    )
    golden("planner/table.txt", str(ranking) + "\n")
    golden("planner/table-80.txt", to_text(ranking, Paper(width=80)) + "\n")
