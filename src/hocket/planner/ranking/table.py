"""Prints a ranking: the table, what does not fit, the choice, and its picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import groupby
from typing import Final

from rich.console import Console
from rich.table import Table

from hocket.draw.quantity import (
    Unit,
    byte_size,
    byte_unit,
    counted,
    percent,
    seconds,
    short,
)
from hocket.draw.text import to_text as timeline_text
from hocket.planner.candidate import DATA_PARALLEL, REVERSE_FIRST_K, Outcome
from hocket.planner.ranking.ranking import Ranking

NUM_ROWS: Final = 12
NUM_MISFITS: Final = 5
_WIDTH: Final = 140


def columns(ranking: Ranking) -> tuple[str, ...]:
    """Return the names of a row's cells, with the unit of memory."""
    unit = _unit(ranking).name
    return (
        "schedule",
        "stages",
        "replicas",
        "microbatches",
        "recompute",
        "samples/s",
        "bubble",
        "gap",
        f"peak {unit}",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "messages",
    )


def to_text(
    ranking: Ranking,
    *,
    num_rows: int = NUM_ROWS,
    width: int = _WIDTH,
    is_terminal: bool = False,
) -> str:
    """Return everything as plain text.

    Args:
        ranking: what to show.
        num_rows: rows of the best; then the best of each further schedule.
        width: the most columns.
        is_terminal: whether to set the table's styles for a terminal.
    """
    page = StringIO()
    console = Console(file=page, width=width, force_terminal=is_terminal)
    _show(ranking, console, num_rows)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def _show(ranking: Ranking, console: Console, num_rows: int) -> None:
    """Print a ranking to a console."""
    for line in head(ranking):
        console.print(line, highlight=False, markup=False)
    console.print()
    shown = list(ranking.shown(num_rows))
    if shown:
        console.print(_table(ranking, shown))
    misfits = list(ranking.closest(NUM_MISFITS))
    if misfits:
        console.print()
        console.print(_misfit_table(misfits, ranking))
    behind = [outcome for outcome in (*shown, *misfits) if outcome.delay]
    if behind:
        console.print()
        console.print(_stale_table(behind, ranking))
    console.print()
    for line in choice(ranking):
        console.print(line, highlight=False, markup=False)
    if ranking.timeline is not None:
        console.print()
        picture = timeline_text(ranking.timeline, width=console.width)
        console.file.write(picture + "\n")


def choice(ranking: Ranking) -> Iterator[str]:
    """Return the choice and the reasons, a sentence each."""
    best = ranking.best
    if best is None:
        yield from _nothing_fits(ranking)
        return
    yield f"best: {_sentence(best, ranking)}"
    fastest = ranking.fastest
    if fastest is not None and fastest.candidate.schedule != best.candidate.schedule:
        gain = fastest.samples_per_s / best.samples_per_s - 1
        yield (
            f"The fastest, {_sentence(fastest, ranking)}, is {short(100 * gain)} % "
            "faster: of what is that close, the simplest is best."
        )
    if best.candidate.is_data_parallel:
        yield _against(best, ranking.best_pipeline, "the best pipeline", "pipeline")
        yield (
            f"Plain data parallelism is the choice here: "
            f"{DATA_PARALLEL[best.candidate.schedule]}."
        )
    else:
        rival = ranking.best_data_parallel
        yield _against(best, rival, "the best plain data parallelism", "such way")
    reversed_best = ranking.best_of(REVERSE_FIRST_K)
    if reversed_best is not None and reversed_best is not best:
        yield f"Reverse first-k at its best: {_sentence(reversed_best, ranking)}."
    yield from ranking.notes


def head(ranking: Ranking) -> Iterator[str]:
    """Return the question and its assumptions, a line each."""
    cluster = ranking.cluster
    where = f"{cluster.num_devices} x {cluster.name}"
    if cluster.num_nodes > 1 and cluster.network is not None:
        where += f" in {counted(cluster.num_nodes, 'node')} ({cluster.network.name})"
    yield (
        f"{ranking.model}, {counted(ranking.batch_size, 'sample')} per step, on "
        f"{where}, {cluster.link.name}, {byte_size(cluster.memory_bytes)} each"
    )
    yield f"costs {ranking.how}"
    left_out = (
        (ranking.num_beaten, "cannot be among the best and were not"),
        (ranking.num_too_long, "have too many ops and were not"),
    )
    parts = [f"{number:,} {why}" for number, why in left_out if number]
    yield f"{len(ranking.outcomes):,} candidates simulated" + "".join(
        f"; {part}" for part in parts
    )


def _new_table(names: Iterable[str]) -> Table:
    """Return a table without rows; only the first column is aligned to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _table(ranking: Ranking, outcomes: Iterable[Outcome]) -> Table:
    table = _new_table(columns(ranking))
    for outcome in outcomes:
        style = "bold green" if outcome is ranking.best else None
        table.add_row(*cells(outcome, ranking), style=style)
    return table


def cells(outcome: Outcome, ranking: Ranking) -> Iterator[str]:
    """Return a row of the table, one text per name of `columns`."""
    candidate, split, unit = outcome.candidate, outcome.fullest, _unit(ranking)
    yield candidate.schedule + ("*" if outcome.delay else "")
    v = candidate.stages_per_device
    yield f"{candidate.num_devices}" + (f" x {v}" if v > 1 else "")
    yield str(candidate.num_replicas)
    size = candidate.samples_of_microbatch(ranking.batch_size)
    yield f"{candidate.num_microbatches} of {size}"
    yield "all" if candidate.recomputes else "none"
    yield short(outcome.samples_per_s)
    yield percent(outcome.bubble_fraction)
    yield percent(outcome.gap)
    yield unit.number(outcome.peak_bytes)
    yield unit.number(split.weight_bytes + split.version_bytes)
    yield unit.number(split.gradient_bytes)
    yield unit.number(split.update_bytes)
    yield unit.number(split.activation_bytes)
    yield byte_size(outcome.message_bytes)


def _unit(ranking: Ranking) -> Unit:
    """Return the unit in which the best outcome's memory reads best."""
    return byte_unit(ranking.outcomes[0].peak_bytes)


