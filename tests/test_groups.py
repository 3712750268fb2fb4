"""Tests that share what takes long to make run in one process: `xdist_group`.

pytest-xdist finds groups by what it has put behind the tests' names. When pytest 9.2
took other names (pytest-xdist#1386) all else still worked, but each process trained
every architecture for itself, and the suite took minutes longer.
"""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("this")
def test_groups_are_known(request: pytest.FixtureRequest) -> None:
    """Where groups are asked for, a test's name ends with its group."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("groups are for several processes: -n 2 --dist loadgroup")

    assert request.node.nodeid.endswith("@this")
