"""A recipe whose stages are sharded trains as a plain loop, and goes on in one worker.

It plays the order of a file, whose author has written the gathers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hocket.cli.train import ENTRY
from hocket.passes.add_gathers import add_gathers
from hocket.recipes.config.resolve import resolve
from hocket.recipes.run_files import TIMELINE_NAME
from hocket.recipes.training.run_folder import claim_folder
from hocket.recipes.training.train import train_recipe
from hocket.run.checkpoint.format.newest import newest
from hocket.schedules import make_schedule
from tests.recipes.training.test_train import SMALL, plain_loop, records
from tests.run.support.forked import answers_of

RUN_TIMEOUT_S = 200.0  # a tenth of it on free cores
SHARDED = (
    "pipeline.num_workers=",
    "pipeline.layout=1x1x2",
    "pipeline.num_microbatches=2",
    "pipeline.schedule=order.txt",
    "training.max_steps=3",
    "training.batch_size=32",
)
WHOLE = (
    *SHARDED,
    "pipeline.layout=",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=4",
    "pipeline.schedule=gpipe",
    "training.max_steps=6",
)


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_two_shards_train_as_a_plain_loop(tmp_path: Path, free_dir: Path) -> None:
    """Losses up to rounding, the gathers of the file, and a checkpoint for any layout.

    The fall of the learning rate is the same in both: it is constant.
    """
    made = make_schedule("1f1b", num_devices=1, num_microbatches=2, num_shards=2)
    Path("order.txt").write_text(str(add_gathers(made, "op")))
    constant = (*SMALL, "optimizer.final_fraction=1", "optimizer.num_warmup_steps=0")
    profiles = f"run.profile_folder={tmp_path / 'profiles'}"
    sharded = resolve("digits-vit", [*constant, profiles, *SHARDED])
    run_dir = claim_folder(tmp_path / "sharded", sharded.to_toml())

    answers_of(ENTRY, str(run_dir), folder=tmp_path / "job", whole_s=RUN_TIMEOUT_S)

    rows = records(run_dir)
    (epoch,) = [row for row in rows if row["kind"] == "epoch"]
    assert epoch["layout"] == "1x1x2"
    played = json.loads((run_dir / TIMELINE_NAME).read_text())["schedule"]
    assert "0UNSHARD3 0B1 0RESHARD3 0R 0U" in played

    resume = f"checkpoint.resume={newest(run_dir / 'checkpoints')}"
    whole = resolve("digits-vit", [*constant, profiles, *WHOLE, resume])
    rest_dir = claim_folder(tmp_path / "whole", whole.to_toml())
    train_recipe(whole.recipe, rest_dir)
    rows += records(rest_dir)

    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    expected, _ = plain_loop(whole.recipe)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-4)
