"""`hocket profile`: every layer in a table, and the profile kept for training."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.cli.profile import layer_rows, report
from hocket.env import ExitCode
from hocket.model.profile.profile import LayerProfile, Profile
from tests.run.support.forked_command import hocket_forked

ARGUMENTS: Final = (
    "profile",
    "digits-vit",
    "--workers=1",
    "--json",
    "--set=model.width=16",
    "--set=model.num_blocks=1",
    "--set=pipeline.num_microbatches=1",
    "--set=run.profile_folder=profiles",
)

SHOWN: Final[dict[str, Any]] = {
    "name": "blocks.0",
    "forward_s": 0.002,
    "input_grad_s": 0.001,
    "weight_grad_s": 0.003,
    "forward_spread_s": 0.0001,
    "backward_spread_s": 0.0002,
    "activation_bytes": 2048,
    "received_bytes": 1024,
}
OTHERS: Final[dict[str, Any]] = {
    field.name: 0 for field in fields(LayerProfile) if field.name not in SHOWN
}
LAYER: Final = LayerProfile(**SHOWN, **OTHERS)


@pytest.mark.timeout(150)
def test_a_profile_of_each_layer_is_kept(free_dir: Path) -> None:
    """As JSON in the folder that the recipe names, and printed as asked."""
    done = hocket_forked(*ARGUMENTS, cwd=free_dir, timeout_s=100, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)

    assert not result["was_kept"]
    assert Profile.load(free_dir / result["path"]).to_json() == result["profile"]
    profile = Profile.from_json(result["profile"])
    assert profile.conditions["num_samples"] == "64"
    assert {"patches", "head"} <= {layer.name for layer in profile.layers}
    assert all(layer.forward_s > 0 for layer in profile.layers)
    assert [path.name for path in free_dir.iterdir()] == ["profiles"]


def test_the_table_has_every_layer() -> None:
    """With its stage where one begins, and each number in a unit."""
    profile = Profile((LAYER, LAYER), {"num_samples": "8"})
    head, first, second = layer_rows(profile, [0])
    assert head[:3] == ("layer", "stage", "forward")
    assert first == (
        "blocks.0",
        "0",
        "2 ms",
        "100 µs",
        "1 ms",
        "3 ms",
        "200 µs",
        "2 KiB",
        "1 KiB",
    )
    assert second[1] == ""


def test_the_report_says_where_it_is_from() -> None:
    """Model, machine, prediction, file."""
    conditions = {"num_samples": "8", "device_name": "toaster", "num_threads": "1"}
    text = "\n".join(
        report(
            {
                "recipe": "mine",
                "profile": Profile((LAYER,), conditions).to_json(),
                "path": "profiles/profile-0.json",
                "was_kept": True,
                "stages": [0],
                "step_s": 0.05,
                "bubble_fraction": 0.25,
            }
        )
    )
    assert text.startswith("mine on toaster, one microbatch of 8;")
    assert "a step: 50 ms predicted, bubble 25.0 %" in text
    assert text.endswith("the profile was kept in profiles/profile-0.json")


def test_what_is_not_valid_starts_nothing(free_dir: Path) -> None:
    """As in `hocket train`."""
    result = CliRunner().invoke(app, ["profile", "text-gpt"])
    assert result.exit_code == ExitCode.USAGE
    assert "--set data.path=" in result.stderr
    assert not list(free_dir.iterdir())
