"""bench/teacher_quality: its table, and that each case trains what it says."""

from __future__ import annotations

from typing import Any

from bench.teacher_quality.run import CASES, SETTINGS
from bench.teacher_quality.table import qualities


def row(variant: str, seed: int, value: float, loss: float | None) -> dict[str, Any]:
    """Make a run of BYOL."""
    return {
        "case": "BYOL, CIFAR-10",
        "variant": variant,
        "seed": seed,
        "num_steps": 624,
        "num_parameters": 110800,
        "value": value,
        "loss": loss,
    }


def test_runs_are_compared_with_the_same_seed() -> None:
    """Each seed's difference stands for itself; there may be no loss."""
    rows = [
        row("untrained", 0, 0.30, None),
        row("delay 0", 0, 0.35, 1.0),
        row("delay 0", 1, 0.37, 0.8),
        row("delay 1", 1, 0.36, 0.7),
        row("delay 1", 0, 0.36, 0.9),
    ]
    head, plain, delay_0, delay_1 = qualities(rows)
    cells = dict(zip(head, delay_1, strict=True))

    assert cells["accuracy, %"] == "**36.0 ± 0.0**"
    assert cells["minus rival, by seed"] == "+1.0, -1.0"
    assert cells["loss"] == "0.800"
    assert dict(zip(head, delay_0, strict=True))["by seed"] == "35.0, 37.0"
    assert dict(zip(head, plain, strict=True))["loss"] == "–"


def test_each_case_says_its_settings() -> None:
    """What is kept is measured again where they change."""
    assert [*CASES] == [*SETTINGS]
