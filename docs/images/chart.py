"""The chart of docs/how-to/choose-a-schedule.md: questions, answers."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final

from hocket.draw.palette import SURFACES, Theme


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and what to take if the answer is yes; else the next one is asked.

    Args:
        lines: the question.
        answers: each a condition (or nothing), a name, and what it costs.
    """

    lines: tuple[str, ...]
    answers: tuple[tuple[str, str, str], ...]


CHART: Final = (
    Question(
        ("Do weights, gradients,", "optimizer and", "activations fit a device?"),
        (
            ("only one device", "ooo-single", "one captured step, W beside I"),
            ("a fast network", "DDP", "no bubble: all reductions are hidden"),
            ("a slow network", "reverse-first-k", "hides what DDP waits for"),
            ("only sharded, fast network", "FSDP", "little to wait for, much to send"),
        ),
    ),
    Question(
        ("Does a teacher run", "beside the model?"),
        (("", "auto, with teachers=", "its forwards fill the bubble"),),
    ),
    Question(
        ("May weights be", "one update old?"),
        (
            ("recomputing, or replicas", "wpipe", "old weights in the front half only"),
            ("slow links", "wpipe-overlapped", "the same, and hops are hidden"),
            ("few activations", "pipedream-2bw", "old weights in all stages"),
        ),
    ),
    Question(
        ("Does the model cut well", "into 2 stages per device,", "or more?"),
        (
            (
                "memory for all activations",
                "ooo-modulo",
                "a bubble that 6 stages divide by 6",
            ),
            ("as much memory as 1f1b", "zb-v", "almost no bubble"),
            ("about half of it", "v-half", "half of 1f1b's bubble, or less"),
            ("about a third of it", "v-min", "less bubble than 1f1b"),
        ),
    ),
    Question(
        ("Is the bubble large:", "few microbatches for", "the number of devices?"),
        (
            ("as much memory as 1f1b", "zb-h1", "a third of 1f1b's bubble"),
            ("as much as you have", "zb-auto", "made for your times and memory"),
        ),
    ),
    Question(
        ("Else",),
        (("", "1f1b", "nothing is split; the plainest of all"),),
    ),
)

_ROW, _GAP, _TOP = 34, 30, 40
_LEFT, _RIGHT, _WIDTH = 20, 320, 1000
_BOX = 230


def chart_svg() -> str:
    """The chart, for light pages and dark ones."""
    parts: list[str] = []
    y = _TOP
    for index, question in enumerate(CHART):
        height = max(_ROW * len(question.answers), 22 * len(question.lines) + 20)
        parts += _question(question, y, height, is_last=index == len(CHART) - 1)
        y += height + _GAP
    light, dark = (SURFACES[theme] for theme in (Theme.LIGHT, Theme.DARK))
    colours = (
        "--ink:{0[ink]};--muted:{0[muted]};--page:{0[page]};--box:{0[track]};--line:{1}"
    )
    style = (
        f":root{{{colours.format(light, '#3B6EA8')}}}"
        "@media (prefers-color-scheme:dark)"
        f"{{:root{{{colours.format(dark, '#8AB4E8')}}}}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" '
            f'font-family="sans-serif" font-size="14">\n<style>{style}</style>',
            f'<rect width="{_WIDTH}" height="{y}" fill="var(--page)"/>',
            _text(_LEFT, 22, "ask", "var(--muted)"),
            _text(_RIGHT, 22, "yes, and", "var(--muted)"),
            _text(_RIGHT + 210, 22, "take", "var(--muted)"),
            _text(_RIGHT + 385, 22, "because", "var(--muted)"),
            *parts,
            "</svg>\n",
        ]
    )


def _question(question: Question, y: int, height: int, *, is_last: bool) -> list[str]:
    """A box, an arrow to each answer, and one to the next question."""
    middle = y + height / 2
    first = middle - 20 * (len(question.lines) - 1) / 2 + 5
    parts = [
        f'<rect x="{_LEFT}" y="{y}" width="{_BOX}" height="{height}" rx="8" '
        'fill="var(--box)" stroke="var(--line)"/>',
        *(
            _text(_LEFT + 14, first + 20 * i, line, "var(--ink)")
            for i, line in enumerate(question.lines)
        ),
    ]
    offset = (height - _ROW * len(question.answers)) / 2 + _ROW / 2
    edge = _LEFT + _BOX
    for i, (condition, name, cost) in enumerate(question.answers):
        at = y + offset + _ROW * i
        end = _RIGHT - 10 if condition else _RIGHT + 200
        parts += [
            f'<path d="M{edge} {middle} C{edge + 40} {middle} {edge + 20} {at} '
            f'{_RIGHT - 10} {at} H{end}" fill="none" stroke="var(--line)"/>',
            _text(_RIGHT, at + 5, condition, "var(--muted)"),
            _text(_RIGHT + 210, at + 5, name, "var(--ink)", bold=True),
            _text(_RIGHT + 385, at + 5, cost, "var(--muted)"),
        ]
    if not is_last:
        x, below = _LEFT + _BOX / 2, y + height
        parts += [
            f'<path d="M{x} {below} V{below + _GAP - 2} m-4 -7 l4 7 l4 -7" '
            'fill="none" stroke="var(--line)"/>',
            _text(x + 10, below + 20, "no", "var(--muted)"),
        ]
    return parts


def _text(x: float, y: float, text: str, fill: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}"{weight}>{escape(text)}</text>'
