"""Simulate TSPipe's experiments, and keep what `hocket bench tspipe` shows.

    python -m bench.tspipe.simulate

takes some minutes. What bench/teacher measured is shown with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench.published import PACKAGED, Row, Table, kept, write_published
from bench.teacher.table import measured_rows
from bench.tspipe.experiments import Experiment, Result, results
from hocket.planner.teachers.compare import TeacherPipeline

MEASURED: Final = Path(__file__).parents[1] / "teacher" / "results" / "cpu.json"
_NOTHING: Final = "-"
_LEGEND: Final = (
    "Samples per second of model parallelism (one device at a time), GPipe with the "
    "teacher before the student, and TSPipe, and TSPipe's speedups over both. "
    "published: on 8 V100s of 32 GB, from the authors' poster. simulated: networks "
    "counted by hand in float32, batches of the released scripts, p - 1 microbatches "
    "of each of two views, or p of one; BERT with 128 tokens. hocket: the fastest of "
    "gpipe, 1f1b and zb-h1, filled, with the same microbatches, over TSPipe. best: "
    "the fastest of pipelines with any number of microbatches and replicas, and of "
    "data parallelism, over TSPipe; its name is that of the layout, devices of a "
    "pipeline x replicas. For 16 "
    "V100s 12.15 times model parallelism is published, for a ViT that is not named."
)
_HEAD: Final[Row] = (
    *("method", "teacher / student", "V100s", "MP", "GPipe", "TSPipe"),
    *("vs MP", "published", "vs GPipe", "published", "hocket", "best", ""),
)


def row_of(result: Result) -> dict[str, Any]:
    """An experiment in numbers."""
    experiment, free = result.experiment, result.free
    found: dict[str, Any] = {
        "method": experiment.method,
        "nets": experiment.nets,
        "num_devices": experiment.num_devices,
        "num_microbatches": experiment.num_microbatches,
        "batch_size": experiment.batch_size,
        "published_samples_per_s": experiment.published,
        "naive_samples_per_s": experiment.samples_per_s(result.naive_s),
        "gpipe_samples_per_s": _rate(experiment, result.gpipe, ahead=False),
        "tspipe_samples_per_s": _rate(experiment, result.gpipe, ahead=True),
        "hocket": None if result.ours is None else result.ours.schedule,
        "hocket_samples_per_s": _rate(experiment, result.ours, ahead=True),
        "sentence": free.sentence,
    }
    best, plain = free.pipeline, free.data_parallel
    if plain is not None and (best is None or free.data_parallel_s < best.step_s):
        found["best"] = plain.candidate.schedule
        found["best_samples_per_s"] = experiment.samples_per_s(free.data_parallel_s)
    elif best is not None:
        found["best"] = f"{best.schedule} {best.num_devices}x{best.num_replicas}"
        found["best_samples_per_s"] = experiment.samples_per_s(best.step_s)
    return found


def _rate(
    experiment: Experiment, found: TeacherPipeline | None, *, ahead: bool
) -> float | None:
    if found is None:
        return None
    return experiment.samples_per_s(found.step_s if ahead else found.same_batch_s)


def _table(rows: list[dict[str, Any]]) -> Table:
    cells = [_HEAD, *map(_cells, rows)]
    title = ["TSPipe's experiments on 8 and 16 V100s, simulated beside published:"]
    return {"title": title, "rows": cells, "legend": _LEGEND}


def _cells(row: dict[str, Any]) -> Row:
    published = row["published_samples_per_s"]
    tspipe = row["tspipe_samples_per_s"]

    def over(a: float | None, b: float | None) -> str:
        return _NOTHING if a is None or b is None else f"{a / b:.2f}"

    return (
        row["method"],
        row["nets"],
        str(row["num_devices"]),
        *(_short(row[f"{x}_samples_per_s"]) for x in ("naive", "gpipe", "tspipe")),
        over(tspipe, row["naive_samples_per_s"]),
        _NOTHING if published is None else over(published[2], published[0]),
        over(tspipe, row["gpipe_samples_per_s"]),
        _NOTHING if published is None else over(published[2], published[1]),
        over(row["hocket_samples_per_s"], tspipe),
        over(row.get("best_samples_per_s"), tspipe),
        row.get("best", ""),
    )


def _short(number: float | None) -> str:
    return _NOTHING if number is None else f"{number:.3g}"


def main() -> None:
    """Simulate all, and write them beside what was measured."""
    rows = []
    for result in results():
        rows.append(row_of(result))
        print(rows[-1], flush=True)
    publish(rows)


def publish(rows: list[dict[str, Any]]) -> None:
    """Write what `hocket bench tspipe` reads.

    Args:
        rows: the simulated experiments.
    """
    measured = kept(MEASURED)
    where = measured["environment"]
    title = [
        f"Measured on two CPU workers, {where['date']}, {where['num_cores']} cores of "
        f"{where['processor']}, torch {where['torch']}; medians of rounds in turn:"
    ]
    legend = (
        "large: forwards of the teacher take 1.5 times as long as the student's; deep: "
        "twice. bound: both workers computing their own stages, without a message or a "
        "wait. MP, GPipe: times as fast as these. See bench/teacher."
    )
    tables = [
        _table(rows),
        {"title": title, "rows": measured_rows(measured["rows"]), "legend": legend},
    ]
    write_published("tspipe", rows, measured, tables)


def republish() -> None:
    """Write it again, with what is measured by now, without simulating."""
    publish(kept(PACKAGED / "tspipe.json")["experiments"])


if __name__ == "__main__":
    main()
