"""The table of schedules: every file is in it, outsiders are, and names are unique."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

import pytest

import hocket.schedules
from hocket.errors import PlanError, ShapeError
from hocket.schedules import SCHEDULES, make_schedule
from hocket.schedules.gpipe import ENTRY
from hocket.schedules.table import GROUP, OURS, all_schedules, joined

FOLDER: Final = Path(hocket.schedules.__file__).parent
NO_SCHEDULES: Final = {
    "__init__",
    "building_block",
    "entry",
    "flush_free",
    "table",
    "v_shape",
}

METADATA: Final = "Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n"


@pytest.fixture
def their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The entry points of a package, as an installer leaves them; to be written."""
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    all_schedules.cache_clear()
    yield info / "entry_points.txt"
    all_schedules.cache_clear()
    vars(hocket).pop("SCHEDULES", None)  # it keeps the first table


def test_every_file_is_in_the_table() -> None:
    """No test reads a schedule that is not in the table."""
    modules = {entry.make.__module__.rpartition(".")[2] for entry in OURS.values()}
    assert {path.stem for path in FOLDER.glob("*.py")} - NO_SCHEDULES == modules


def test_names_are_those_of_the_files() -> None:
    """Who knows a schedule's name finds its file."""
    words = {"1f1b": "one_f_one_b", "interleaved-1f1b": "interleaved_1f1b"}
    for name, entry in OURS.items():
        stem = words.get(name, name.replace("-", "_"))
        assert entry.make.__module__ == f"hocket.schedules.{stem}"


def test_takes_the_schedules_of_other_packages(their_package: Path) -> None:
    """An entry point is all that it takes."""
    value = "hocket.schedules.gpipe:ENTRY"
    their_package.write_text(f"[{GROUP}]\ntheir-schedule = {value}\n")

    schedule = make_schedule("their-schedule", num_devices=2, num_microbatches=2)

    assert schedule == make_schedule("gpipe", num_devices=2, num_microbatches=2)
    assert set(hocket.schedules.SCHEDULES) == {*OURS, "their-schedule"}


def test_a_clash_of_names_names_both(their_package: Path) -> None:
    """Who meets it knows which package to rename or uninstall."""
    their_package.write_text(f"[{GROUP}]\ngpipe = their_package.orders:ENTRY\n")
    with pytest.raises(PlanError) as caught:
        make_schedule("gpipe", num_devices=2, num_microbatches=2)
    assert "their-package (their_package.orders:ENTRY)" in str(caught.value)
    assert "hocket (hocket.schedules.gpipe)" in str(caught.value)


def test_two_outsiders_may_clash_too() -> None:
    """A clash of names is an error that names both packages."""
    offers = [
        EntryPoint("new", "hocket.schedules.gpipe:ENTRY", GROUP),
        EntryPoint("new", "hocket.schedules.looped_bfs:ENTRY", GROUP),
    ]
    with pytest.raises(PlanError, match=r"(?s)gpipe:ENTRY.*looped_bfs:ENTRY"):
        joined({}, offers)


def test_refuses_what_is_no_entry() -> None:
    """A generator alone makes no claims that could be tested."""
    offers = [EntryPoint("new", "hocket.schedules.gpipe:gpipe", GROUP)]
    with pytest.raises(
        PlanError, match=r"is no hocket.schedules.Entry, but of type fu"
    ):
        joined({}, offers)


def test_the_table_cannot_be_changed() -> None:
    """The table is read-only, so that the tests see every schedule in it."""
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = ENTRY  # type: ignore[index]


def test_names_the_nearest_schedule() -> None:
    """A typing error costs one more try."""
    with pytest.raises(
        PlanError, match=r"no schedule is named 'gpip'; did you mean 'gp"
    ):
        make_schedule("gpip", num_devices=2, num_microbatches=2)


def test_names_all_schedules_where_none_is_near() -> None:
    """Or shows what there is."""
    with pytest.raises(PlanError) as caught:
        make_schedule("xyzzy", num_devices=2, num_microbatches=2)
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in OURS)


def test_names_the_options_that_there_are() -> None:
    """An option is never ignored."""
    with pytest.raises(PlanError, match=r"no option 'device'; did you mean 'devices'"):
        make_schedule("forward-only", num_devices=1, num_microbatches=1, device=[0])
    with pytest.raises(PlanError, match="takes no option 'devices'; there are none"):
        make_schedule("1f1b", num_devices=1, num_microbatches=1, devices=[0])


@pytest.mark.parametrize(
    "number",
    ["num_devices", "num_microbatches", "num_steps", "num_replicas"],
)
def test_refuses_numbers_below_one(number: str) -> None:
    """The error names the number, and its value."""
    numbers = {"num_devices": 2, "num_microbatches": 2, number: 0}
    with pytest.raises(ShapeError, match=f"{number}=0: each must be at least 1"):
        make_schedule("1f1b", **numbers)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_per_device_says_who_takes_more(name: str) -> None:
    """The refusal shows the way out."""
    with pytest.raises(ShapeError, match=r"stages_per_device=2: use 1, or interleaved"):
        make_schedule(name, num_devices=2, num_microbatches=2, stages_per_device=2)
