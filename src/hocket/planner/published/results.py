"""Results of published experiments, as `bench/published.py` wrote them down."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Final

from hocket.errors import PlanError
from hocket.nearest import nearest

_SUFFIX: Final = ".json"


def read_results(name: str) -> dict[str, Any]:
    """Read one experiment's results.

    Returns:
        "experiments", simulated; "measured"; and "tables", the same for people: each
        has a "title", lines above it; "rows" of cells, the head first; and a "legend",
        one paragraph below it.

    Raises:
        PlanError: there is none of this name; names those that there are.
    """
    entries = (entry.name for entry in files(__package__).iterdir())
    names = sorted(x.removesuffix(_SUFFIX) for x in entries if x.endswith(_SUFFIX))
    if name not in names:
        raise PlanError(f"no experiment is named {name!r}; {nearest(name, names)}")
    text = (files(__package__) / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    results: dict[str, Any] = json.loads(text)
    return results
