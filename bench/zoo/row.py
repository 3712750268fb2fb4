"""What is kept of one architecture, and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.measure import spread


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a pipeline said of itself, and what its ops then took.

    Args:
        step_s: predicted, from its profile and its dry run.
        makespan_s: measured, from the first op's start to the last one's end.
        bubble_predicted: the predicted share of the makespan.
        bubble_measured: the measured share of the makespan.
        must_hold_bytes: predicted, of each worker.
        peak_bytes: measured, of each worker.
    """

    step_s: float
    makespan_s: float
    bubble_predicted: float
    bubble_measured: float
    must_hold_bytes: list[int]
    peak_bytes: list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rounds of one contestant.

    Args:
        name: of the contestant.
        seconds: of its steps.
        forecast: of a pipeline.
    """

    name: str
    seconds: list[float]
    forecast: Forecast | None = None


def summary(
    samples: Sequence[Sample],
    batch_size: int,
    planned_s: float | None,
    peak_bytes: list[int] | None,
) -> dict[str, Any]:
    """Everything about one contestant.

    Args:
        samples: its own.
        batch_size: samples per step.
        planned_s: a step, as `hocket.plan` had it before the first of them.
        peak_bytes: measured, of each worker; a pipeline's forecast has it, too.
    """
    seconds = [s for sample in samples for s in sample.seconds]
    found: dict[str, Any] = {
        **spread(seconds),
        "samples_per_s": round(batch_size / median(seconds), 2),
        "peak_bytes": peak_bytes,
    }
    if planned_s is not None:
        found["planned_ms"] = _ms(planned_s)
        found["planned_error"] = _error(planned_s, samples[0].seconds)
    pairs = [(s.seconds, s.forecast) for s in samples if s.forecast is not None]
    return found | _forecasts(pairs) if pairs else found


def _forecasts(pairs: Sequence[tuple[list[float], Forecast]]) -> dict[str, Any]:
    """How well they came true: the median over the profiles, and each."""
    forecasts = [forecast for _, forecast in pairs]
    errors = [_error(forecast.step_s, seconds) for seconds, forecast in pairs]
    of_ops = [_error(f.step_s, [f.makespan_s]) for f in forecasts]
    return {
        "peak_bytes": forecasts[0].peak_bytes,
        "must_hold_bytes": forecasts[0].must_hold_bytes,
        "predicted_ms": _ms(median(f.step_s for f in forecasts)),
        "error": round(median(errors), 4),
        "errors": sorted(errors),
        "makespan_ms": _ms(median(f.makespan_s for f in forecasts)),
        "makespan_error": round(median(of_ops), 4),
        "bubble_predicted": round(median(f.bubble_predicted for f in forecasts), 4),
        "bubble_measured": round(median(f.bubble_measured for f in forecasts), 4),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _error(predicted_s: float, measured_s: Sequence[float]) -> float:
    """Predicted over measured, minus one."""
    return round(predicted_s / median(measured_s) - 1.0, 4)


def print_row(row: dict[str, Any]) -> None:
    """A line for each contestant, and one for what could not be done."""
    name = row["architecture"]
    for label, found in row.get("contestants", {}).items():
        errors = "".join(
            f"   {what} {found[what] * 100:+6.1f} %"
            for what in ("error", "makespan_error", "planned_error")
            if what in found
        )
        print(
            f"{name:<12} {label:<22} {found['median_ms']:9.2f} ms "
            f"{found['samples_per_s']:9.1f} samples/s "
            f"{max(found['peak_bytes']) / 2**20:8.1f} MiB{errors}",
            flush=True,
        )
    for reason in ("failed", "not_planned", "no_ddp"):
        if row.get(reason):
            print(f"{name:<12} {reason}: {row[reason]}", flush=True)
