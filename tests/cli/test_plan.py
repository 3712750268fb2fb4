"""`hocket plan`: tables, JSON and pages, from FLOPs and from measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import hocket
from hocket.cli.main import app
from tests.run.support.forked_command import hocket_forked

V100 = [
    *("plan", "digits-vit", "--devices", "4", "--hardware", "v100-32g"),
    *("--set", "model.num_blocks=2"),
]
LARGE = [*V100, "--batch-size", "16384"]


def shell(*arguments: str) -> Result:
    """What a call prints, and how it ends."""
    return CliRunner().invoke(app, list(arguments))


def test_the_table_names_the_choice_and_draws_it() -> None:
    """Few weights, many samples: data parallelism wins, and says so."""
    done = shell(*LARGE)
    assert done.exit_code == 0, done.output
    for word in ("samples", "limited", "peak", "ddp", "fsdp", "> best: of all within"):
        assert word in done.output
    assert "you need no pipeline" in done.output
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "makespan" in done.output


_UNKNOWN = """
import sys
from typer.testing import CliRunner
from hocket.cli.main import app
done = CliRunner().invoke(app, ["plan", "digits-vit", "--devices", "4", *sys.argv[1:]])
print(done.output, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("option", "kind"), [("--hardware", "device"), ("--links", "link")]
)
def test_unknown_names_are_refused_before_torch_is_imported(
    option: str, kind: str
) -> None:
    """It took six seconds to say that there is no such GPU."""
    command = [sys.executable, "-c", _UNKNOWN, option, "nope"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60.0, check=True
    )
    assert f"no {kind} is named 'nope'" in done.stdout
    assert done.stdout.rstrip().endswith("False")


def test_json_is_complete() -> None:
    """All outcomes, not only those of the table."""
    done = shell(*V100, "--batch-size", "16", "--json", "--all")
    document = json.loads(done.stdout)
    assert document["num_beaten"] == 0
    assert len(document["outcomes"]) == document["num_simulated"] > 100
    assert document["cluster"]["link"] == "nvlink2"


