"""Each step of the tutorial trains the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.blocks import ROOT
from tests.documents.shell import prepare, run_script


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_step_prints_the_losses_of_the_plain_loop(free_dir: Path) -> None:
    """One process, two stages, and two replicas of two stages."""
    prepare(ROOT / "docs/tutorial/train.md", free_dir)
    plain = run_script(["python", "plain_loop.py"], free_dir)
    assert plain.count("loss") == 4

    for number, name in ((2, "two_workers.py"), (4, "several_machines.py")):
        command = ["torchrun", "--nproc-per-node", str(number), name]
        assert run_script(command, free_dir) == plain
    assert list((free_dir / "checkpoints").iterdir())

    printed = run_script(
        ["torchrun", "--nproc-per-node", "2", "zero_bubble.py"], free_dir
    )
    last = plain.splitlines()[-1].split()[-1]
    for name in ("1f1b", "zb-h1"):
        assert f"{name}: loss {float(last):.4f}" in printed
        assert (free_dir / f"{name}.html").exists()
    *_, one, other = printed.splitlines()
    assert one.startswith("  1f1b: a step of ")
    assert other.startswith("  zb-h1: a step of ")
