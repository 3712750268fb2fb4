"""What `hocket bench ooo-pipeline` prints: published, simulated, measured."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from bench.ooo_pipeline.experiments import PUBLISHED, Result
from bench.published import (
    MEASURED_HEAD,
    Measured,
    Row,
    Table,
    measured_cells,
    measured_table,
    simulated_table,
    write_published,
)
from hocket.draw.quantity import seconds

_FIRST: Final = "GPipe"
_HEAD: Final = (
    *("experiment", "devices", "microbatches", "gpipe", "published", "ideal"),
    *("fast-forward", "modulo", "best", "limit", "recomputing", "measured"),
)
_LEGEND: Final = (
    "published: of all experiments of the paper together. ideal: of its order, for "
    "equal layers, and messages that take no time. modulo: by the groups in which "
    "layers are dealt out. best: of all schedules that fit the memory, whatever their "
    "stages. limit: no order on gpipe's stages is faster. recomputing: the paper's "
    "order beside a gpipe that keeps only its stages' inputs. measured: fast-forward "
    "and modulo."
)


def publish(simulated: Sequence[Result], measured: Measured) -> dict[str, Any]:
    """Write what `hocket bench` shows of these results; see `write_published`."""
    rows = [_HEAD, *map(_row, simulated), _small_row(measured)]
    tables = [simulated_table(_FIRST, rows, _LEGEND), _measured_table(measured)]
    return write_published(
        "ooo-pipeline", map(_experiment, simulated), measured, tables
    )


def _experiment(result: Result) -> dict[str, Any]:
    experiment = result.experiment
    return {
        "experiment": experiment.name,
        "num_devices": experiment.num_devices,
        "num_nodes": experiment.num_nodes,
        "batch_size": experiment.batch_size,
        "num_microbatches": experiment.num_microbatches,
        "published": list(PUBLISHED) if experiment.is_published else None,
        "ideal": experiment.ideal,
        "gpipe_s": result.gpipe_s,
        "fast_forward": result.fast_forward,
        "modulo": result.modulo or None,
        "group_size": result.group_size or None,
        "best": {"schedule": result.best[0], "times": result.best[1]},
        "limit": result.limit,
        "beside_recomputing": result.beside_recomputing,
    }


def _row(result: Result) -> Row:
    experiment = result.experiment
    low, high = PUBLISHED
    nodes = experiment.num_nodes
    return (
        experiment.name,
        f"{experiment.num_devices}" + (f" in {nodes}" if nodes > 1 else ""),
        str(experiment.num_microbatches),
        seconds(result.gpipe_s),
        f"{low} to {high}" if experiment.is_published else "",
        f"{experiment.ideal:.2f}",
        f"{result.fast_forward:.2f}",
        f"{result.modulo:.2f} by {result.group_size}" if result.modulo else "",
        f"{result.best[1]:.2f} {result.best[0]}",
        f"{result.limit:.2f}",
        f"{result.beside_recomputing:.2f}",
        "",
    )


def _small_row(measured: Measured) -> Row:
    """What was measured, as one more experiment."""
    rows = measured["rows"]
    fast, modulo, best = (
        max(found, key=itemgetter("simulated_times_as_fast"))
        for found in (
            [row for row in rows if row["schedule"] == "ooo-fast-forward"],
            [row for row in rows if row["schedule"] == "ooo-modulo"],
            rows,
        )
    )
    return (
        f"BERT-{measured['model']['num_blocks']}, MRPC, on CPUs",
        str(measured["num_devices"]),
        str(measured["num_microbatches"]),
        seconds(rows[0]["step"]["median_ms"] / 1e3),
        "",
        f"{modulo['ideal_times_as_fast']:.2f}",
        f"{fast['simulated_times_as_fast']:.2f}",
        f"{modulo['simulated_times_as_fast']:.2f}",
        f"{best['simulated_times_as_fast']:.2f} {best['schedule']}",
        "",
        "",
        ", ".join(
            f"{row['times_as_fast']['of_medians']:.2f}" for row in (fast, modulo)
        ),
    )


def _measured_table(measured: Measured) -> Table:
    return measured_table(
        measured,
        _FIRST,
        f"{measured['num_rounds']} rounds",
        [("schedule", *MEASURED_HEAD), *map(_measured_row, measured["rows"])],
        "simulated: from a profile of the model, and a few steps played, in the same "
        "run. ideal: F, I and W equally long, and messages that take no time.",
    )


def _measured_row(row: Measured) -> Row:
    many = row["stages_per_device"]
    schedule = row["schedule"] + (f" x {many}" if many > 1 else "")
    return schedule, *measured_cells(row)
