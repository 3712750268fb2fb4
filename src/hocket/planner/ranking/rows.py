"""Choose the rows of a plan's table: the best, its rivals, and equals as one row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from hocket.draw.quantity import percent, short
from hocket.planner.candidate import Outcome

Row: TypeAlias = tuple[Outcome, ...]  # equal but for the name of the schedule

_NEIGHBOURS: Final = 1  # further rows of a schedule that has a row already


def joined(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return rows: outcomes that read the same but for their schedules are one."""
    rows: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(_numbers(outcome), []).append(outcome)
    return [tuple(row) for row in rows.values()]


def chosen(
    outcomes: Iterable[Outcome], num_rows: int, wanted: Iterable[Outcome | None]
) -> list[Row]:
    """Return at most so many rows, the fastest first.

    They are the best of each schedule, and its next best with another layout, if that
    is faster than the best of others; and always those that are wanted.

    Args:
        outcomes: what fits, the fastest first.
        num_rows: the most rows.
        wanted: outcomes that must have a row, such as the choice.
    """
    rows = joined(outcomes)
    asked = [outcome for outcome in wanted if outcome is not None]
    is_asked = [any(outcome in row for outcome in asked) for row in rows]
    taken = _first_of_each(rows, num_rows - sum(is_asked), is_asked)
    return [row for row, is_taken in zip(rows, taken, strict=True) if is_taken]


def _first_of_each(rows: list[Row], num_rows: int, is_asked: list[bool]) -> list[bool]:
    """Return which rows are taken: all that are asked for, and `num_rows` others."""
    seen: dict[str, int] = {}
    shapes: set[tuple[object, ...]] = set()
    taken = []
    for row, is_due in zip(rows, is_asked, strict=True):
        names = [outcome.candidate.schedule for outcome in row]
        shape = _shape(row[0])
        is_new = any(seen.get(name, 0) <= _NEIGHBOURS for name in names) and any(
            (name, shape) not in shapes for name in names
        )
        is_taken = is_due or (is_new and num_rows > 0)
        num_rows -= is_taken and not is_due
        if is_taken:
            for name in names:
                seen[name] = seen.get(name, 0) + 1
                shapes.add((name, shape))
        taken.append(is_taken)
    return taken


def _shape(outcome: Outcome) -> tuple[object, ...]:
    candidate = outcome.candidate
    return candidate.num_devices, candidate.stages_per_device


def _numbers(outcome: Outcome) -> tuple[object, ...]:
    """Return what a row shows of an outcome, besides the schedule's name."""
    candidate = outcome.candidate
    return (
        candidate.num_devices,
        candidate.num_replicas,
        candidate.stages_per_device,
        candidate.num_microbatches,
        candidate.recomputes,
        candidate.is_data_parallel and candidate.schedule,
        short(outcome.samples_per_s),
        percent(outcome.bubble_fraction),
        short(outcome.peak_bytes),
        outcome.delay,
    )
