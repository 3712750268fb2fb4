"""Forwards of another net fill a pipeline's bubbles, and change nothing of it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import ConfigError
from tests.run.support.fill_workers import net, samples
from tests.run.support.forked_launch import launch_forked
from tests.run.support.plainly import SGD
from tests.run.support.started import started


@pytest.fixture(scope="module", name="reports")
def train_filled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both workers report."""
    folder = str(tmp_path_factory.mktemp("fill"))
    entry = "fill_workers:train"
    return launch_forked(entry, [folder], num_workers=2, timeout_s=120, run_dir=folder)


@pytest.mark.timeout(180)
def test_the_pipeline_is_what_it_is_alone(reports: Any) -> None:
    """Weights and losses are bit-equal, with dropout and batch norm."""
    for report in reports:
        assert report["same_losses"]
        assert report["same_weights"]


@pytest.mark.timeout(180)
def test_each_sample_is_done_once(reports: Any) -> None:
    """On one of the workers; then the data set is exhausted, and training goes on."""
    rows = sorted(tuple(x) for report in reports for x in report["rows"])
    assert rows[0][0] == 0
    assert rows[-1][1] == 40
    assert all(a[1] == b[0] for a, b in pairwise(rows))
    assert all(report["same_outputs"] for report in reports)


@pytest.mark.timeout(180)
def test_beside_a_teacher_it_changes_nothing_either(reports: Any) -> None:
    """Of a student whose teacher runs with its own batch; all samples are done."""
    rows = sorted(tuple(x) for report in reports for x in report["taught_rows"])
    assert all(report["same_taught"] for report in reports)
    assert rows[0][0] == 0
    assert rows[-1][1] == 40
    assert all(a[1] == b[0] for a, b in pairwise(rows))


@pytest.mark.timeout(180)
def test_each_sample_is_done_once_across_a_resume(reports: Any) -> None:
    """Behind the checkpoint come those that it does not count, and no others."""
    rows = sorted(
        tuple(x) for report in reports for x in report["before"] + report["after"]
    )
    assert rows[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(rows))
    assert rows[-1][1] == reports[0]["num_samples"] == reports[1]["num_samples"]
    assert all(report["lost"] for report in reports)


@pytest.mark.timeout(180)
def test_a_step_is_predicted_to_take_as_long(reports: Any) -> None:
    """A simulated step grows by 2 % at most, and both devices are filled."""
    for report in reports:
        assert report["slowdown"] <= 0.02
        assert min(report["counts"]) >= 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("long", "PlanError: fill: one forward takes .* Take a smaller batch_size"),
        ("memory", "FitError: .*smallest memory_bytes that works is"),
        ("overlap", "ConfigError: fill: steps of schedule 'pipedream-2bw' overlap"),
        ("ahead", "ConfigError: fill: .*with teachers, look_ahead=0"),
        ("differs", "SchemaError: ranks 0 and 1 differ in the settings of fill"),
    ],
)
def test_what_two_workers_refuse(reports: Any, name: str, text: str) -> None:
    """Every worker raises the same error, which says what to do."""
    for report in reports:
        assert re.match(text, report["errors"][name]), report["errors"][name]


def test_layers_that_freeze_are_refused() -> None:
    """The waits of another layout are others."""
    with pytest.raises(ConfigError, match="fill does not go with freeze: another lay"):
        started(
            nn.Linear(32, 4),
            nn.functional.mse_loss,
            SGD,
            (samples(3), torch.zeros(3, 4)),
            num_microbatches=1,
            freeze=hocket.freeze.Alpha(1 / 5),
            fill=hocket.Fill(net(), samples(3), _on_output),
        )


def test_what_is_refused_at_once() -> None:
    """A net that trains, samples that cannot be resumed, and options beside it."""
    few = samples(3)
    with pytest.raises(ConfigError, match=r"training mode .* Call net\.eval\(\)"):
        hocket.Fill(net().train(), few, _on_output)
    with pytest.raises(ConfigError, match=r"for a DataLoader, its \.dataset"):
        hocket.Fill(net(), iter(few), _on_output)
    with pytest.raises(ConfigError, match="samples is empty"):
        hocket.Fill(net(), [], _on_output)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        hocket.Fill(net(), few, _on_output, batch_size=0)
    model = nn.Linear(32, 4)
    with pytest.raises(ConfigError, match=r"shares weight .*deepcopy\(model\)\.eval"):
        started(
            model,
            nn.functional.mse_loss,
            SGD,
            (few, torch.zeros(3, 4)),
            num_microbatches=1,
            fill=hocket.Fill(nn.Sequential(model).eval(), few, _on_output),
        )


def _on_output(rows: range, output: Any) -> None:
    """Do nothing."""
