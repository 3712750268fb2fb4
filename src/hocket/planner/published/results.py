"""Results of published experiments, as `bench/published.py` wrote them down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from hocket.errors import PlanError
from hocket.nearest import nearest

_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as text.

    Args:
        title: lines above it.
        rows: cells, of the head first.
        legend: one paragraph below it.
    """

    title: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: str


@dataclass(frozen=True, slots=True)
class PublishedResults:
    """One experiment: what was published, simulated and measured.

    Args:
        document: "experiments", simulated, and "measured", as plain values.
        tables: the same for people.
    """

    document: Mapping[str, Any]
    tables: tuple[PublishedTable, ...]


def result_names() -> list[str]:
    """The experiments whose results are packaged."""
    names = (entry.name for entry in files(__package__).iterdir())
    return sorted(x.removesuffix(_SUFFIX) for x in names if x.endswith(_SUFFIX))


def read_results(name: str) -> PublishedResults:
    """Read one experiment's results.

    Raises:
        PlanError: there is none of this name; names those that there are.
    """
    if name not in result_names():
        hint = nearest(name, result_names())
        raise PlanError(f"no experiment is named {name!r}; {hint}")
    text = (files(__package__) / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    found = json.loads(text)
    tables = tuple(
        PublishedTable(tuple(x["title"]), tuple(map(tuple, x["rows"])), x["legend"])
        for x in found["tables"]
    )
    return PublishedResults(
        {key: found[key] for key in ("experiments", "measured")}, tables
    )
