"""A run's folder is its own: no run writes into another's, nor over anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from errno import EACCES
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import pytest

from hocket.errors import RecipeError
from hocket.recipes.config.resolve import resolve
from hocket.recipes.run_files import RECIPE_NAME
from hocket.recipes.training import run_folder
from hocket.recipes.training.run_folder import claim_folder, new_folder, refuse_folder

NOW: Final = datetime(2026, 7, 4, 10, 15, 0)


def test_folders_are_named_by_run_and_time(tmp_path: Path) -> None:
    """Two runs that begin in one second get two folders."""
    first = new_folder(tmp_path / "runs", "digits", "a", NOW)
    second = new_folder(tmp_path / "runs", "digits", "b", NOW)

    assert first == tmp_path / "runs" / "digits-20260704-101500"
    assert second == tmp_path / "runs" / "digits-20260704-101500-2"
    assert (first / RECIPE_NAME).read_text() == "a"
    assert (second / RECIPE_NAME).read_text() == "b"


def test_an_empty_folder_can_be_claimed_once(tmp_path: Path) -> None:
    """The error of the second run says what it met and what to do."""
    folder = tmp_path / "run"
    folder.mkdir()
    assert claim_folder(folder, "a") == folder
    with pytest.raises(
        RecipeError, match=r"not empty \(it holds recipe\.toml\).*--run-"
    ):
        claim_folder(folder, "b")
    assert (folder / RECIPE_NAME).read_text() == "a"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    """The user's home folder, given by mistake."""
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RecipeError, match=r"it holds thesis\.tex"):
        claim_folder(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_is_not_writable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made in it; who tests may be allowed to write everywhere."""

    def made(dir: Path) -> Any:  # noqa: A002
        if dir == tmp_path:
            raise PermissionError(EACCES, "Permission denied")
        return TemporaryFile(dir=dir)

    monkeypatch.setattr(run_folder, "TemporaryFile", made)
    recipe = resolve("digits-vit", [])
    with pytest.raises(
        RecipeError, match=r"cannot write into .*run: Permission denied"
    ):
        refuse_folder(recipe, tmp_path / "new" / "run")
    (tmp_path / "mine").mkdir()
    refuse_folder(recipe, tmp_path / "mine" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_of_many_runs_at_once_one_wins(tmp_path: Path) -> None:
    """However close together they begin."""

    def try_claim(number: int) -> str:
        try:
            claim_folder(tmp_path / "run", str(number))
        except RecipeError:
            return ""
        return str(number)

    with ThreadPoolExecutor(8) as pool:
        winners = [winner for winner in pool.map(try_claim, range(64)) if winner]
    assert winners == [(tmp_path / "run" / RECIPE_NAME).read_text()]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """Both where the run's folder should be, and where that folder should be."""
    in_the_way = tmp_path / "runs"
    in_the_way.write_text("precious")
    with pytest.raises(RecipeError, match=r"cannot write into .*runs"):
        new_folder(in_the_way, "digits", "a", NOW)
    with pytest.raises(RecipeError, match="runs"):
        claim_folder(in_the_way, "a")
    assert in_the_way.read_text() == "precious"
