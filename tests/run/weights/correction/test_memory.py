"""Workers that correct old gradients hold what was predicted, and hardly more."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked import answers_of

CLOSE: Final = 0.02  # of a device's peak: a copy of its delayed weights is 10 % of it

RUNS: Final = [
    ["wpipe", "none", "adamw"],
    ["wpipe", "error-feedback", "adamw"],
    ["wpipe", "weight-prediction", "adamw"],
    ["wpipe", "weight-prediction", "muon"],
    ["wpipe", "lr-discount", "adamw"],
    ["pipedream-2bw", "error-feedback", "muon"],
    ["pipedream-2bw", "weight-prediction", "adamw"],
]


@pytest.mark.timeout(120)
def test_predicted_as_held(tmp_path: Path) -> None:
    """By kind: weights and what updates keep to the byte, and all together at most."""
    found, _ = answers_of(
        "tests.run.weights.correction.measured:measure_all",
        RUNS,
        str(tmp_path),
        num_workers=2,
        folder=tmp_path,
        whole_s=90.0,
    )
    peaks: dict[tuple[str, ...], list[int]] = {}
    for run, devices in zip(RUNS, found, strict=True):
        for device in devices:
            check(run, device)
        peaks[tuple(run)] = [device["peak_bytes"] for device in devices]
    plain = peaks["wpipe", "none", "adamw"]
    discounted = peaks["wpipe", "lr-discount", "adamw"]
    assert discounted == pytest.approx(plain, rel=CLOSE)
    for name in ("error-feedback", "weight-prediction"):
        corrected = peaks["wpipe", name, "adamw"]
        assert all(b > 1.05 * a for a, b in zip(plain, corrected, strict=True))


def check(run: list[str], device: dict[str, Any]) -> None:
    """One device."""
    predicted = device["predicted"]
    assert predicted["weight_bytes"] == device["weight_bytes"], run
    assert predicted["optimizer_bytes"] == device["optimizer_bytes"], run
    total = sum(predicted.values())
    assert device["peak_bytes"] == pytest.approx(total, rel=CLOSE), (run, device)
