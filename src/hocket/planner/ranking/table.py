"""Prints a ranking: its columns, what does not fit, the choice, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, Final

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
from hocket.planner.candidate import DATA_PARALLEL, ONE_DEVICE, REVERSE_FIRST_K, Outcome
from hocket.planner.ranking.ranking import NUM_ROWS, RankedOutcomes, Row, joined

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


GAP: Final = 1  # spaces between two columns
NAME_WIDTH: Final = 16  # of the first column: the longest name of one schedule


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Args:
        head: its name, in one line or two.
        cell: writes the text of an outcome.
        place: columns of a lower place are kept longer where width is short.
    """

    head: str
    cell: Callable[[Outcome], str]
    place: int = 0

    def width(self, outcomes: Iterable[Outcome]) -> int:
        """Return the characters that its texts need."""
        texts = [*self.head.split("\n"), *map(self.cell, outcomes)]
        return max(map(len, texts))


def columns(ranking: RankedOutcomes) -> tuple[Column, ...]:
    """Return all columns after the name, as they stand in the table."""
    unit = unit_of(ranking)

    def microbatches(outcome: Outcome) -> str:
        candidate = outcome.candidate
        size = candidate.samples_of_microbatch(ranking.batch_size)
        return f"{candidate.num_microbatches} of {size}"

    def kind(name: str, place: int, *parts: str) -> Column:
        def cell(outcome: Outcome) -> str:
            return unit.number(sum(getattr(outcome.fullest, part) for part in parts))

        return Column(name, cell, place)

    return (
        Column("layout", lambda x: str(x.candidate.layout), 1),
        Column("stages", lambda x: str(x.candidate.num_stages), 3),
        Column("micro-\nbatches", microbatches, 2),
        Column("samples\nper s", lambda x: short(x.samples_per_s), 0),
        Column("bubble", lambda x: percent(x.bubble_fraction), 4),
        Column("limited\nby", ranking.limit_of, 5),
        Column(f"peak\n{unit.name}", lambda x: unit.number(x.peak_bytes), 6),
        Column("gap", lambda x: percent(x.gap), 7),
        Column("messages", lambda x: byte_size(x.message_bytes), 8),
        kind("weights", 9, "weight_bytes", "version_bytes"),
        kind("gradients", 10, "gradient_bytes"),
        kind("optimizer", 11, "optimizer_bytes"),
        kind("activations", 12, "activation_bytes"),
    )


def fitting(
    columns: Sequence[Column], outcomes: Sequence[Outcome], width: int
) -> tuple[Column, ...]:
    """Return the columns that fit beside the name, in their order.

    Args:
        columns: all columns.
        outcomes: the rows.
        width: the characters of a line.
    """
    left = width - NAME_WIDTH - 2
    kept = set()
    for column in sorted(columns, key=lambda column: column.place):
        left -= GAP + column.width(outcomes)
        if left < 0:
            break
        kept.add(column.head)
    return tuple(column for column in columns if column.head in kept)


def name_of(row: Row) -> str:
    """Return the names of a row: those of equal outcomes are joined."""
    marks = ("*" if outcome.delay else "" for outcome in row)
    names = (outcome.candidate.schedule for outcome in row)
    joined = " = ".join(map("".join, zip(names, marks, strict=True)))
    return joined + (" (recompute)" if row[0].candidate.recomputes else "")


def unit_of(ranking: RankedOutcomes) -> Unit:
    """Return the unit in which the best outcome's memory reads best."""
    return byte_unit(ranking.outcomes[0].peak_bytes)


def stale_columns(ranking: RankedOutcomes) -> tuple[Column, ...]:
    """Return the columns for orders with stale weights; bytes: the fullest device's."""
    unit = unit_of(ranking)
    return (
        Column("delay", lambda x: str(x.delay)),
        Column("versions of each stage", lambda x: _runs(x.num_versions)),
        Column(f"newest {unit.name}", lambda x: unit.number(x.fullest.weight_bytes)),
        Column(f"older {unit.name}", lambda x: unit.number(x.fullest.version_bytes)),
        Column("copies", _copies),
    )


def _copies(outcome: Outcome) -> str:
    """Format how many copies of its weights the fullest device holds."""
    newest, older = outcome.fullest.weight_bytes, outcome.fullest.version_bytes
    return f"{1 + older / newest if newest else 1:.2f}"


