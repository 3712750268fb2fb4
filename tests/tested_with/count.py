"""Counts the cases of tests, without running them."""

from __future__ import annotations

import math
from collections.abc import Collection
from importlib import import_module
from typing import Any, Final

from hypothesis import settings

_SETTINGS: Final = "_hypothesis_internal_use_settings"


def num_cases(place: str) -> int:
    """Count a test's cases: its parameters, each times the examples that it draws.

    Args:
        place: a file and a test, written as pytest does.
    """
    test = named(place)
    marks = [x for x in getattr(test, "pytestmark", ()) if x.name == "parametrize"]
    parameters = math.prod(len(mark.args[1]) for mark in marks)
    if not getattr(test, "is_hypothesis_test", False):
        return parameters
    drawn: settings = getattr(test, _SETTINGS, None) or settings()
    return parameters * drawn.max_examples


def named(place: str) -> Any:
    """Return what has a name in a test's file.

    Args:
        place: `tests/core/test_op.py::NAME`.
    """
    file, _, name = place.partition("::")
    module = import_module(file.removesuffix(".py").replace("/", "."))
    return getattr(module, name)


def keys(place: str) -> Collection[str]:
    """Return the names in one of a test's tables.

    Args:
        place: a file and a dict in it.
    """
    return [str(key) for key in named(place)]
