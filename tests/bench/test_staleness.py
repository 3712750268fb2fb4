"""bench/staleness: what it says of its runs, and its optimizer of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from bench.measure import write_result
from bench.staleness.muon import MuonAndAdamw
from bench.staleness.picture import staleness_svg
from bench.staleness.run import kept
from bench.staleness.table import beside_synchronous, qualities
from bench.staleness.train import curve
from hocket.run.weights.settings import Parameters


def row(variant: str, seed: int, value: float | None, loss: float) -> dict[str, Any]:
    """A run of the case "digits"."""
    return {
        "case": "digits",
        "variant": variant,
        "seed": seed,
        "num_samples": 2000,
        "learning_rate": 0.01,
        "metric": "accuracy",
        "value": value,
        "loss": None if value is None else loss,
        "curve": [2.0, 1.0, None if value is None else loss],
    }


ROWS = [
    row("synchronous", 0, 0.90, 0.3),
    row("synchronous", 1, 0.94, 0.2),
    row("2bw", 0, 0.89, 0.4),
    row("2bw", 1, None, 0.0),
    row("wpipe", 0, 0.91, 0.35),
    row("wpipe", 1, 0.93, 0.25),
]


def test_quality_is_the_mean_over_seeds() -> None:
    """A diverged run is shown, and a run that does not exist is left out."""
    head, digits = qualities(ROWS)
    cells = dict(zip(head, digits, strict=True))

    assert cells["synchronous"] == "92.0 ± 2.8"
    assert cells["WPipe"] == "92.0 ± 1.4"
    assert cells["2BW"] == "**diverged** (1 of 2)"
    assert qualities(ROWS[:4])[1][-1] == "-"


def test_distances_compare_runs_of_one_seed() -> None:
    """Both seeds lose 0.05: the seeds' own spread of 0.07 is not in the difference."""
    head, digits = beside_synchronous(ROWS)
    cells = dict(zip(head, digits, strict=True))

    assert "synchronous" not in cells
    assert cells["WPipe"] == "+0.050 ± 0.000"


def test_the_picture_is_an_svg_of_whatever_there_is() -> None:
    """Also where a run diverged and others have not been made."""
    text = staleness_svg(ROWS)

    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text == staleness_svg(ROWS)


def test_a_curve_has_the_mean_of_equal_parts() -> None:
    """Of six steps, two to a point; what is no number stays none."""
    assert curve([3.0, 1.0, 2.0, 2.0, float("nan"), 1.0], 3) == [2.0, 2.0, None]


def test_runs_of_a_changed_case_are_forgotten(tmp_path: Path) -> None:
    """Only what was trained as the case says today counts."""
    path = tmp_path / "cpu.json"
    write_result(path, {"cases": {"digits": ["another recipe"]}, "rows": ROWS})

    assert kept(path) == []
    assert kept(tmp_path / "none.json") == []


def test_muon_and_adamw_step_as_each_alone() -> None:
    """Matrices in blocks as under Muon, all else as under AdamW; one schedule."""
    named = {
        "embedding.weight": torch.randn(5, 4),
        "blocks.0.weight": torch.randn(4, 4),
        "blocks.0.bias": torch.randn(4),
    }

    def fresh() -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(value.clone()) for name, value in named.items()}

    def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1.0 / (step + 1))

    ours, theirs = fresh(), fresh()
    together = MuonAndAdamw(Parameters(ours), lr=0.1, weight_decay=0.01)
    muon = torch.optim.Muon(
        [theirs["blocks.0.weight"]],
        lr=0.1,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [theirs["embedding.weight"], theirs["blocks.0.bias"]]
    adamw = torch.optim.AdamW(others, lr=0.1, weight_decay=0.01, fused=True)
    schedules = [schedule(each) for each in (together, muon, adamw)]
    for _ in range(3):
        for name, parameter in ours.items():
            parameter.grad = torch.randn_like(parameter)
            theirs[name].grad = parameter.grad.clone()
        for optimizer in (together, muon, adamw):
            optimizer.step()
        for each in schedules:
            each.step()

    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        assert not torch.equal(parameter, named[name]), name
    assert set(together.state) == set(ours.values())
