"""What every test stands on: Hypothesis profiles, folders, golden files, threads."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from tests import lost_processes, reference_loop

GOLDEN: Final = Path(__file__).parent / "golden"
FEW_COLLECTIONS: Final = 8  # of all objects, until the next freeze
_NUM_COLLECTIONS: Final = [0]  # at the last freeze

# In CI the same examples each time. Nowhere a deadline: a slow machine is not a bug.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("quick", max_examples=5, deadline=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)

# One thread for torch, here and in every worker that a test starts: the tests fill
# the cores already. Set before anything imports torch, which reads them once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

# Tests run beside each other, and what depends on kept profiles must not on that.
os.environ["HOCKET_KEEP_BUSY_PROFILES"] = "1"

# The tests start hundreds of processes: none need compile what another has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `make golden` gives."""
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="write tests/golden anew; read the difference before you commit it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let a test process that dies cost its one test, and time a reference loop."""
    config.pluginmanager.register(lost_processes)
    config.pluginmanager.register(reference_loop)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for tests in files of tests only.

    Looking for examples in docstrings, pytest would import the others too: what the
    fork server has done (run/preloaded.py) would be done in each process, to no end.
    """
    is_helper = not collection_path.name.startswith("test_")
    return True if is_helper and collection_path.suffix == ".py" else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the fixture `golden`, and put the longest first.

    `-m golden` finds the former. Of the latter, none must begin when all else is done,
    and one core is left to wait for the other; they are known by their timeouts.
    Tests that share what a module makes once run in one process, so that it is once.
    """
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.golden)
        shared = module_fixtures(item)
        if shared and item.get_closest_marker("xdist_group") is None:
            name = f"{item.nodeid.partition('::')[0]}: {', '.join(shared)}"
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=timeout_s, reverse=True)


def pytest_collection_finish() -> None:
    """Keep the collector from what is there now: torch, and all tests.

    Each pipeline has Python collect garbage, which would take a third of a second.
    """
    gc.freeze()


@pytest.hookimpl(trylast=True)  # once the test's fixtures are gone
def pytest_runtest_teardown() -> None:
    """Keep it from what tests have imported and cached, too: most objects of all."""
    num = gc.get_stats()[-1]["collections"]
    if num >= _NUM_COLLECTIONS[-1] + FEW_COLLECTIONS:
        gc.collect()
        gc.freeze()
        _NUM_COLLECTIONS[:] = [num + 1]


def module_fixtures(item: pytest.Item) -> list[str]:
    """The fixtures that a test shares with others of its module."""
    if not isinstance(item, pytest.Function):
        return []
    found = item._fixtureinfo.name2fixturedefs.items()
    return [name for name, defs in found if defs and defs[-1].scope == "module"]


def timeout_s(item: pytest.Item) -> float:
    """What a test's own mark allows it; 0 without one."""
    mark = item.get_closest_marker("timeout")
    return 0.0 if mark is None else float(mark.args[0])


@pytest.fixture
def free_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and the current directory while the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that tests/golden/name holds just this text."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--write-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kept = path.read_text() if path.exists() else ""
        assert text == kept, f"{name}: if the new text is right, run `make golden`"

    return compare