def _runs(numbers: tuple[int, ...]) -> str:
    """Format runs of equal numbers: `2 x 4, 1 x 4`."""
    return ", ".join(f"{key} x {len(list(of))}" for key, of in groupby(numbers))


NUM_MISFITS: Final = 3
RULE: Final = (
    "> best: of all within 1 % of the fastest, the simplest: plain data parallelism, "
    "then fewer stages, no recomputation, less memory"
)
_WIDE: Final = 110  # columns from which the table of old weights has all of its own
_MOST_LANES: Final = 16  # of a picture in text


@dataclass(frozen=True, slots=True)
class Paper:
    """How a ranking is to be shown.

    Args:
        num_rows: the table's rows.
        width: columns of text.
        is_terminal: whether colours can be seen.
        has_page: whether an HTML page is wanted.
        has_all: whether all rows and columns are wanted, however wide they are.
    """

    num_rows: int = NUM_ROWS
    width: int = 140
    is_terminal: bool = False
    has_page: bool = False
    has_all: bool = False


def to_text(ranking: RankedOutcomes, paper: Paper | None = None) -> str:
    """Return everything as plain text."""
    from rich.console import Console

    paper, page = paper or Paper(), StringIO()
    console = Console(file=page, width=paper.width, force_terminal=paper.is_terminal)
    _show(ranking, console, paper.num_rows, has_all=paper.has_all)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def _show(
    ranking: RankedOutcomes, console: Console, num_rows: int, *, has_all: bool
) -> None:
    """Print a ranking to a console."""
    _print(console, head(ranking))
    console.print()
    rows = joined(ranking.fitting) if has_all else ranking.rows(num_rows)
    width = console.width
    if has_all:  # a console would cut what is wider
        console.width = max(width, 400)
    if rows:
        console.print(_table(ranking, rows, console.width))
    misfits = list(ranking.closest(NUM_MISFITS))
    if misfits:
        console.print()
        console.print(_misfit_table(misfits, ranking))
    shown = [row[0] for row in rows]
    behind = [outcome for outcome in (*shown, *misfits) if outcome.delay]
    if behind:
        console.print()
        console.print(_stale_table(behind, ranking, console.width))
    console.width = width
    console.print()
    _print(console, choice(ranking))
    line = ranking.timeline
    if line is not None and len(line.schedule.lanes) <= _MOST_LANES:
        console.print()
        console.file.write(timeline_text(line, width=max(60, width)) + "\n")


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def choice(ranking: RankedOutcomes) -> Iterator[str]:
    """Yield the choice, the rule that it follows from, and what it beats."""
    best = ranking.best
    if best is None:
        yield from _nothing_fits(ranking)
        return
    yield RULE
    yield f"best: {sentence(best, ranking)}"
    yield from advice(ranking)
    yield from ranking.notes


def advice(ranking: RankedOutcomes) -> Iterator[str]:
    """Yield how the choice compares with the others, a short line each."""
    best, fastest = ranking.best, ranking.fastest
    if best is None or fastest is None:
        return
    if fastest is not best and fastest.samples_per_s > best.samples_per_s:
        gain = 100 * (fastest.samples_per_s / best.samples_per_s - 1)
        yield f"the fastest: {_brief(fastest, ranking)}, {gain:.1f} % faster"
    if best.candidate.is_data_parallel:
        rival, name = ranking.best_pipeline, "the best pipeline"
        before = f"you need no pipeline: {DATA_PARALLEL[best.candidate.schedule]}; "
    else:
        rival, name = ranking.best_data_parallel, "the best plain data parallelism"
        before = ""
    if rival is None:
        yield f"{before}{name}: none fits"
    else:
        share = rival.samples_per_s / best.samples_per_s
        sizes = (byte_size(x.peak_bytes) for x in (rival, best))
        yield (
            f"{before}{name}: {_brief(rival, ranking)}, {short(share)} times as fast, "
            f"{' in place of '.join(sizes)}"
        )
        num = ranking.cluster.num_devices
        if rival.candidate.schedule == ONE_DEVICE and 1 / share < num / 2:
            yield (
                f"{num} devices are {short(1 / share)} times as fast as one: take one, "
                "unless that is worth them"
            )
    reversed_best = ranking.best_of(REVERSE_FIRST_K)
    if reversed_best is not None and reversed_best not in (best, rival, fastest):
        yield f"reverse first-k: {_brief(reversed_best, ranking)}"


def head(ranking: RankedOutcomes) -> Iterator[str]:
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