def _stale_table(outcomes: list[Outcome], ranking: Ranking) -> Table:
    """Return the table of flush-free orders: their delays and memory."""
    names = "* old weights", *columns(ranking)[1:5], *stale_columns(ranking)
    table = _new_table(names)
    for outcome in outcomes:
        row = [*cells(outcome, ranking)]
        table.add_row(
            outcome.candidate.schedule, *row[1:5], *stale_cells(outcome, ranking)
        )
    return table


def stale_columns(ranking: Ranking) -> tuple[str, ...]:
    """Return the column names for orders with stale weights."""
    unit = _unit(ranking).name
    is_corrected = ranking.correction != "none"
    return (
        "delay",
        "versions of each stage",
        f"newest {unit}",
        f"older {unit}",
        "copies",
        *((f"{ranking.correction} {unit}",) if is_corrected else ()),
    )


def stale_cells(outcome: Outcome, ranking: Ranking) -> Iterator[str]:
    """Return a text per name of `stale_columns`, for the fullest device."""
    split, unit = outcome.fullest, _unit(ranking)
    yield str(outcome.delay)
    yield _runs(outcome.num_versions)
    yield unit.number(split.weight_bytes)
    yield unit.number(split.version_bytes)
    copies = 1 + split.version_bytes / split.weight_bytes if split.weight_bytes else 1
    yield f"{copies:.2f}"
    if ranking.correction != "none":
        yield unit.number(split.correction_bytes)


def _runs(numbers: tuple[int, ...]) -> str:
    """Format runs of equal numbers: `2 x 4, 1 x 4`."""
    return ", ".join(f"{key} x {len(list(of))}" for key, of in groupby(numbers))


def _misfit_table(misfits: list[Outcome], ranking: Ranking) -> Table:
    all_ = columns(ranking)
    table = _new_table(("does not fit", *all_[1:5], "missing", *all_[8:13]))
    for outcome in misfits:
        row = [*cells(outcome, ranking)]
        missing = _unit(ranking).number(outcome.missing_bytes)
        table.add_row(*row[:5], missing, *row[8:13])
    return table


def _sentence(outcome: Outcome, ranking: Ranking) -> str:
    candidate = outcome.candidate
    v = candidate.stages_per_device
    per_device = f" ({v} per device)" if v > 1 else ""
    size = candidate.samples_of_microbatch(ranking.batch_size)
    microbatches = counted(candidate.num_microbatches, "microbatch")
    recomputes = ", recomputing activations" if candidate.recomputes else ""
    shape = (
        ""
        if candidate.is_data_parallel
        else f"{counted(candidate.num_stages, 'stage')}{per_device} x "
    )
    return (
        f"{candidate.schedule}, {shape}{counted(candidate.num_replicas, 'replica')}, "
        f"{microbatches} of {size}{recomputes}{_bucket_sentence(outcome)}: "
        f"{short(outcome.samples_per_s)} "
        f"samples/s, a step of {seconds(outcome.step_s)}"
    )


def _bucket_sentence(outcome: Outcome) -> str:
    """Return the buckets of reverse first-k: `k = 3 of 6 buckets of 1 to 9 MB`."""
    if outcome.buckets is None:
        return ""
    sizes = outcome.buckets.gradient_bytes
    low, high = byte_size(min(sizes)), byte_size(max(sizes))
    span = low if low == high else f"{low} to {high}"
    return f", k = {outcome.buckets.k} of {counted(len(sizes), 'bucket')} of {span}"


def _against(best: Outcome, rival: Outcome | None, name: str, kind: str) -> str:
    if rival is None:
        return (
            f"No {kind} fits."
            if kind == "pipeline"
            else f"{name.capitalize()}: none fits."
        )
    share = rival.samples_per_s / best.samples_per_s
    return (
        f"{name.capitalize()}, {rival.candidate.schedule}, reaches "
        f"{short(rival.samples_per_s)} samples/s, {short(share)} times as many."
    )


def _nothing_fits(ranking: Ranking) -> Iterator[str]:
    if not ranking.too_large:
        yield "Only orders with delayed updates fit; none is taken by itself."
        return
    least = ranking.too_large[0]
    candidate = least.candidate
    devices = counted(candidate.num_devices, "device")
    replicas = counted(candidate.num_replicas, "replica")
    missing, peak = byte_size(least.missing_bytes), byte_size(least.peak_bytes)
    yield (
        f"Nothing fits. {candidate.schedule} on {devices} x {replicas} misses least: "
        f"{missing} of {peak} per device. "
        "Use more devices, devices with more memory, a smaller batch, or an optimizer "
        "with less state."
    )
