"""Pictures as PNG."""

from __future__ import annotations

import struct
import sys
from io import BytesIO

import pytest

from hocket.draw.layout import Style
from hocket.draw.palette import Theme
from hocket.draw.png import to_png
from hocket.errors import MissingPackageError
from tests.draw.timelines import REAL, simulated


@pytest.mark.parametrize(("theme", "page"), [(Theme.LIGHT, 255), (Theme.DARK, 20)])
def test_the_picture_has_its_size_and_its_colours(theme: Theme, page: int) -> None:
    """Two pixels per point; the page in its colour, and ops that stand out from it."""
    matplotlib_image = pytest.importorskip("matplotlib.image", reason="extra `plot`")
    timeline = simulated("1f1b", 2, 4, num_steps=2, num_replicas=2, costs=REAL)
    picture = to_png(
        [("<$x$>", timeline)], title="1F1B", style=Style(width=500), theme=theme
    )
    width, height = struct.unpack(">II", picture[16:24])
    pixels = matplotlib_image.imread(BytesIO(picture))

    assert picture.startswith(b"\x89PNG")
    assert width == 1000
    assert pixels.shape[:2] == (height, 1000)
    assert round(float(pixels[0, 0, 0]) * 255) == page
    assert pixels.std() > 0.05


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the package, and a picture that needs none."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"hocket\[plot\].*SVG"):
        to_png(simulated("1f1b", 2, 2))
