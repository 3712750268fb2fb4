"""Prints a ranking: its columns, what does not fit, the choice, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from textwrap import wrap
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
from hocket.draw.text import legend
from hocket.draw.text import to_text as timeline_text
from hocket.planner.candidate import DATA_PARALLEL, FSDP, HSDP, ONE_DEVICE, Outcome
from hocket.planner.ranking.ranking import NUM_ROWS, RankedOutcomes, Row, joined

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hocket.core.timelines.timeline import Timeline


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

    @property
    def name(self) -> str:
        """Its name in one line."""
        return self.head.replace("-\n", "").replace("\n", " ")

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
        Column("versions\nof each stage", lambda x: _runs(x.num_versions)),
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


_MEANINGS: Final = {
    "schedule": "order of work (hocket draw NAME); layout 1x...: data parallelism",
    "layout": "devices of one pipeline x replicas, x shards of each stage if any",
    "stages": "parts that one copy of the model is cut into",
    "microbatches": "2 of 16: the samples of a pipeline, in 2 parts of 16 samples",
    "bubble": "share of a step in which devices have nothing to do",
    "gap": "how much longer a step is than any order of these stages must take",
    "messages": "bytes from device to device, per step and pipeline",
    "delay": "how many updates old the weights are that a microbatch reads",
}
LIMITS: Final = {
    "work": "devices hardly wait",
    "bubble": "the pipeline fills and drains, or the order makes devices wait",
    "messages": "devices wait for what other ones send",
    "reduction": "devices wait for sums of gradients over replicas",
    "imbalance": "stages take unequally long",
    "host": "Python starts ops late",
    "memory": "it fits only with recomputation",
}
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
        console.print(_row_table(ranking, rows, console.width))
        console.print()
        _print(console, _legend(ranking, rows, console.width))
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
    line, best = ranking.timeline, ranking.best
    if line and best and len(line.schedule.lanes) <= _MOST_LANES:
        console.print()
        _print(console, [_picture_legend(line, best)])
        console.file.write(timeline_text(line, width=max(60, width)) + "\n")


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def explained(limits: Container[str] = LIMITS) -> dict[str, str]:
    """Return what each column is; of what limits a step, these words."""
    words = (f"{x} ({text})" for x, text in LIMITS.items() if x in limits)
    return {**_MEANINGS, "limited by": f"what makes a step long: {', '.join(words)}"}


def _legend(ranking: RankedOutcomes, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield what each column of the table is, a line each."""
    outcomes = [row[0] for row in rows]
    limits = {ranking.limit_of(outcome) for outcome in outcomes}
    meanings = explained(limits)
    kept = fitting(columns(ranking), outcomes, width)
    for name in ("schedule", *(column.name for column in kept)):
        if name in meanings:
            text = f"{name:<14}{meanings[name]}"
            yield from wrap(text, width, subsequent_indent=" " * 14)


def _picture_legend(line: Timeline, best: Outcome) -> str:
    """Return what the letters and numbers of the picture of a step are."""
    is_step = best.candidate.schedule in (FSDP, HSDP)
    has_steps = is_step and line.schedule.program.num_steps > 1
    more = "each step: a microbatch; " if has_steps else ""
    return f"the best on each device (d0, ...): {more}{legend([line])}"


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
    if best.candidate.is_data_parallel:
        rival, name = ranking.best_pipeline, "the best pipeline"
        yield f"you need no pipeline: {DATA_PARALLEL[best.candidate.schedule]}"
    else:
        rival, name = ranking.best_data_parallel, "the best plain data parallelism"
    gain = fastest.samples_per_s / best.samples_per_s - 1
    if fastest is not rival and (more := percent(gain)) != "0 %":
        yield f"the fastest: {sentence(fastest, ranking)}; {more} faster"
    if rival is None:
        yield f"{name}: none fits"
    else:
        share = rival.samples_per_s / best.samples_per_s
        sizes = (byte_size(x.peak_bytes) for x in (rival, best))
        yield (
            f"{name}: {sentence(rival, ranking)}; {short(share)} times as fast, with "
            f"{' in place of '.join(sizes)} per device"
        )
        num = ranking.cluster.num_devices
        if rival.candidate.schedule == ONE_DEVICE and 1 / share < num / 2:
            yield (
                f"{num} devices are {short(1 / share)} times as fast as one: take one, "
                "unless that is worth them"
            )


