"""The colours of kinds differ for every eye, and text on them is readable."""

from __future__ import annotations

from itertools import combinations, product
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from hocket.core.op import ASYNCHRONOUS, MESSAGES, Kind
from hocket.core.program import Program
from hocket.draw.palette import (
    FILLS,
    KIND_NAMES,
    SURFACES,
    Theme,
    contrast,
    fill,
    paler_note,
    stage_tones,
    text_on,
)
from hocket.schedules import Shape
from hocket.schedules.tspipe import tspipe

# How people see who lack one kind of cone, in linear RGB. Source: Machado, Oliveira,
# Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# 2009, severity 1.0.
SIGHTS: Final = {
    "normal": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Linear RGB to OKLab. Source: Ottosson, "A perceptual color space", 2020.
TO_CONES: Final = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB: Final = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def seen(colour: str, sight: str) -> NDArray[np.float64]:
    """Return a colour in OKLab as one kind of sight sees it."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(
        channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
    )
    sensed = np.clip(np.array(SIGHTS[sight]) @ linear, 0.0, 1.0)
    lab: NDArray[np.float64] = np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ sensed)
    return lab


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", Theme)
def test_kinds_differ_for_every_eye(theme: Theme, sight: str) -> None:
    """At least 0.1 in OKLab: the claim of the palette's docstring.

    Sends and receives share one grey on purpose.
    """
    kinds = [kind for kind in Kind if kind not in MESSAGES] + [Kind.SEND_FORWARD]
    colours = {kind: seen(FILLS[theme][kind], sight) for kind in kinds}
    near = {
        (a, b): float(np.linalg.norm(colours[a] - colours[b]))
        for a, b in combinations(kinds, 2)
    }
    assert min(near.values()) >= 0.1, min(near, key=lambda pair: near[pair])


@pytest.mark.parametrize("theme", Theme)
def test_text_on_every_op_can_be_read(theme: Theme) -> None:
    """4.5 is what WCAG asks for; numbers stand on every kind in every tone."""
    for kind, tone in product(Kind, (0.0, 0.25, 0.5)):
        if kind not in ASYNCHRONOUS:  # those are thin bars
            colour = fill(kind, tone, theme)
            assert contrast(colour, text_on(colour)) >= 4.5, (kind, tone)


@pytest.mark.parametrize("theme", Theme)
def test_text_beside_the_ops_can_be_read(theme: Theme) -> None:
    """Labels and numbers on the page, and on a lane."""
    surface = SURFACES[theme]
    for ink, ground in product((surface["ink"], surface["muted"]), (surface["page"],)):
        assert contrast(ink, ground) >= 4.5


def test_every_kind_has_a_colour_and_a_name() -> None:
    """A new kind must not break a picture."""
    for theme in Theme:
        assert set(FILLS[theme]) == set(Kind)
    assert set(KIND_NAMES) == set(Kind)


def test_later_stages_of_a_device_are_paler() -> None:
    """From full colour to half, whatever the number of stages."""
    tones = stage_tones(Program.chain([0, 1, 0, 1, 0], 2))

    assert tones == (0.0, 0.0, 0.25, 0.5, 0.5)


def test_a_teacher_is_paler_than_what_is_trained() -> None:
    """Though its stages have lower numbers; the legend says so."""
    program = tspipe(Shape(2, 4, stages_per_device=2)).program

    assert stage_tones(program) == (0.5, 0.5, 0.0, 0.0)
    assert paler_note([program]).endswith(
        "later stages of a device, and those not trained"
    )
    assert (
        paler_note([Program.chain([0, 1, 0], 2)]) == "paler: later stages of a device"
    )
    assert not paler_note([Program.chain([0, 1], 2)])


def test_contrast_is_known_for_black_on_white() -> None:
    """The ratio's two ends."""
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21.0)
    assert contrast("#3F72BE", "#3F72BE") == 1.0
