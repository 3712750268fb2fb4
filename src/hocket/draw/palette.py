"""Choose the colours of every picture, one per kind of op, for all eyes.

Blue is forward, and warm colours are backwards that other stages wait for, so the two
that fill most of a picture differ for every eye. A search found the colours: the
smallest OKLab distance between any two kinds is at least 0.1, for normal sight and for
protan, deutan and tritan sight, on white and on black (tests/draw/test_palette.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Final

from hocket.core.op import MESSAGES, Kind
from hocket.core.program import Program


class Theme(Enum):
    """What a picture stands on."""

    LIGHT = "light"
    DARK = "dark"


# The colours of everything that is not an op:
#
#     page     what the picture stands on
#     track    a lane where nothing runs: the bubble
#     band     the same, in every second step
#     ink      text
#     muted    text and lines of second rank
#     grid     the thinnest lines
#     curve    memory over time
SURFACES: Final = {
    Theme.LIGHT: {
        "page": "#FFFFFF",
        "track": "#F2F3F5",
        "band": "#E2E5E9",
        "ink": "#1B2027",
        "muted": "#626B76",
        "grid": "#DBDFE4",
        "curve": "#5A6673",
    },
    Theme.DARK: {
        "page": "#14181D",
        "track": "#1E242B",
        "band": "#2C343D",
        "ink": "#E8EBEF",
        "muted": "#98A2AE",
        "grid": "#323A44",
        "curve": "#A3AEBB",
    },
}

# Sends and receives share one grey: their direction is drawn, not coloured.
FILLS: Final = {
    Theme.LIGHT: {
        Kind.FORWARD: "#3F72BE",
        Kind.BACKWARD: "#D7712C",
        Kind.BACKWARD_INPUT: "#F3AE4E",
        Kind.BACKWARD_WEIGHT: "#A9D3C6",
        Kind.LOSS: "#9A5F7E",
        Kind.GATHER: "#770088",
        Kind.REDUCE: "#0F6134",
        Kind.UPDATE: "#2B323B",
        Kind.UNSHARD: "#00A8F8",
        Kind.RESHARD: "#7000F0",
        **dict.fromkeys(MESSAGES, "#A0A5AC"),
    },
    Theme.DARK: {
        Kind.FORWARD: "#588ACF",
        Kind.BACKWARD: "#DC8748",
        Kind.BACKWARD_INPUT: "#ECBD5F",
        Kind.BACKWARD_WEIGHT: "#A6D1C2",
        Kind.LOSS: "#A87088",
        Kind.GATHER: "#9911AA",
        Kind.REDUCE: "#1F782B",
        Kind.UPDATE: "#F3F5F7",
        Kind.UNSHARD: "#38B8E0",
        Kind.RESHARD: "#8828F8",
        **dict.fromkeys(MESSAGES, "#4F5257"),
    },
}

KIND_NAMES: Final = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
    Kind.LOSS: "whole-batch loss",
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduction",
    Kind.UPDATE: "update",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
    Kind.SEND_FORWARD: "send forward",
    Kind.RECEIVE_FORWARD: "receive forward",
    Kind.SEND_BACKWARD: "send backward",
    Kind.RECEIVE_BACKWARD: "receive backward",
}

# Text on a fill is one of these two, whichever is easier to read.
_LIGHT_TEXT, _DARK_TEXT = "#FFFFFF", "#000000"

# A device's first stage that is trained has the full colour; its last stage, and those
# of nets without backwards, this much less of it.
_MOST_FADED: Final = 0.5


def stage_tones(program: Program) -> tuple[float, ...]:
    """Return how much each stage's colour is faded: 0 for a device's first stage.

    Later stages of a device are paler, so that interleaved orders can be read, and so
    are those that are not trained beside those that are, such as a teacher's.
    """
    tones = [0.0] * program.num_stages
    for own in program.stages_on:
        stages = sorted(own, key=lambda stage: not program.stages[stage].trainable)
        for i, stage in enumerate(stages):
            tones[stage] = _MOST_FADED * i / max(1, len(stages) - 1)
    return tuple(tones)


def paler_note(programs: Iterable[Program]) -> str:
    """Return what the legend says of paler colours; empty if all are full."""
    programs = tuple(programs)
    if all(len(own) == 1 for program in programs for own in program.stages_on):
        return ""
    some = any(len({s.trainable for s in p.stages}) > 1 for p in programs)
    return "paler: later stages of a device" + ", and those not trained" * some


@lru_cache(maxsize=4096)
def fill(kind: Kind, tone: float, theme: Theme) -> str:
    """Return the colour of an op: its kind's, faded towards the page by `tone`."""
    colour = channels(FILLS[theme][kind])
    page = channels(SURFACES[theme]["page"])
    mixed = (round(c + (p - c) * tone) for c, p in zip(colour, page, strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


@lru_cache(maxsize=4096)
def text_on(colour: str) -> str:
    """Return the colour of text on a fill."""
    return max(_LIGHT_TEXT, _DARK_TEXT, key=lambda text: contrast(colour, text))


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21. Source: WCAG 2.2, 1.4.3."""
    bright, dim = sorted((_luminance(colour), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def channels(colour: str) -> tuple[int, int, int]:
    """Read red, green and blue, from 0 to 255."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in channels(colour))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
