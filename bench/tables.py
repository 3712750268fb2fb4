"""Write the tables of the benchmarks' READMEs from their results, and draw pictures.

    python -m bench.tables

Between the marks `<!-- table -->` and `<!-- end -->`, what stands there is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.activations.table import peaks
from bench.against.table import beside_other
from bench.compiled.table import beside_eager
from bench.emulated import picture as idle_shares
from bench.emulated.table import idle, kept
from bench.flush_free import picture as steps_and_memory
from bench.flush_free.table import against, blocks, kinds, layouts, steps
from bench.freezing.table import forwards
from bench.freezing.table import measured as ten_epochs
from bench.freezing.table import predicted as predicted_epochs
from bench.freezing.table import qualities as beside_unfrozen
from bench.ooo_data.table import hosts, measured
from bench.ooo_pipeline.table import speedups
from bench.optimum.table import distances
from bench.pipeline_vs_torch.table import best, compiled, versus
from bench.scale.table import commands, counts
from bench.sharded.table import beside_fsdp
from bench.sharded.table import layouts as of_four_workers
from bench.share.table import cost_of_a_gate, cost_of_turns, forecasts
from bench.share.table import predictions as predicted_modes
from bench.split.table import halves
from bench.staleness import picture as curves
from bench.staleness.table import beside_synchronous, qualities
from bench.start_memory.table import starts
from bench.teacher.table import contestants
from bench.teacher.table import emulated as emulated_teachers
from bench.teacher_quality.table import qualities as taught
from bench.torchtitan.table import beside_published, interleaved
from bench.wpipe import picture as wpipe_beside_2bw
from bench.wpipe.table import beside_2bw, in_blocks
from bench.zoo.table import predictions, speed_and_memory

FOLDER = Path(__file__).parent

Rows = list[dict[str, Any]]


def prediction(rows: Rows) -> list[list[str]]:
    """Simulated beside measured."""
    head = ["model", "schedule", "measured", "quartiles", "predicted", "error"]
    table = [[*head, "errors of each profile", "bubble predicted / measured"]]
    for row in rows:
        spread = row["measured"]
        table.append(
            [
                row["case"],
                f"`{row['schedule']}`",
                f"{spread['median_ms']:.1f} ms",
                f"{spread['quartile_1_ms']:.1f} to {spread['quartile_3_ms']:.1f}",
                f"{row['predicted_ms']:.1f} ms",
                f"**{row['error'] * 100:+.1f} %**",
                f"{row['errors'][0] * 100:+.0f} to {row['errors'][-1] * 100:+.0f} %",
                f"{row['bubble_predicted']:.3f} / {row['bubble_measured']:.3f}",
            ]
        )
    return table


def overhead(rows: Rows) -> list[list[str]]:
    """Per op."""
    table = [["workers", "ops per lane", "step", "bare loop", "host per op", "target"]]
    table += [
        [
            str(row["num_workers"]),
            str(row["num_ops_per_lane"]),
            f"{row['step']['median_ms']:.2f} ms",
            f"{row['bare_loop']['median_ms']:.2f} ms",
            f"**{row['host_us_per_op']:.1f} µs**",
            f"{row['target_us_per_op']} µs",
        ]
        for row in rows
    ]
    return table


def memory(rows: Rows) -> list[list[str]]:
    """Of each pair of workers, the one that is further off."""
    head = ["model", "schedule", "recompute", "must hold", "measured", "over"]
    table = [[*head, "weights, gradients, optimizer", "activations", "messages"]]
    for pair in zip(rows[::2], rows[1::2], strict=True):
        row = max(pair, key=lambda row: abs(row["over"]))
        parts = row["predicted"]
        state = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
        table.append(
            [
                row["case"],
                f"`{row['schedule']}`",
                row["recompute"],
                _mib(row["must_hold_bytes"]),
                _mib(row["measured_bytes"]),
                f"**{row['over'] * 100:+.1f} %**",
                _mib(sum(parts[name] for name in state)),
                _mib(parts["activation_bytes"]),
                _mib(parts["message_bytes"]),
            ]
        )
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


def checkpoint(rows: Rows) -> list[list[str]]:
    """Blocking, in the background, and loading."""
    head = ["workers", "model", "written", "blocking", "background", "load", "a step"]
    more = ["a step beside the writer", "in the way of training", "of a step", "target"]
    table = [[*head, *more]]
    for row in rows:
        speeds = [
            f"{row[name]['median_ms'] / 1e3:.2f} s, "
            f"{row[f'{name}_bytes_per_s'] / 1e6:,.0f} MB/s"
            for name in ("blocking", "background", "load")
        ]
        table.append(
            [
                str(row["num_workers"]),
                f"{row['model_bytes'] / 1e6:,.0f} MB",
                f"{row['saved_bytes'] / 1e6:,.0f} MB",
                *speeds,
                f"{row['step']['median_ms'] / 1e3:.2f} s",
                f"{row['step_beside']['median_ms'] / 1e3:.2f} s",
                f"{row['background_call']['median_ms']:.0f} ms",
                f"**{row['share_of_step'] * 100:.1f} %**",
                f"{row['target_share_of_step'] * 100:.0f} %",
            ]
        )
    return table


# By folder, and by the mark in its README.
TABLES: dict[tuple[str, str], Callable[[Rows], list[list[str]]]] = {
    ("pipeline_vs_torch", "table"): versus,
    ("pipeline_vs_torch", "best"): best,
    ("pipeline_vs_torch", "compiled"): compiled,
    ("prediction", "table"): prediction,
    ("overhead", "table"): overhead,
    ("checkpoint", "table"): checkpoint,
    ("memory", "table"): memory,
    ("activations", "table"): peaks,
    ("against", "table"): beside_other,
    ("emulated", "table"): kept,
    ("emulated", "flush_free"): idle,
    ("flush_free", "replicas"): layouts,
    ("flush_free", "table"): steps,
    ("flush_free", "against"): against,
    ("flush_free", "kinds"): kinds,
    ("freezing", "table"): ten_epochs,
    ("freezing", "predictions"): predicted_epochs,
    ("freezing", "forward"): forwards,
    ("freezing", "quality"): beside_unfrozen,
    ("ooo_data", "table"): measured,
    ("ooo_data", "hosts"): hosts,
    ("ooo_pipeline", "table"): speedups,
    ("optimum", "table"): distances,
    ("scale", "table"): counts,
    ("scale", "planned"): commands,
    ("share", "turns"): cost_of_turns,
    ("share", "gate"): cost_of_a_gate,
    ("share", "forecast"): forecasts,
    ("share", "merged"): predicted_modes,
    ("split", "table"): halves,
    ("staleness", "table"): qualities,
    ("staleness", "costs"): beside_synchronous,
    ("flush_free", "blocks"): blocks,
    ("sharded", "table"): beside_fsdp,
    ("sharded", "four"): of_four_workers,
    ("start_memory", "table"): starts,
    ("teacher", "table"): contestants,
    ("teacher", "emulated"): emulated_teachers,
    ("teacher_quality", "table"): taught,
    ("torchtitan", "table"): beside_published,
    ("torchtitan", "interleaved"): interleaved,
    ("wpipe", "table"): beside_2bw,
    ("wpipe", "blocks"): in_blocks,
    ("compiled", "table"): beside_eager,
    ("zoo", "table"): speed_and_memory,
    ("zoo", "predictions"): predictions,
}


# What is not in results/cpu.json.
FILES: dict[tuple[str, str], str] = {
    ("emulated", "flush_free"): "flush_free.json",
    ("flush_free", "replicas"): "replicas.json",
    ("freezing", "forward"): "forward.json",
    ("scale", "planned"): "planned.json",
    ("freezing", "quality"): "quality.json",
    ("flush_free", "blocks"): "blocks.json",
    ("sharded", "four"): "four.json",
    ("teacher", "emulated"): "emulated.json",
    ("torchtitan", "table"): "published.json",
    ("torchtitan", "interleaved"): "interleaved.json",
    ("wpipe", "blocks"): "blocks.json",
}

# Each draws what is kept. (bench/ooo_pipeline simulates again, which takes a while.)
PICTURES = (idle_shares, steps_and_memory, curves, wpipe_beside_2bw)


def main() -> None:
    """Write all that have results."""
    for picture in PICTURES:
        picture.main()
    for (name, mark), make in TABLES.items():
        path = FOLDER / name / "results" / FILES.get((name, mark), "cpu.json")
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        readme = FOLDER / name / "README.md"
        text = readme.read_text(encoding="utf-8")
        text = _replaced(text, mark, _markdown(make(result["rows"])))
        if "environment" in result:  # what is simulated is the same anywhere
            text = _replaced(text, "environment", _environment(result["environment"]))
        readme.write_text(text, encoding="utf-8")


def _replaced(text: str, mark: str, new: str) -> str:
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"  # between may be nothing at all
    return re.sub(pattern, lambda m: f"{m[1]}{new}\n{m[2]}", text, flags=re.DOTALL)


def _markdown(table: list[list[str]]) -> str:
    head, *rows = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([head, "|" + "---|" * len(table[0]), *rows])


def _environment(facts: dict[str, Any]) -> str:
    return (
        f"{facts['date']}; {facts['num_cores']} cores of {facts['processor']}; one "
        f"thread per worker; torch {facts['torch']}, Python {facts['python']}, gloo."
    )


if __name__ == "__main__":
    main()
