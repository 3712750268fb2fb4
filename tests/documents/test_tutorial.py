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