def _new_table(names: Iterable[str], *, name_width: int | None = None) -> Table:
    """Return a table without rows; only the first column is aligned to the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for number, name in enumerate(names):
        is_first = not number
        table.add_column(
            name,
            justify="left" if is_first else "right",
            no_wrap=not is_first,
            vertical="bottom" if is_first else "top",
            width=name_width if is_first else None,
        )
    return table


def _table(ranking: RankedOutcomes, rows: Sequence[Row], width: int) -> Table:
    outcomes = [row[0] for row in rows]
    kept = fitting(columns(ranking), outcomes, width)
    taken = sum(GAP + column.width(outcomes) for column in kept)
    names = [name_of(row) for row in rows]
    name_width = min(max(map(len, names)), max(NAME_WIDTH, width - taken - 2))
    heads = (column.head for column in kept)
    table = _new_table(("  schedule", *heads), name_width=name_width + 2)
    for row, name in zip(rows, names, strict=True):
        is_best = ranking.best in row
        mark = "> " if is_best else "  "
        text = mark + "\n  ".join(_wrapped(name, name_width))
        table.add_row(
            text, *_cells(row[0], kept), style="bold green" if is_best else None
        )
    return table


def _wrapped(name: str, width: int) -> list[str]:
    """Cut joined names into lines, at their spaces."""
    lines = [""]
    for word in name.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _cells(outcome: Outcome, shown: Sequence[Column]) -> list[str]:
    return [column.cell(outcome) for column in shown]


def _stale_table(outcomes: list[Outcome], ranking: RankedOutcomes, width: int) -> Table:
    """Return the table of weight versions of flush-free orders."""
    own = columns(ranking)[: 3 if width >= _WIDE else 1]
    shown = (*own, *stale_columns(ranking))
    heads = (column.head.replace("-\n", "") for column in shown)
    names = (head.replace(" of each", "\nof each") for head in heads)
    table = _new_table(("* old weights", *names), name_width=NAME_WIDTH)
    for outcome in outcomes:
        table.add_row(outcome.candidate.schedule, *_cells(outcome, shown))
    return table


def _misfit_table(misfits: list[Outcome], ranking: RankedOutcomes) -> Table:
    unit = unit_of(ranking)
    shown = (
        *columns(ranking)[:3],
        Column(f"missing\n{unit.name}", lambda x: unit.number(x.missing_bytes)),
        Column(f"peak\n{unit.name}", lambda x: unit.number(x.peak_bytes)),
    )
    table = _new_table(("does not fit", *(column.head for column in shown)))
    for outcome in misfits:
        table.add_row(name_of((outcome,)), *_cells(outcome, shown))
    return table


def _brief(outcome: Outcome, ranking: RankedOutcomes) -> str:
    """Name an outcome as its row does: `zb-h1 4x2, 8 of 4, 512 samples/s`."""
    layout, _, microbatches, speed, *_ = _cells(outcome, columns(ranking))
    name = f"{outcome.candidate.schedule} {layout}, {microbatches}"
    return f"{name}{_bucket_sentence(outcome)}, {speed} samples/s"


def sentence(outcome: Outcome, ranking: RankedOutcomes) -> str:
    """Describe an outcome: its shape, its speed, the seconds of a step."""
    candidate = outcome.candidate
    v = candidate.stages_per_device
    per_device = f" ({v} per device)" if v > 1 else ""
    size = candidate.samples_of_microbatch(ranking.batch_size)
    microbatches = counted(candidate.num_microbatches, "microbatch")
    shards = f" of {candidate.num_shards} shards" if candidate.num_shards > 1 else ""
    recomputes = ", recomputing activations" if candidate.recomputes else ""
    shape = (
        ""
        if candidate.is_data_parallel
        else f"{counted(candidate.num_stages, 'stage')}{per_device} x "
    )
    return (
        f"{candidate.schedule}, {shape}"
        f"{counted(candidate.num_replicas, 'replica')}{shards}, "
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


def _nothing_fits(ranking: RankedOutcomes) -> Iterator[str]:
    if not ranking.too_large:
        yield "Only orders with delayed updates fit; none is taken by itself."
        return
    least = ranking.too_large[0]
    candidate = least.candidate
    missing, peak = byte_size(least.missing_bytes), byte_size(least.peak_bytes)
    yield (
        f"Nothing fits. {candidate.schedule} {candidate.layout} misses least: "
        f"{missing} of {peak} per device. "
        "Use more devices, devices with more memory, a smaller batch, or an optimizer "
        "with less state."
    )
