"""Measuring that takes no longer than it must, for tests of something else.

A pipeline looks at each layer for some seconds and at its lane for a third of one, so
that its prediction is good. Most tests make many pipelines and read no prediction; in
them everything is measured all the same, but only as often as it takes to have numbers.
"""

from __future__ import annotations

from typing import Final

import pytest

SHORT: Final = {
    "hocket.model.profile.held_layers._BUDGET_S": 1e-9,
    "hocket.model.profile.held_layers._MIN_PASSES": 3,
    "hocket.model.profile.measure._BUDGET_S": 0.0,
    "hocket.model.profile.measure._MIN_PASSES": 2,
    "hocket.run.tune.dry_run._ENOUGH_S": 0.0,
    "hocket.run.tune.dry_run._MIN_STEPS": 1,
    "hocket.run.tune.link_costs._NUM_ROUNDS": 2,
    "hocket.run.tune.link_costs._NUM_WARM": 1,
    "hocket.run.tune.link_costs._NUM_REDUCTIONS": 3,
    "hocket.run.tune.update_costs._NUM_STEPS": 2,
    "hocket.run.tune.update_costs._CACHE_BYTES": 1 << 10,
}


def measure_shortly(patch: pytest.MonkeyPatch) -> None:
    """Do so in this process, until the patch is undone."""
    for name, value in SHORT.items():
        patch.setattr(name, value)
