"""Pipelines with the losses of papers equal `hocket.emulate`, dropout included."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.comparison import in_few_steps
from tests.run.support.forked import answers_of

TWENTY: Final = {"num_steps": 20, "schedule": "1f1b"}
CASES: Final[list[dict[str, Any]]] = [
    {**TWENTY, "loss": "byol", "mode": "train", "delay": 1, "is_lars": True},
    {**TWENTY, "loss": "byol", "mode": "train", "delay": 0, "is_float32": True},
    {**TWENTY, "loss": "moco", "mode": "train", "delay": 1, "schedule": "gpipe"},
    {**TWENTY, "loss": "dino", "mode": "eval", "delay": 1},
    {**TWENTY, "loss": "near", "mode": "train", "delay": 2, "accumulate": 3},
    # Fewer batches than the prologue takes.
    {"num_steps": 1, "schedule": "1f1b", "loss": "byol", "mode": "train", "delay": 1},
    {"num_steps": 2, "schedule": "1f1b", "loss": "byol", "mode": "train", "delay": 2},
]
QUICK: Final = [CASES[0], *in_few_steps(*CASES[1:5], num_steps=6), *CASES[5:]]
ATTENTION: Final[list[dict[str, Any]]] = [
    {**TWENTY, "loss": "distillation", "mode": "train", "schedule": "zb-h1"},
    {"num_steps": 1, "schedule": "1f1b", "loss": "distillation", "mode": "eval"},
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="views"),
        pytest.param(CASES, id="views, 20 steps", marks=pytest.mark.long),
        pytest.param(ATTENTION, id="attention", marks=pytest.mark.long),
    ],
)
def test_training_equals_the_emulator(
    cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Dropout, padding, batch norms in either mode, uneven microbatches."""
    for found in answers_of(
        "emulated_teachers:train_all",
        cases,
        str(tmp_path),
        folder=tmp_path,
        whole_s=280.0,
    ):
        for case, off in zip(cases, found, strict=True):
            assert off <= (2e-4 if case.get("is_float32") else 1e-9), case
