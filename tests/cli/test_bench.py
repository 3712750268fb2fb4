"""`hocket bench`: published experiments as a table."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.planner.experiments import ooo_pipeline


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the experiments: all of them take a while."""
    monkeypatch.setattr(
        ooo_pipeline.results,
        "__defaults__",
        (ooo_pipeline.EXPERIMENTS[:1] + ooo_pipeline.EXPERIMENTS[-1:],),
    )


def test_prints_published_and_simulated_beside_each_other() -> None:
    """Of the paper's own experiments the range; of the others only the simulation."""
    done = CliRunner().invoke(app, ["bench", "ooo-pipeline"])
    assert done.exit_code == 0, done.output
    bert, dense = (
        line for line in done.stdout.splitlines() if line.startswith(("BERT", "FFNN"))
    )

    assert "1.41 to 1.99" in bert
    assert "1.41 to 1.99" not in dense


def test_the_same_numbers_as_json() -> None:
    """With keys that stay."""
    done = CliRunner().invoke(app, ["bench", "ooo-pipeline", "--json"])
    bert, dense = json.loads(done.stdout)

    assert bert["published"] == [1.41, 1.99]
    assert dense["published"] is None
    assert set(bert) == {
        "experiment",
        "num_devices",
        "num_nodes",
        "batch_size",
        "num_microbatches",
        "published",
        "gpipe_s",
        "fast_forward",
        "modulo",
        "group_size",
        "best",
        "limit",
    }


def test_an_unknown_experiment_is_refused() -> None:
    """With the one that there is."""
    done = CliRunner().invoke(app, ["bench", "alchemy"])

    assert done.exit_code == 3
    assert "ooo-pipeline" in done.stderr
