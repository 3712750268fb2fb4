"""Arguments of policies and of the cache are refused where they are of another type."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError
from hocket.freeze import (
    Alpha,
    ArgminGradient,
    LayerObservation,
    Listed,
    Percentile,
    Plasticity,
)
from hocket.freeze.settings import Cache


@pytest.mark.parametrize(
    ("make", "given", "match"),
    [
        (Alpha, {"alpha": "0.2"}, "alpha is '0.2': it must be above 0 and below 1"),
        (Alpha, {"alpha": 0.2, "every_steps": 1.5}, "every_steps is 1.5: take 1, 2"),
        (Alpha, {"alpha": 0.2, "every_steps": "9"}, "every_steps is '9': take 1, 2"),
        (Alpha, {"alpha": 0.2, "layers": ["a"]}, r"layers is \['a'\]: .*layers\.\*"),
        (ArgminGradient, {"alpha": 0.2, "patience": 1.0}, "patience is 1.0: take 1,"),
        (Percentile, {"percentile": "50"}, "percentile is '50': it must be from 0"),
        (Plasticity, {"window": 2.0}, "window is 2.0: a line needs 2, 3"),
        (Plasticity, {"tolerance": None}, "tolerance is None: it must be above 0"),
        (Plasticity, {"unfreeze_at": "1"}, "unfreeze_at is '1': it must be above 0"),
        (Listed, {"num_frozen": {}}, "num_frozen is {}: say when"),
        (Listed, {"num_frozen": [6]}, r"num_frozen is \[6\]: say when .* {2: 6}"),
        (Listed, {"num_frozen": {"2": 6}}, "has '2': 6: decisions count from 1"),
        (Listed, {"num_frozen": {2: 6.0}}, "has 2: 6.0: decisions count from 1"),
        (Cache, {"ram_bytes": "8GiB"}, "ram_bytes is '8GiB': .*such as 8 << 30"),
        (Cache, {"ram_bytes": 6e7}, "ram_bytes is 60000000.0: give a number of bytes"),
        (Cache, {"ram_bytes": -1}, "ram_bytes is -1: give a number of bytes"),
        (Cache, {"ram_bytes": 1, "folder": None}, "folder is None: give a path"),
    ],
)
def test_another_type_is_refused(
    make: Callable[..., Any], given: dict[str, Any], match: str
) -> None:
    """When it is given, with the value and the right form."""
    if make is Cache:
        given = {"folder": Path("c"), "disk_bytes": 0, **given}
    with pytest.raises(ConfigError, match=match):
        make(**given)


def test_fractions_are_numbers() -> None:
    """As exact shares."""
    policy = Alpha(Fraction(1, 3), every_steps=2)  # type: ignore[arg-type]
    assert policy.decide(None, LayerObservation(1, 2, 12, 0)) == 4
