"""What was measured as tables: seconds, bytes, and both beside PipeDream-2BW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Row = dict[str, Any]

ONE_BLOCK: Final = ", one block"  # behind the name of a schedule
FLUSH_FREE: Final = ("pipedream-2bw", "wpipe", "wpipe-overlapped")
TWO_BUFFERED, *WPIPES = FLUSH_FREE

BOUND: Final = 1.03  # a step of an order without a flush, at most, over the bound
COPIES: Final = 0.75  # WPipe's weights with all versions, over 2BW's
PUBLISHED_SPEEDUP: Final = 1.4  # of WPipe over 2BW, by its authors
PUBLISHED_MEMORY: Final = 0.64  # of WPipe to 2BW, by its authors: 36 % less

KINDS: Final = ("weight", "version", "gradient", "optimizer", "other")
NONE: Final = "–"


def steps(rows: list[Row]) -> list[list[str]]:
    """A step among others, beside its bound, and its bubble."""
    table = [
        [
            *("model", "schedule", "step", "quartiles", "predicted", "bound"),
            *("step / bound", "target", "bubble predicted / measured"),
            "times as fast as 2BW",
        ]
    ]
    for row in filter(_is_timed, rows):
        step, bubble = row["step"], row["bubble"]
        table.append(
            [
                row["case"],
                f"`{row['schedule']}`",
                f"{step['median_ms']:.1f} ms",
                f"{step['quartile_1_ms']:.1f} to {step['quartile_3_ms']:.1f}",
                f"{row['predicted_ms']:.1f} ms",
                f"{row['bound']['median_ms']:.1f} ms",
                f"**{row['step_over_bound']['of_medians']:.3f}**",
                f"{BOUND:.2f}" if row["schedule"] in FLUSH_FREE else NONE,
                f"{bubble['predicted']:.3f} / {bubble['measured']:.3f}",
                f"{row['speedup']['of_medians']:.3f}" if "speedup" in row else NONE,
            ]
        )
    return table


def blocks(rows: list[Row]) -> list[list[str]]:
    """WPipe with as many blocks as there can be, beside one block in each step."""
    steps = {
        (row["case"], row["schedule"]): row["step"] for row in filter(_is_timed, rows)
    }
    table = [["model", "schedule", "in blocks", "in one block", "blocks / one"]]
    for (case, schedule), own in steps.items():
        one = steps.get((case, f"{schedule}{ONE_BLOCK}"))
        if one is None:
            continue
        table.append(
            [
                case,
                f"`{schedule}`",
                *(
                    f"{x['median_ms']:.1f} ms ({x['quartile_1_ms']:.0f} to "
                    f"{x['quartile_3_ms']:.0f})"
                    for x in (own, one)
                ),
                f"**{own['median_ms'] / one['median_ms']:.3f}**",
            ]
        )
    return table


def layouts(rows: list[Row]) -> list[list[str]]:
    """Layouts of the same emulated devices: a step beside the devices' own work."""
    table = [
        [
            *("layout", "schedule", "microbatches", "step", "quartiles", "predicted"),
            *("error", "step / work", "bubble predicted / measured"),
            "times as fast as 1F1B 2x2",
        ]
    ]
    for row in rows:
        step, bubble = row["step"], row["bubble"]
        table.append(
            [
                row["layout"],
                f"`{row['schedule']}`",
                str(row["num_microbatches"]),
                f"{step['median_ms']:.1f} ms",
                f"{step['quartile_1_ms']:.1f} to {step['quartile_3_ms']:.1f}",
                f"{row['predicted_ms']:.1f} ms",
                f"{row['error'] * 100:+.1f} %",
                f"**{step['median_ms'] / row['work_ms']:.3f}**",
                f"{bubble['predicted']:.3f} / {bubble['measured']:.3f}",
                f"{row['speedup']['of_medians']:.3f}",
            ]
        )
    return table


def kinds(rows: list[Row]) -> list[list[str]]:
    """The bytes of both workers together, by kind."""
    table = [
        [
            *("model", "microbatches", "schedule", "weights", "old weights"),
            *("gradients", "optimizer", "activations, messages", "all"),
            *("predicted", "more loaded worker"),
        ]
    ]
    table += [
        [
            row["case"],
            str(row["num_microbatches"]),
            f"`{row['schedule']}`",
            *(_mib(_sum(row, f"{kind}_bytes")) for kind in KINDS),
            f"**{_mib(_sum(row, 'peak_bytes'))}**",
            _mib(_sum(row, "predicted_bytes")),
            _mib(max(x["peak_bytes"] for x in row["devices"])),
        ]
        for row in _memory_rows(rows)
    ]
    return table


def against(rows: list[Row]) -> list[list[str]]:
    """WPipe beside PipeDream-2BW, and beside what its authors report."""
    table = [
        [
            *("model", "schedule", "times as fast", "published"),
            *("microbatches", "all memory / 2BW's", "published"),
            *("weights with versions / 2BW's", "target"),
        ]
    ]
    timed = {(row["case"], row["schedule"]): row for row in filter(_is_timed, rows)}
    held = {_key(row): row for row in _memory_rows(rows)}
    for (case, m, schedule), row in held.items():
        other = held.get((case, m, TWO_BUFFERED))
        if schedule not in WPIPES or other is None:
            continue
        own = timed.get((case, schedule), {})
        has_speed = own.get("num_microbatches") == m and "speedup" in own
        copies = _copies(row) / _copies(other)
        table.append(
            [
                case,
                f"`{schedule}`",
                f"{own['speedup']['of_medians']:.3f}" if has_speed else NONE,
                f"{PUBLISHED_SPEEDUP:g}" if has_speed else NONE,
                str(m),
                f"{_sum(row, 'peak_bytes') / _sum(other, 'peak_bytes'):.2f}",
                f"{PUBLISHED_MEMORY:g}",
                f"**{copies:.3f}**",
                f"{COPIES:g}",
            ]
        )
    return table


def _is_timed(row: Row) -> bool:
    return "step" in row


def _memory_rows(rows: list[Row]) -> Iterator[Row]:
    return (row for row in rows if "devices" in row)


def _key(row: Row) -> tuple[str, int, str]:
    return row["case"], row["num_microbatches"], row["schedule"]


def _sum(row: Row, name: str) -> int:
    return sum(device[name] for device in row["devices"])


def _copies(row: Row) -> int:
    return _sum(row, "weight_bytes") + _sum(row, "version_bytes")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