def head(ranking: RankedOutcomes) -> Iterator[str]:
    """Return the question and its assumptions, a line each."""
    cluster = ranking.cluster
    where, memory = "", byte_size(cluster.memory_bytes)
    if cluster.num_nodes > 1 and cluster.network is not None:
        where = f", in {counted(cluster.num_nodes, 'node')} ({cluster.network.name})"
    yield f"{ranking.model}, {counted(ranking.batch_size, 'sample')} per step"
    yield f"devices: {cluster.num_devices} x {cluster.name}, {memory} each{where}"
    yield f"links: {cluster.link.name}"
    yield f"costs: {ranking.how}"
    left_out = (
        (ranking.num_beaten, "others cannot be among the best"),
        (ranking.num_too_long, "others have too many ops"),
    )
    parts = [f"{number:,} {why}" for number, why in left_out if number]
    yield "; ".join((f"{len(ranking.outcomes):,} ways to train simulated", *parts))


def _table(
    first: str,
    shown: Sequence[Column],
    rows: Iterable[tuple[str, Outcome]],
    name_width: int | None = None,
) -> Table:
    """Return rows with these columns after their names; only names stand left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column(first, vertical="bottom", width=name_width)
    for column in shown:
        table.add_column(column.head, justify="right", no_wrap=True)
    for name, outcome in rows:
        style = "bold green" if name.startswith("> ") else None
        table.add_row(name, *(column.cell(outcome) for column in shown), style=style)
    return table


def _row_table(ranking: RankedOutcomes, rows: Sequence[Row], width: int) -> Table:
    outcomes = [row[0] for row in rows]
    kept = fitting(columns(ranking), outcomes, width)
    taken = sum(GAP + column.width(outcomes) for column in kept)
    names = [name_of(row) for row in rows]
    name_width = min(max(map(len, names)), max(NAME_WIDTH, width - taken - 2))
    texts = (
        ("> " if ranking.best in row else "  ")
        + "\n  ".join(wrap(name, name_width, break_on_hyphens=False))
        for row, name in zip(rows, names, strict=True)
    )
    named = zip(texts, outcomes, strict=True)
    return _table("  schedule", kept, named, name_width + 2)


def _stale_table(outcomes: list[Outcome], ranking: RankedOutcomes, width: int) -> Table:
    """Return the table of weight versions of flush-free orders."""
    own = columns(ranking)[: 3 if width >= _WIDE else 1]
    rows = ((outcome.candidate.schedule, outcome) for outcome in outcomes)
    return _table("* old weights", (*own, *stale_columns(ranking)), rows, NAME_WIDTH)


def _misfit_table(misfits: list[Outcome], ranking: RankedOutcomes) -> Table:
    unit = unit_of(ranking)
    shown = (
        *columns(ranking)[:3],
        Column(f"missing\n{unit.name}", lambda x: unit.number(x.missing_bytes)),
        Column(f"peak\n{unit.name}", lambda x: unit.number(x.peak_bytes)),
    )
    return _table("does not fit", shown, ((name_of((x,)), x) for x in misfits))


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
    """Return the buckets of reverse first-k: `the first 3 of 6 ... of 1 to 9 MB`."""
    if outcome.buckets is None:
        return ""
    sizes = outcome.buckets.gradient_bytes
    low, high = byte_size(min(sizes)), byte_size(max(sizes))
    span = low if low == high else f"{low} to {high}"
    num = counted(len(sizes), "gradient bucket")
    return f", the first {outcome.buckets.k} of {num} ({span}) computed last"


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
