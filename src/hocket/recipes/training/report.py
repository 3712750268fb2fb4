"""Writes a run's report: timelines above each other, curves, and the recipe."""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, Final

import torch

from hocket.core.costs import Costs
from hocket.core.formats import costs_json
from hocket.core.timelines.fit import fit
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html import Chart, Facts, Line, to_html
from hocket.recipes.run_files import (
    COSTS_NAME,
    METRICS_NAME,
    RECIPE_NAME,
    REPORT_NAME,
    TIMELINE_NAME,
    read_metrics,
)
from hocket.recipes.training.loop import epoch_table, predicted_beside
from hocket.recipes.training.records import EvaluationRecord, SummaryRecord
from hocket.recipes.training.watchers import result_line
from hocket.run.engine.plan import Plan
from hocket.version import __version__

# What every evaluation has beside the user's metrics.
_NO_METRICS: Final = {"kind", *(x.name for x in fields(EvaluationRecord))}


def write_report(
    run_dir: Path, plan: Plan, measured: Timeline | None, summary: SummaryRecord
) -> Path:
    """Write one HTML page into the run's folder, with its timeline and costs.

    Args:
        run_dir: the folder, with the recipe and the metrics in it.
        plan: the plan, with the predicted timeline.
        measured: the timeline of a typical step, if any was trained.
        summary: the run's totals.

    Returns:
        The page's path.
    """
    records: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in read_metrics(run_dir / METRICS_NAME):
        records[record["kind"]].append(record)
    timelines = [("predicted", predicted_beside(plan, measured))]
    if measured is not None:
        timelines.append(("measured", measured))
    page = to_html(
        timelines,
        run_dir.name,
        summary=result_line(summary),
        samples_per_step=summary.num_samples / summary.num_steps,
        charts=charts(records["step"], records["evaluation"]),
        tables=(epoch_table(records["epoch"]),) if records["epoch"] else (),
        advised=summary.advice if measured is not None else None,
        facts=(
            Facts("recipe", text=(run_dir / RECIPE_NAME).read_text("utf-8")),
            Facts("schedule", text=str(plan.schedule)),
            Facts("stages", rows=stage_rows(plan)),
            Facts("machine", rows=machine_rows()),
        ),
    )
    path = run_dir / REPORT_NAME
    path.write_text(page, encoding="utf-8")
    if measured is not None:
        (run_dir / TIMELINE_NAME).write_text(measured.to_json(), encoding="utf-8")
    costs = measured_costs(plan, measured)
    (run_dir / COSTS_NAME).write_text(costs_json.to_json(costs), encoding="utf-8")
    return path


def measured_costs(plan: Plan, measured: Timeline | None) -> Costs:
    """Return the plan's costs, corrected by a measured step of its own order."""
    if measured is None or measured.schedule != plan.schedule:
        return plan.costs
    return fit(plan.costs, [measured])


def charts(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> tuple[Chart, ...]:
    """Return charts of loss, each metric, speed and bubble over the steps.

    Args:
        steps: as `metrics.jsonl` has them, with null for what is not finite.
        evaluations: these lines of the file, which have the metrics by their names.
    """
    trained = partial(_line, "training", "step", steps)
    measured = partial(_line, "evaluation", "num_steps", evaluations)
    metrics = [x for x in (*evaluations, {})[0] if x not in _NO_METRICS]
    return (
        Chart("loss", (trained("loss"), measured("loss"))),
        *(Chart(name, (measured(name),)) for name in metrics),
        Chart("samples/s of each step", (trained("samples_per_s"),)),
        Chart("bubble of rank 0, share of each step", (trained("bubble_fraction"),)),
    )


def _line(
    title: str, place: str, records: Sequence[Mapping[str, Any]], name: str
) -> Line:
    """Return the line of one number, with a gap where it is not finite."""
    values = (nan if x[name] is None else x[name] for x in records)
    at = tuple(float(x[place]) for x in records)
    return Line(title, at, tuple(values), is_evaluation=title == "evaluation")


def stage_rows(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return each stage's device, first layer and delay."""
    stages = plan.schedule.program.stages
    rows = []
    for number, (stage, name) in enumerate(zip(stages, plan.stage_names, strict=True)):
        delay = f", delay {stage.delay}" if stage.delay else ""
        rows.append((f"stage {number}", f"device {stage.device}, from {name}{delay}"))
    return tuple(rows)


def machine_rows() -> tuple[tuple[str, str], ...]:
    """Return the versions, the machine and the command."""
    return (
        ("hocket", __version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("machine", f"{platform.system()} {platform.machine()}"),
        ("threads per worker", str(torch.get_num_threads())),
        ("command", " ".join(sys.argv)),
    )
