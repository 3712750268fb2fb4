"""Draws every candidate as a point: samples per second over memory.

samples/s │     ●  ●            │        filled   fits
          │  ●    ●   ■         │  ○     hollow   does not fit
          │ ●                   │    ▷   at the edge: further to the right
          └─────────────────────┼────    square   plain data parallelism
                              budget

The axis ends a little beyond the budget: what misses by more stands at its edge.
Colours are of kinds, since there are more schedules than colours that differ; the
schedule is named when it is pointed at.
"""

from __future__ import annotations

from typing import Any, Final

from hocket.draw.html.page import template
from hocket.draw.quantity import byte_size, byte_unit, percent, short, ticks
from hocket.planner.candidate import Outcome
from hocket.planner.ranking.ranking import RankedOutcomes

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
    candidate = outcome.candidate
    size = candidate.samples_of_microbatch(ranking.batch_size)
    recompute = ", recomputes" if candidate.recomputes else ""
    missing = "" if outcome.fits else f", {byte_size(outcome.missing_bytes)} too much"
    return (
        f"{candidate.schedule}: {candidate.num_stages} stages x "
        f"{candidate.num_replicas} replicas, {candidate.num_microbatches} microbatches "
        f"of {size}{recompute}: {short(outcome.samples_per_s)} samples/s, bubble "
        f"{percent(outcome.bubble_fraction)}, {byte_size(outcome.peak_bytes)}{missing}"
    )
