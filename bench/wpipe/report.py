"""What `hocket bench wpipe` prints: published, simulated, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.published import (
    MEASURED_HEAD,
    PACKAGED,
    Measured,
    Row,
    Table,
    kept,
    measured_cells,
    measured_table,
    simulated_table,
    write_published,
)
from bench.wpipe.experiments import (
    FLUSHED,
    ORDER,
    OVERLAPPED,
    PUBLISHED_MEMORY,
    PUBLISHED_TIMES,
    TWO_BW,
    WPIPE,
    Best,
    Result,
)
from hocket.draw.quantity import byte_size, seconds
from hocket.planner.candidate import DDP

_FIRST: Final = "2BW"
_HEAD: Final = (
    *("experiment", "layout", "2bw samples/s", "of", "data parallel", "1f1b"),
    *("wpipe", "of", "overlapped", "published"),
    *("2bw's sizes: wpipe", "memory", "published"),
)
_NOTHING: Final = "-"
_LEGEND: Final = (
    "layout: devices per pipeline x replicas. of: samples in a microbatch, R where "
    "stages keep only their inputs and recompute. data parallel, 1f1b, wpipe, "
    "overlapped: times as fast as 2bw, each at its own best size of a sweep (1 to "
    "512, with and without recomputation) that fits 16 GB; - where none does. 2bw's "
    "sizes: wpipe with the microbatches of 2bw's best, and what its devices then hold "
    "on average, as a share. published: of large BERTs together; the paper's tables "
    "are not at hand."
)


def publish(simulated: Sequence[Result], measured: Measured) -> dict[str, Any]:
    """Write what `hocket bench` shows of these results; see `write_published`."""
    rows = [_HEAD, *map(_row, simulated)]
    tables = [simulated_table(_FIRST, rows, _LEGEND), _measured_table(measured)]
    return write_published("wpipe", map(_experiment, simulated), measured, tables)


def publish_one(result: Result) -> None:
    """Write one simulated experiment beside those that `hocket bench` shows already."""
    document = kept(PACKAGED / "wpipe.json")
    table, *others = document["tables"]
    _, *rows = table["rows"]
    cells = {(row[0], row[1]): row for row in [*rows, _row(result)]}
    found = {
        (one["experiment"], one["layout"]): one
        for one in [*document["experiments"], _experiment(result)]
    }
    ordered = [key for key in ORDER if key in cells]
    table = simulated_table(_FIRST, [_HEAD, *(cells[key] for key in ordered)], _LEGEND)
    experiments = [found[key] for key in ordered]
    write_published("wpipe", experiments, document["measured"], [table, *others])


def _experiment(result: Result) -> dict[str, Any]:
    experiment = result.experiment
    is_published = experiment.is_published
    return {
        "experiment": experiment.name,
        "layout": experiment.layout,
        "num_devices": experiment.shape.num_workers,
        "num_nodes": experiment.num_nodes,
        "published_times": PUBLISHED_TIMES if is_published else None,
        "published_memory": PUBLISHED_MEMORY if is_published else None,
        "times_as_fast": {
            name: result.times(name) for name in (DDP, FLUSHED, WPIPE, OVERLAPPED)
        },
        "alike": {
            "times_as_fast": result.times_alike,
            "memory": result.memory_alike,
        },
        "best": {name: asdict(best) for name, best in result.best.items()},
    }


def _row(result: Result) -> Row:
    experiment = result.experiment
    is_published = experiment.is_published
    two_bw = result.best.get(TWO_BW)
    return (
        experiment.name,
        experiment.layout,
        _NOTHING if two_bw is None else f"{two_bw.samples_per_s:.1f}",
        _size(two_bw),
        _number(result.times(DDP)),
        _number(result.times(FLUSHED)),
        _number(result.times(WPIPE)),
        _size(result.best.get(WPIPE)),
        _number(result.times(OVERLAPPED)),
        f"{PUBLISHED_TIMES:.1f}" if is_published else "",
        _number(result.times_alike),
        _number(result.memory_alike),
        f"{PUBLISHED_MEMORY:.2f}" if is_published else "",
    )


def _size(best: Best | None) -> str:
    if best is None:
        return _NOTHING
    return f"{best.num_samples}" + (" R" if best.recomputes else "")


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _measured_table(measured: Measured) -> Table:
    more = ("filling and draining", "old weights", "last loss", "accuracy")
    head = ("schedule", "layout", *MEASURED_HEAD, *more)
    return measured_table(
        measured,
        _FIRST,
        f"{measured['num_rounds']} rounds of {measured['steps_per_round']} steps",
        [head, *map(_measured_row, measured["rows"])],
        "step: while the pipeline is full. filling and draining: what a step takes "
        "more when every round's steps share one. simulated: from a profile of the "
        "model, and a few steps played, in the same run. ideal: F, I and W equally "
        "long, and messages that take no time. 1f1b as 1x2: data "
        "parallelism. old weights: of all workers, beside the newest. "
        "accuracy: of the evaluation after all rounds.",
    )


def _measured_row(row: Measured) -> Row:
    more_s = (row["round_step"]["median_ms"] - row["step"]["median_ms"]) / 1e3
    return (
        row["schedule"],
        row["layout"],
        *measured_cells(row),
        seconds(max(0.0, more_s)),
        byte_size(row["old_bytes"]),
        f"{row['last_loss']:.4f}",
        f"{100 * row['accuracy']:.1f} %",
    )
