"""One thread, so that sums are added in one order and other tests have their cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.run.support.exported_once import export_once

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have all tests of one model run in one process, which captures it once."""
    for item in items:
        cases = getattr(item, "callspec", None)
        name = None if cases is None else cases.params.get("name")
        if isinstance(name, str) and HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(f"capture of {name}"))


@pytest.fixture(autouse=True)
def _exported_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export models of one form once, but where exporting is what is tested."""
    if HERE / "capture" not in request.path.parents:
        export_once(monkeypatch)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)
