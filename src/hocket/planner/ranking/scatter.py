"""Draws every candidate as a point: samples per second over memory.

samples/s │     ●  ●            │        filled   fits
          │  ●    ●   ■         │  ○     hollow   does not fit
          │ ●                   │    ○   square   plain data parallelism
          └─────────────────────┼─────▶  peak memory per device
                              budget
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from hocket.draw.quantity import byte_size, byte_unit, percent, short, ticks
from hocket.planner.candidate import Outcome
from hocket.planner.ranking.ranking import Ranking

# Okabe and Ito's, which are distinct for every eye: https://jfly.uni-koeln.de/color/
COLOURS: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#999999",
    "#F0E442",
    "#000000",
)
_WIDTH: Final = 960.0
_HEIGHT: Final = 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 170.0, 16.0, 46.0
_WIDEST: Final = 2.5  # times the budget: what misses by more is not drawn
_FAR: Final = 4.0  # times the most used: a larger budget is written, not drawn
_RADIUS: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps bytes and samples per second to points of the picture."""

    most_bytes: float
    most_samples: float

    def x(self, num_bytes: float) -> float:
        return _LEFT + num_bytes / self.most_bytes * (_WIDTH - _LEFT - _RIGHT)

    def y(self, samples_per_s: float) -> float:
        whole = _HEIGHT - _TOP - _BOTTOM
        return _HEIGHT - _BOTTOM - samples_per_s / self.most_samples * whole


def to_svg(ranking: Ranking) -> str:
    """Return the points, the budget and the legend as SVG."""
    budget = ranking.cluster.memory_bytes
    shown = [x for x in ranking.outcomes if x.peak_bytes <= _WIDEST * budget]
    shown = shown or list(ranking.outcomes)
    taken = max(x.peak_bytes for x in shown)
    scale = _Scale(
        1.05 * (taken if budget > _FAR * taken else max(budget, taken)),
        1.08 * max(x.samples_per_s for x in shown),
    )
    names = dict.fromkeys(sorted(x.candidate.schedule for x in shown))
    colour_of = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    lines = [
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" width="100%" '
        'xmlns="http://www.w3.org/2000/svg" font-size="12" '
        'font-family="system-ui, sans-serif" '
        'aria-label="Samples per second over peak memory of every candidate">',
        *_axes(scale, budget),
        *(_point(x, ranking, colour_of, scale) for x in reversed(shown)),
        *_legend(colour_of),
        "</svg>",
    ]
    return "\n".join(lines)


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


def _point(
    outcome: Outcome, ranking: Ranking, colour_of: dict[str, str], scale: _Scale
) -> str:
    candidate = outcome.candidate
    colour = colour_of[candidate.schedule]
    x, y = scale.x(outcome.peak_bytes), scale.y(outcome.samples_per_s)
    paint = f'fill="{colour if outcome.fits else "none"}" stroke="{colour}"'
    title = f"<title>{escape(_words(outcome, ranking))}</title>"
    ring = ""
    if outcome is ranking.best:
        ring = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" '
            'stroke="var(--ink)" stroke-width="1.5"/>'
        )
    if candidate.is_data_parallel:
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


def _legend(colour_of: dict[str, str]) -> Iterator[str]:
    x, y = _WIDTH - _RIGHT + 18, _TOP + 10
    for name, colour in colour_of.items():
        yield f'<circle cx="{x:g}" cy="{y:g}" r="{_RADIUS:g}" fill="{colour}"/>'
        yield _text(x + 12, y + 4, name, "start")
        y += 20
    y += 8
    for words in ("ring: the best", "hollow: does not fit", "square: data parallel"):
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
