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

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from hocket.draw.quantity import byte_size, byte_unit, percent, short, ticks
from hocket.planner.candidate import Outcome
from hocket.planner.ranking.ranking import Ranking

# Okabe and Ito's, which are distinct for every eye: https://jfly.uni-koeln.de/color/
KINDS: Final = {
    "plain data parallelism": "#999999",
    "one stage per device": "#0072B2",
    "several stages per device": "#E69F00",
    "old weights": "#CC79A7",
}
_WIDTH: Final = 960.0
_HEIGHT: Final = 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 190.0, 16.0, 46.0
_BEYOND: Final = 1.15  # times the budget: where the axis ends
_FAR: Final = 4.0  # times the most used: a larger budget is written, not drawn
_RADIUS: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps bytes and samples per second to points of the picture."""

    most_bytes: float
    most_samples: float

    def x(self, num_bytes: float) -> float:
        share = min(1.0, num_bytes / self.most_bytes)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, samples_per_s: float) -> float:
        whole = _HEIGHT - _TOP - _BOTTOM
        return _HEIGHT - _BOTTOM - samples_per_s / self.most_samples * whole


def to_svg(ranking: Ranking) -> str:
    """Return the points, the budget and the legend as SVG."""
    budget = ranking.cluster.memory_bytes
    shown = ranking.outcomes
    taken = max(x.peak_bytes for x in shown)
    scale = _Scale(
        1.05 * taken if budget > _FAR * taken else _BEYOND * budget,
        1.08 * max(x.samples_per_s for x in shown),
    )
    lines = [
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" width="100%" '
        'xmlns="http://www.w3.org/2000/svg" font-size="12" '
        'font-family="system-ui, sans-serif" '
        'aria-label="Samples per second over peak memory of every candidate">',
        *_axes(scale, budget),
        *(_point(x, ranking, scale) for x in reversed(shown)),
        *_legend({kind_of(x) for x in shown}),
        "</svg>",
    ]
    return "\n".join(lines)


def kind_of(outcome: Outcome) -> str:
    """Return the kind of a candidate, a key of `KINDS`."""
    candidate = outcome.candidate
    if candidate.is_data_parallel:
        return "plain data parallelism"
    if outcome.delay:
        return "old weights"
    is_one = candidate.stages_per_device == 1
    return "one stage per device" if is_one else "several stages per device"


def _axes(scale: _Scale, budget: int) -> Iterator[str]:
    unit = byte_unit(scale.most_bytes)
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for number in ticks(scale.most_samples, 6):
        y = scale.y(number)
        yield _line(_LEFT, y, right, y, "var(--grid)")
        yield _text(_LEFT - 8, y + 4, short(number), "end")
    for number in ticks(scale.most_bytes / unit.size, 8):
        x = scale.x(number * unit.size)
        yield _line(x, floor, x, floor + 5, "var(--muted)")
        yield _text(x, floor + 19, short(number), "middle")
    yield _text(_LEFT, floor + 37, f"peak memory per device, {unit.name}", "start")
    yield _text(_LEFT + 6, _TOP + 2, "samples/s", "start")
    if budget > scale.most_bytes:
        yield _text(right, floor + 37, f"{byte_size(budget)} to have", "end")
        return
    x = scale.x(budget)
    yield _line(x, _TOP, x, floor, "var(--ink)", dash="5 4")
    yield _text(x - 5, floor - 6, f"{byte_size(budget)} to have", "end")


def _point(outcome: Outcome, ranking: Ranking, scale: _Scale) -> str:
    candidate = outcome.candidate
    colour = KINDS[kind_of(outcome)]
    x, y = scale.x(outcome.peak_bytes), scale.y(outcome.samples_per_s)
    paint = f'fill="{colour if outcome.fits else "none"}" stroke="{colour}"'
    title = f"<title>{escape(_words(outcome, ranking))}</title>"
    ring = ""
    if outcome is ranking.best:
        ring = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" '
            'stroke="var(--ink)" stroke-width="1.5"/>'
        )
    if outcome.peak_bytes > scale.most_bytes:
        shape = (
            f'<path d="M{x - _RADIUS:.1f} {y - _RADIUS:.1f}l{2 * _RADIUS:g} '
            f'{_RADIUS:g}l{-2 * _RADIUS:g} {_RADIUS:g}z" {paint}>{title}</path>'
        )
    elif candidate.is_data_parallel:
        side = 2 * _RADIUS
        shape = (
            f'<rect x="{x - _RADIUS:.1f}" y="{y - _RADIUS:.1f}" width="{side:g}" '
            f'height="{side:g}" {paint}>{title}</rect>'
        )
    else:
        shape = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS:g}" {paint}>'
            f"{title}</circle>"
        )
    return shape + ring


def _words(outcome: Outcome, ranking: Ranking) -> str:
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


def _legend(kinds: Collection[str]) -> Iterator[str]:
    x, y = _WIDTH - _RIGHT + 18, _TOP + 10
    for name, colour in KINDS.items():
        if name in kinds:
            yield f'<circle cx="{x:g}" cy="{y:g}" r="{_RADIUS:g}" fill="{colour}"/>'
            yield _text(x + 12, y + 4, name, "start")
            y += 20
    y += 8
    for words in (
        "ring: the best",
        "hollow: does not fit",
        "triangle: far from fitting",
        "square: data parallel",
    ):
        yield _text(x - 4, y + 4, words, "start")
        y += 18


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, *, dash: str = ""
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}"{dashes}/>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var(--muted)">'
        f"{escape(words)}</text>"
    )
