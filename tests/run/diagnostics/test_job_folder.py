"""Where a job's workers leave files, if the run has no folder of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hocket.errors import RunError, WorkerError
from hocket.run.cluster.launch import launch
from hocket.run.diagnostics.job_folder import job_dir, new_job_dir


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "script").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "script")


def test_nothing_is_left_beside_a_script(tmp_path: Path) -> None:
    """A failure names a folder that no other user may read."""
    with pytest.raises(WorkerError) as failed:
        launch("json:loads", ["{"], num_workers=1)
    own = tmp_path / "temporary" / f"hocket-{os.getuid()}"
    assert f"all reports: {own}" in str(failed.value)
    assert own.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in own.rglob("*.json")] != []
    assert [*Path.cwd().iterdir()] == []


def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could hold what that user put there."""
    new_job_dir(None)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(RunError, match="hocket-4321 is another user's: set TMPDIR"):
        job_dir(None, "token")
