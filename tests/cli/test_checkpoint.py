"""`hocket checkpoint`: what there is, whether it is whole, weights out."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from hocket.cli.main import app
from hocket.env import ExitCode
from tests.run.checkpoint.made import save


def checkpoint(*arguments: object) -> Result:
    """Call the command in this process."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert "Traceback" not in done.output
    return done


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    return tmp_path / "run"


def test_show_lists_all_of_them(run: Path) -> None:
    """With the one that `latest` names, and what is wrong with one."""
    (run / "step-00000001" / "weights-0.safetensors").unlink()
    done = checkpoint("show", run)
    first, second = done.output.splitlines()[1:]
    assert "step-00000001" in first
    assert "weights-0.safetensors cannot be read" in first
    assert second.startswith("step-00000002")
    assert second.endswith("latest")


def test_show_says_what_is_wrong_with_the_pointer(run: Path) -> None:
    """Below the checkpoints, which it lists all the same."""
    (run / "latest").write_text("damaged")
    lines = checkpoint("show", run).output.splitlines()[1:]
    assert lines[1].startswith("step-00000002")
    assert lines[2].startswith("latest")
    assert "is damaged" in lines[2]


def test_verify_reads_every_byte(run: Path) -> None:
    """The newest, one of a step, one by its path; damage has an exit code."""
    assert "step-00000002: whole" in checkpoint("verify", run).output
    done = checkpoint("verify", run, "--step", "1")
    assert "step-00000001: whole; 6 tensors in 3 files" in done.output
    path = run / "step-00000002" / "optimizer-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = checkpoint("verify", path.parent)
    assert done.exit_code == ExitCode.CHECKPOINT
    assert path.name in done.output


def test_weights_go_out(run: Path, tmp_path: Path) -> None:
    """Into a safetensors file."""
    target = tmp_path / "m.safetensors"
    done = checkpoint("export", run, target, "--step", "1")
    assert done.output.strip() == f"wrote {target}"
    assert {float(x.flatten()[0]) for x in load_file(target).values()} == {1.0}
    assert checkpoint("export", run).exit_code == ExitCode.USAGE