def test_the_costs_of_a_plan_are_those_of_a_simulation(tmp_path: Path) -> None:
    """The command that is printed predicts the same step, to the last digit."""
    plan = ("plan", "bert-24", "--layout", "4x2", "--hardware", "v100-16g")
    path = tmp_path / "costs.json"
    done = shell(*plan, "--costs-out", str(path), "--json")
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)["outcomes"]
    best = next(x for x in outcomes if x["fits"] and not x["is_data_parallel"])
    written, command = done.stderr.strip().splitlines()[-1].split(": hocket ")
    assert written == f"{path} written"
    assert command.startswith(f"simulate {best['schedule']} --devices 4 ")
    again = shell(*command.split(), "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["step_s"] == best["step_s"]


def test_a_page_with_pictures(tmp_path: Path) -> None:
    """The points, the best step, and all tables; loads nothing."""
    path = tmp_path / "plan.html"
    done = shell(*V100, "--html", str(path))
    assert done.exit_code == 0, done.output
    page = path.read_text()
    assert "<svg" in page
    assert "Every candidate" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--hardware", "v10"], "no device is named 'v10'"),
        (["--links", "nvlinc2"], "no link is named 'nvlinc2'"),
        (["--precision", "bfloat16"], "use float32 or float16"),
        (["--nodes", "3"], "cannot be shared evenly by 3 nodes"),
        (["--batch-size", "2"], None),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(
    more: list[str], words: str | None
) -> None:
    """Exit code 3, one sentence; small batches still have a plan."""
    done = shell(*V100, *more)
    if words is None:
        assert done.exit_code == 0
    else:
        assert done.exit_code == 3
        assert words in done.output


def test_measured_here_where_no_hardware_is_named(tmp_path: Path) -> None:
    """On this machine's CPU, with shared memory between workers."""
    small = "--batch-size", "16", "--set", "model.num_blocks=2"
    late = "--max-delay", "1", "--set", "pipeline.schedule=wpipe"
    done = hocket_forked(
        *("plan", "digits-vit", "-d", "2", *small, *late, "--json"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert any(outcome["delay"] for outcome in document["outcomes"])
    assert "measured on" in document["how"]
    assert document["cluster"]["link"] == "shared-memory"
    assert document["best"]["samples_per_s"] > 0


def test_a_network_that_is_counted_by_hand_is_planned_by_its_name() -> None:
    """Without a recipe, and so without settings of one."""
    bert = ["plan", "bert-24", "-d", "4", "--links", "nvlink2-mesh", "--json"]
    done = shell(*bert, "--hardware", "v100-16g")
    document = json.loads(done.stdout)
    assert document["batch_size"] == 96
    assert document["best"]["samples_per_s"] > 0
    refused = shell(*bert, "--hardware", "v100-16g", "--set", "model.width=8")
    assert refused.exit_code == 2
    assert "--set is for recipes" in refused.stderr


def test_the_python_way_is_the_same(tmp_path: Path) -> None:
    """`hocket.plan(model, batch, loss, ...)` of one's own model prints as a table."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    batch = (torch.randn(64, 256), torch.randn(64, 256))
    ranking: Any = hocket.plan(
        model,
        batch,
        nn.functional.mse_loss,
        num_devices=8,
        hardware="a100-80g",
        links="nvlink",
    )
    assert ranking.cluster.link.key == "nvlink3"
    assert "best: " in str(ranking)
    assert ranking.best.samples_per_s > 0


def test_a_recipe_that_reaches_out_is_planned_if_the_user_says_so(
    free_dir: Path,
) -> None:
    """Planning reads the data too; so it asks as training does."""
    (free_dir / "text.txt").write_text("To be, or not to be: " * 100)
    (free_dir / "sent").mkdir()
    recipe = free_dir / "sent" / "mine.toml"
    recipe.write_text(
        '[model]\nkind = "function"\nfunction = "examples.zoo.text:gpt"\nwidth = 16\n'
        "num_blocks = 2\nnum_heads = 2\nmlp_width = 16\n"
        '[data]\nkind = "function"\nfunction = "examples.zoo.text:windows"\n'
        'path = "../text.txt"\nwindow_bytes = 8\n'
        '[task]\nloss = "examples.zoo.text:loss"\n[optimizer]\nkind = "adamw"\n'
        "[training]\nbatch_size = 8\n"
    )
    arguments = ["plan", str(recipe), "-d", "2", "--hardware", "v100-32g", "--json"]
    refused = shell(*arguments)
    assert refused.exit_code == 2
    assert "--allow-outside" in refused.stderr
    allowed = shell(*arguments, "--allow-outside")
    assert allowed.exit_code == 0, allowed.output
    assert json.loads(allowed.stdout)["best"] is not None


def test_a_layout_names_the_devices_of_a_pipeline() -> None:
    """In the place of their number; both at once must agree."""
    bert = ["plan", "deep-bert-96", "--hardware", "v100-16g", "--max-delay", "1"]
    done = shell(*bert, "--layout", "4x2", "--batch-size", "32", "--json")
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)["outcomes"]
    pipelines = [x for x in outcomes if not x["is_data_parallel"]]
    assert {(x["num_devices"], x["num_replicas"]) for x in pipelines} == {(4, 2)}
    behind = [x for x in pipelines if x["schedule"] == "wpipe"]
    assert behind
    for outcome in behind:
        assert outcome["delay"] == 1
        assert outcome["num_versions"] == [2] * 4 + [1] * 4
        assert any(split["version_bytes"] for split in outcome["memory"])
    sharded = shell(*bert, "--layout", "2x2x2", "--batch-size", "32", "--json")
    outcomes = json.loads(sharded.stdout)["outcomes"]
    pipelines = [x for x in outcomes if not x["is_data_parallel"]]
    assert pipelines
    for outcome in pipelines:
        assert [outcome[f"num_{x}"] for x in ("devices", "replicas", "shards")] == [
            2
        ] * 3
    refused = shell(*bert, "--layout", "4x2", "--devices", "4")
    assert refused.exit_code == 2
    assert "is 8 devices, --devices says 4" in refused.stderr
    assert shell(*bert).exit_code == 2
