"""`hocket share` trains several recipes on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.cli.share import byte_count
from hocket.errors import ConfigError

SMALL = ("--set", "model.num_blocks=1", "--set", "model.dropout=0.1")


def share(*arguments: str) -> str:
    """What a call prints."""
    done = CliRunner().invoke(app, ["share", "--device", "cpu", *SMALL, *arguments])
    return f"{done.output}{done.exception or ''}"


def test_trains_recipes_and_writes_the_page(tmp_path: Path) -> None:
    """Two runs of one recipe have the same losses: each is what it is alone."""
    page = tmp_path / "share.html"
    half = ("--set", "training.precision=bfloat16", "--set", "training.accumulate=2")
    recipes = ("digits-vit", "digits-vit", "--max-steps", "6", *half)
    own = ("--page", str(page), "--run-dir", str(tmp_path))
    out = share(*recipes, "--mode", "lag", "--memory", "1GiB", *own)
    losses = [line.split()[-1] for line in out.splitlines() if "last loss" in line]
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert "mode lag: as asked for" in out
    assert "digits-vit-2" in page.read_text()


def test_refuses_what_it_cannot_train() -> None:
    """The message names the setting."""
    found = share("digits-vit", "--set", "freeze.policy=alpha")
    assert "give --set freeze.policy=none, or" in found
    assert "give 1 numbers" in share("digits-vit", "--weights", "2,1")


def test_reads_sizes() -> None:
    """With binary units, and no others."""
    assert byte_count("1.5KiB") == 1536
    assert byte_count("7") == 7
    with pytest.raises(ConfigError, match="20GiB"):
        byte_count("20 gigs")
