"""A disk that is full ends a run in lines of ours: the path, and the first cause."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hocket.errors import RunError
from hocket.run.diagnostics.failure import failure_report, read_report, write_report
from hocket.run.diagnostics.job_folder import write_json
from tests.cli.test_train import RUN_TIMEOUT_S, SMALL, settings
from tests.run.support.forked_command import hocket_forked

# A callback that takes what is left, once the only epoch was trained and evaluated.
FILLER = """
from pathlib import Path


class Fill:
    def __init__(self, run_dir):
        self.file = open(Path(run_dir).parent / "filler", "wb", buffering=0)

    def step(self, record):
        pass

    def evaluation(self, record):
        try:
            for size in (4096, 1):
                while True:
                    self.file.write(bytes(size))
        except OSError:
            pass

    summary = close = lambda self, *_: None
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no room."""
    with suppress(OSError), (disk / "filler").open("wb", 0) as x:
        while True:
            x.write(bytes(4096))


def test_what_cannot_be_written_is_said(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The path, why, and what it should say; nothing of it is left."""
    fill(small_disk)
    path = small_disk / "file.json"
    with pytest.raises(RunError, match=r"file\.json: No space .* should say: because$"):
        write_json(path, {"message": "because"})
    with pytest.raises(RunError, match=r"file\.json: No space left on device$"):
        write_json(path, [1])
    assert [x.name for x in small_disk.iterdir()] == ["filler"]
    write_report(path, failure_report(3, (), RunError("the first cause")))
    assert "rank 3: cannot write" in caplog.text
    assert "should say: the first cause" in caplog.text
    assert read_report(path) is None


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("final", "code", "words"),
    [
        ("true", 8, "/disk/run/checkpoints: No space left on device"),
        ("false", 7, "the report in disk/run failed: OSError: [Errno 28] "),
    ],
)
def test_a_run_on_a_full_disk_ends_without_tracebacks(
    small_disk: Path, final: str, code: int, words: str
) -> None:
    """Whether the checkpoint or the page finds no room; reports of workers do not."""
    (small_disk.parent / "filler.py").write_text(FILLER)
    chosen = (*SMALL, f"checkpoint.final={final}", 'run.callbacks=["filler:Fill"]')
    done = hocket_forked(
        *("train", "digits-vit", "--run-dir=disk/run", *settings(*chosen)),
        cwd=small_disk.parent,
        timeout_s=RUN_TIMEOUT_S,
    )
    assert words in done.stderr, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "hocket: " in done.stderr
    assert done.returncode in (7, code)
