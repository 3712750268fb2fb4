"""A ranking as an HTML page: candidates as points, the best step, and all numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from hocket.core.formats.costs_json import to_json
from hocket.draw import html
from hocket.draw.html import Facts, Figure, Table
from hocket.draw.html.page import html_card, template
from hocket.draw.quantity import byte_size, byte_unit, percent, short, ticks
from hocket.errors import PlanError
from hocket.planner.candidate import Outcome
from hocket.planner.ranking.ranking import RankedOutcomes, Row, joined
from hocket.planner.ranking.table import (
    RULE,
    Column,
    Paper,
    advice,
    choice,
    columns,
    explained,
    fitting,
    head,
    name_of,
    sentence,
    stale_columns,
    to_text,
)

# Draws every candidate as a point: samples per second over memory.
#
# samples/s │     ●  ●            │        filled   fits
#           │  ●    ●   ■         │  ○     hollow   does not fit
#           │ ●                   │    ▷   at the edge: further to the right
#           └─────────────────────┼────    square   plain data parallelism
#                               budget
#
# The axis ends a little beyond the budget: what misses by more stands at its edge.
# Colours are of kinds, since there are more schedules than colours that differ; the
# schedule is named when it is pointed at.


# Okabe and Ito's, which are distinct for every eye: https://jfly.uni-koeln.de/color/
KINDS: Final = {
    "plain data parallelism": "#999999",
    "one stage per device": "#0072B2",
    "several stages per device": "#E69F00",
    "old weights": "#CC79A7",
}
_FRAME: Final = {"width": 960, "height": 380, "radius": 4}
_LEFT, _RIGHT, _TOP, _FLOOR = 70.0, 770.0, 16.0, 334.0
_BEYOND: Final = 1.15  # times the budget: where the axis ends
_FAR: Final = 4.0  # times the most used: a larger budget is written, not drawn


def to_svg(ranking: RankedOutcomes) -> str:
    """Return the points, the budget and the legend as SVG."""
    budget = ranking.cluster.memory_bytes
    shown = ranking.outcomes
    taken = max(x.peak_bytes for x in shown)
    most_bytes = 1.05 * taken if budget > _FAR * taken else _BEYOND * budget
    most_samples = 1.08 * max(x.samples_per_s for x in shown)
    unit = byte_unit(most_bytes)

    def across(num_bytes: float) -> float:
        share = min(1.0, num_bytes / most_bytes)
        return round(_LEFT + share * (_RIGHT - _LEFT), 1)

    def up(samples_per_s: float) -> float:
        return round(_FLOOR - samples_per_s / most_samples * (_FLOOR - _TOP), 1)

    def point(outcome: Outcome) -> dict[str, Any]:
        return {
            "x": across(outcome.peak_bytes),
            "y": up(outcome.samples_per_s),
            "colour": KINDS[kind_of(outcome)],
            "fits": outcome.fits,
            "is_far": outcome.peak_bytes > most_bytes,
            "is_plain": outcome.candidate.is_data_parallel,
            "is_best": outcome is ranking.best,
            "words": _words(outcome, ranking),
        }

    found = {kind_of(x) for x in shown}
    lengths = ticks(most_bytes / unit.size, 8)
    return template("scatter.svg", __package__).render(
        _FRAME,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        floor=_FLOOR,
        rows=[(up(x), short(x)) for x in ticks(most_samples, 6)],
        columns=[(across(x * unit.size), short(x)) for x in lengths],
        unit=unit.name,
        budget=across(budget) if budget <= most_bytes else None,
        room=byte_size(budget),
        points=[point(x) for x in reversed(shown)],
        kinds={name: colour for name, colour in KINDS.items() if name in found},
    )


def kind_of(outcome: Outcome) -> str:
    """Return the kind of a candidate, a key of `KINDS`."""
    candidate = outcome.candidate
    if candidate.is_data_parallel:
        return "plain data parallelism"
    if outcome.delay:
        return "old weights"
    is_one = candidate.stages_per_device == 1
    return "one stage per device" if is_one else "several stages per device"


def _words(outcome: Outcome, ranking: RankedOutcomes) -> str:
    missing = "" if outcome.fits else f", {byte_size(outcome.missing_bytes)} too much"
    return (
        f"{sentence(outcome, ranking)}, bubble {percent(outcome.bubble_fraction)}, "
        f"{byte_size(outcome.peak_bytes)}{missing}"
    )


class Ranking(RankedOutcomes):
    """What a plan returns: it prints as a table, and notebooks show it."""

    def __str__(self) -> str:
        """Return the table, the choice and its picture, as plain text."""
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_card(self)


_MOST_ROWS: Final = 200
_CARD_WIDTH: Final = 92  # in columns of text
_TITLE: Final = "The best and its rivals"


def to_html(ranking: RankedOutcomes) -> str:
    """Return one self-contained page.

    Raises:
        PlanError: nothing fits, so that there is no step to draw.
    """
    best = ranking.best
    if best is None or ranking.timeline is None:
        raise PlanError("\n".join(choice(ranking)))
    every = joined(islice(ranking.fitting, _MOST_ROWS))
    return html.to_html(
        [("the best, one step, predicted", ranking.timeline)],
        f"Plan for {ranking.model}",
        summary=f"best: {sentence(best, ranking)}",
        samples_per_step=ranking.batch_size,
        leading=(_best_table(ranking),),
        figures=(
            Figure(
                "Every candidate: samples per second over peak memory per device",
                to_svg(ranking),
            ),
        ),
        tables=(
            _memory_table(best),
            _table(
                f"The best {len(every)} that fit", every, columns(ranking), best, False
            ),
            *_stale_tables(ranking),
        ),
        meanings=explained(),
        facts=(
            Facts(
                "What this rests on",
                text="\n".join((*head(ranking), "", *ranking.notes)),
            ),
        ),
    )


def to_card(ranking: RankedOutcomes) -> str:
    """Return what a notebook shows: the table, and a step of the best."""
    if ranking.best is None:
        return html_card(None, text="\n".join((*head(ranking), *choice(ranking))))
    text = "\n".join((*head(ranking), f"best: {sentence(ranking.best, ranking)}"))
    return html_card(
        ranking.timeline,
        title="the best, one step, predicted",
        text=text,
        table=_best_table(ranking, _CARD_WIDTH),
    )


def _best_table(ranking: RankedOutcomes, width: int | None = None) -> Table:
    """Return the table of the best and its rivals, with the rule of the choice."""
    rows, shown = ranking.rows(), columns(ranking)
    if width is not None:
        shown = fitting(shown, [row[0] for row in rows], width)
    note = "\n".join((RULE, *advice(ranking)))
    return replace(_table(_TITLE, rows, shown, ranking.best), note=note)


def _table(
    title: str,
    rows: Iterable[Row],
    shown: Sequence[Column],
    best: Outcome | None = None,
    is_open: bool = True,
) -> Table:
    """Return rows with these columns after their names; the best one is marked."""
    heads = (column.name for column in shown)
    texts = tuple(
        (
            ("> " if best in row else "") + name_of(row),
            *(column.cell(row[0]) or "–" for column in shown),
        )
        for row in rows
    )
    return Table(title, ("schedule", *heads), texts, is_open)


def _stale_tables(ranking: RankedOutcomes) -> Iterator[Table]:
    """Return the table of flush-free orders, if there are any."""
    behind = [(x,) for x in islice(ranking.fitting, _MOST_ROWS) if x.delay]
    shown = (*columns(ranking)[:3], *stale_columns(ranking))
    if behind:
        yield _table("Of these, the ones with old weights (*)", behind, shown)


_MEMORY: Final = {  # the columns of a device's memory, in bytes
    "weights": "weight_bytes",
    "older versions": "version_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
    "together": "total_bytes",
}


def _memory_table(best: Outcome) -> Table:
    """Return the memory of each device."""
    rows = tuple(
        (
            f"d{device}",
            *(byte_size(getattr(split, name)) for name in _MEMORY.values()),
            percent(split.total_bytes / best.budget_bytes),
        )
        for device, split in enumerate(best.memory)
    )
    title = f"Memory of the best, at {short(best.samples_per_s)} samples/s"
    return Table(title, ("device", *_MEMORY, "of the memory"), rows)


# A ranking as the command shows it: text, JSON and a page.
@dataclass(frozen=True, slots=True)
class Shown:
    """A ranking as it is shown.

    Args:
        text: the table, the choice, the picture.
        document: all outcomes, as JSON has them.
        page: HTML; empty where none was wanted.
        costs: those of the best pipeline, as JSON; empty without one.
        simulation: the command that simulates it with these costs, but for their file.
    """

    text: str
    document: dict[str, Any]
    page: str
    costs: str = ""
    simulation: str = ""

    @classmethod
    def of(cls, ranking: RankedOutcomes, paper: Paper) -> Shown:
        """Draw it.

        Raises:
            PlanError: a page was wanted, and nothing fits.
        """
        text = to_text(ranking, paper)
        page = to_html(ranking) if paper.has_page else ""
        document = ranking.to_json()
        if ranking.costs is None or ranking.pipeline is None:
            return cls(text, document, page)
        candidate = ranking.pipeline.candidate
        num_shards = candidate.num_shards
        shards = f" --shards {num_shards}" if num_shards > 1 else ""
        simulation = (
            f"hocket simulate {candidate.schedule} --devices {candidate.num_devices} "
            f"--stages-per-device {candidate.stages_per_device} "
            f"--microbatches {candidate.num_microbatches} "
            f"--replicas {candidate.num_replicas}{shards} --costs"
        )
        return cls(text, document, page, to_json(ranking.costs), simulation)
