"""`hocket bench`: published experiments as tables and as JSON, from packaged data."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from hocket.cli.main import app


def bench(*arguments: str) -> Result:
    """What a call prints, and how it ends."""
    return CliRunner().invoke(app, ["bench", *arguments])


def test_prints_published_simulated_and_measured_beside_each_other() -> None:
    """Of the paper's own experiments the range; what was measured has its machine."""
    done = bench("ooo-pipeline")
    assert done.exit_code == 0, done.output
    bert, dense = (
        next(line for line in done.stdout.splitlines() if line.startswith(name))
        for name in ("BERT-24, MRPC ", "FFNN-16")
    )

    assert "1.41 to 1.99" in bert
    assert "1.41 to 1.99" not in dense
    assert "BERT-12, MRPC, on CPUs" in done.stdout
    assert "cores of AMD EPYC, torch 2." in done.stdout
    assert "ooo-modulo x 2" in done.stdout


def test_wpipe_has_what_is_published_and_nothing_made_up() -> None:
    """The abstract's two numbers beside large BERTs, and none beside others."""
    done = bench("wpipe")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    large = next(line for line in lines if line.startswith("BERT, 96 blocks"))
    tuned = next(line for line in lines if line.startswith("BERT-large, fine-tuning"))

    assert " 1.4 " in large
    assert large.endswith("0.64")
    assert " 1.4 " not in tuned
    assert not tuned.endswith("0.64")
    assert "the paper's tables are not at hand" in " ".join(lines)


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide ones are folded; each part says which row is which, and no cell is lost."""
    for name in ("ooo-pipeline", "ooo-data", "wpipe", "tspipe", "pipetransformer"):
        monkeypatch.delenv("COLUMNS", raising=False)
        whole = bench(name).stdout
        monkeypatch.setenv("COLUMNS", str(width))
        narrow = bench(name).stdout
        assert max(map(len, narrow.splitlines())) <= width
        assert {*whole.split()} == {*narrow.split()}


def test_one_gpu_is_estimated_between_the_published_bounds() -> None:
    """What two lanes can gain at most is beside the paper's range, 1.03 to 1.58."""
    rows = json.loads(bench("ooo-single", "--json").stdout)["experiments"]
    gains = [row["graph_ms"] / row["two_lanes_ms"] for row in rows]
    assert 1.0 < min(gains) < 1.05
    assert 1.4 < max(gains) < 1.58


def test_freezing_has_its_caveats() -> None:
    """Published beside simulated, rows that do not fit, and what does not add up.

    Caching from epoch 0 is slower until the fourth, where alpha is 1/5.
    """
    done = bench("pipetransformer")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith("CIFAR-100")]
    text = " ".join(lines)

    assert [row[3] for row in rows] == ["3.86", "3.29", "2.83", "2.44", "2.04"]
    assert "does not fit" in text
    assert "471 ms" in text
    assert "2313 ms" in text
    (late,) = (x.split() for x in lines if x.startswith("1/5    CIFAR-100"))
    assert late[-2:] == ["3", "5"]
    assert "SQuAD's 2.10 cannot be found again" in text


def test_the_same_numbers_as_json() -> None:
    """With keys that stay, of what is simulated and of what is measured."""
    simulated = {
        "ooo-pipeline": {
            *("experiment", "num_devices", "num_nodes", "batch_size"),
            *("num_microbatches", "published", "ideal", "gpipe_s", "fast_forward"),
            *("modulo", "group_size", "best", "limit", "beside_recomputing"),
        },
        "wpipe": {
            *("experiment", "layout", "num_devices", "num_nodes", "published_times"),
            *("published_memory", "times_as_fast", "alike", "best"),
        },
        "tspipe": {
            *("method", "nets", "num_devices", "num_microbatches", "batch_size"),
            *("published_samples_per_s", "naive_samples_per_s", "gpipe_samples_per_s"),
            *("tspipe_samples_per_s", "hocket", "hocket_samples_per_s", "sentence"),
            *("best", "best_samples_per_s"),
        },
        "ooo-single": {
            *("network", "batch_size", "num_kernels"),
            *("launched_ms", "graph_ms", "two_lanes_ms"),
        },
        "ooo-data": {
            *("network", "num_hosts", "link", "r", "compute_s", "ddp_s", "ddp_best_s"),
            *("barrier_s", "found_s", "num_buckets", "k", "k_layers"),
            *("published_k", "published_s"),
        },
        "pipetransformer": {"experiment", "rows"},
    }
    for name, keys in simulated.items():
        document = json.loads(bench(name, "--json").stdout)
        assert set(document) == {"experiments", "measured"}
        assert all(set(each) == keys for each in document["experiments"])
        is_measured = name != "ooo-single"  # which needs a GPU
        if name == "pipetransformer":
            is_measured = bool(document["measured"])
        assert ({"environment", "rows"} <= set(document["measured"])) == is_measured


def test_an_unknown_experiment_is_refused() -> None:
    """With the names of those that there are."""
    done = bench("alchemy")

    assert done.exit_code == 3
    names = ("ooo-data", "ooo-pipeline", "ooo-single", "pipetransformer", "tspipe")
    assert ", ".join(map(repr, names)) in done.stderr
