"""What was removed: the CHANGELOG's first table says what to write instead."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from typer.testing import CliRunner

import hocket
from hocket.cli.main import app
from hocket.errors import RecipeError
from hocket.recipes.config.resolve import resolve
from hocket.recipes.user_functions import load_function

# Modules whose packages are not installed everywhere.
NOT_HERE: Final = {
    module
    for module, package in {
        "examples.zoo.vit": "timm",
        "examples.zoo.saved": "datasets",
    }.items()
    if find_spec(package) is None
}
CHANGELOG: Final = (Path(__file__).parents[1] / "CHANGELOG.md").read_text("utf-8")
BATCH: Final = (torch.ones(4, 16), torch.zeros(4, 16))


def rows() -> list[tuple[str, str]]:
    """What was removed, and what to write."""
    table = CHANGELOG.partition("| removed | write instead |\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    return [(cell[0], cell[1]) for cell in cells]


def made(model: nn.Module | None = None, **options: Any) -> hocket.Pipeline:
    """Of one device."""
    torch.manual_seed(0)
    return hocket.Pipeline(
        nn.Sequential(nn.Linear(16, 16)) if model is None else model,
        nn.functional.mse_loss,
        **{
            "optimizer": lambda p: torch.optim.SGD(p, 0.1),
            "example": BATCH,
            "num_microbatches": 2,
            **options,
        },
    )


def test_public_names_are_gone() -> None:
    """No name that the table lists is left, and no argument."""
    removed = " ".join(cell for cell, _ in rows())
    names = re.findall(r"`hocket\.(\w+)[\w.]*`", removed)
    assert {"fit", "EarlyStop", "ProfileSteps", "Logger"} <= {*names}
    assert not [
        x for x in names if x not in ("checkpoint", "draw") and x in dir(hocket)
    ]
    for option in ("profile", "correction", "num_discounted_updates"):
        given: dict[str, Any] = {option: 1}
        with pytest.raises(hocket.ConfigError, match=f"no argument '{option}'"):
            made(**given)


def test_a_loop_fits_and_stops_early(tmp_path: Path) -> None:
    """In place of `fit`, `EarlyStop` and loggers: an `if`, a `break` and a writer."""
    from torch.utils.tensorboard import SummaryWriter

    losses = []
    with made() as pipeline:
        board = SummaryWriter(str(tmp_path)) if pipeline.is_main else None
        for result in pipeline.train([BATCH] * 200):
            losses.append(pipeline.evaluate([BATCH]).loss)
            if board is not None:
                board.add_scalar("train/loss", result.loss, result.step)
            if losses[-1] < 0.5 * losses[0]:
                break
        if board is not None:
            board.close()
    assert 1 < len(losses) < 200
    assert [x.name for x in tmp_path.iterdir() if "tfevents" in x.name]


def test_torchs_profiler_goes_around_the_loop(tmp_path: Path) -> None:
    """In place of `ProfileSteps`."""
    with (
        made() as pipeline,
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(tmp_path)),
        ) as profiler,
    ):
        for _ in pipeline.train([BATCH] * 3):
            profiler.step()
    assert [*tmp_path.glob("*.json")]


def test_weights_are_loaded_into_the_plain_model(tmp_path: Path) -> None:
    """In place of imports: before the pipeline is made."""
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    save_model(source, str(tmp_path / "x.safetensors"))
    load_model(model, str(tmp_path / "x.safetensors"))
    with made(model) as pipeline:
        state = pipeline.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in source.state_dict().items())


def test_smaller_rates_damp_delayed_layers() -> None:
    """In place of corrections: a rate for each group, by the parameters' names."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [x], "lr": 0.05 if name.startswith("0.") else 0.1}
            for name, x in parameters.named()
        ]
        return torch.optim.SGD(groups)

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    options = {"schedule": "pipedream-2bw", "optimizer": optimizer}
    with made(model, **options) as pipeline:
        losses = [x.loss for x in pipeline.train([BATCH] * 4)]
    assert losses[-1] < losses[0]


def test_waves_run_on_a_cpu() -> None:
    """In place of their emulator."""
    torch.manual_seed(0)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    with hocket.Waves(
        nn.Linear(16, 16), nn.functional.mse_loss, optimizer=optimizer
    ) as waves:
        losses = [x.loss for x in waves.train([BATCH] * 4)]
    assert losses[-1] < losses[0]


def test_a_picture_is_an_svg() -> None:
    """cairosvg makes a PNG of it; the shell and nvidia-smi know the machine."""
    order = hocket.make_schedule("1f1b", num_devices=2, num_microbatches=4)
    svg = hocket.draw.to_svg(hocket.simulate(order, hocket.Costs.uniform()))
    assert svg.startswith("<svg")
    assert all(shutil.which(name) for name in ("nproc", "uptime"))


def test_two_runs_are_drawn_above_each_other(tmp_path: Path) -> None:
    """In place of the page that `hocket compare` wrote: what each run has measured."""
    costs, paths = hocket.Costs.uniform(), [tmp_path / x for x in ("a.json", "b.json")]
    for path, name in zip(paths, ("gpipe", "1f1b"), strict=True):
        order = hocket.make_schedule(name, num_devices=2, num_microbatches=4)
        path.write_text(hocket.simulate(order, costs).to_json())
    page = tmp_path / "both.html"
    files = [*map(str, paths)]
    assert CliRunner().invoke(app, ["draw", *files, "-o", str(page)]).exit_code == 0
    assert all(f">{path.stem}<" in page.read_text() for path in paths)
    refused = CliRunner().invoke(app, ["compare", *files, "--html", str(page)])
    assert "No such option" in refused.output


def test_a_linear_probe_is_a_logistic_regression() -> None:
    """On standardised features."""
    pytest.importorskip("sklearn", reason="extra `recipes`")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)).numpy()
    labels = features[:, 0] > 0
    probe = make_pipeline(StandardScaler(), LogisticRegression())
    assert probe.fit(features, labels).score(features, labels) > 0.9


def kinds(section: str) -> set[str]:
    """The kinds of [model] or [data] that the table lists."""
    cells = [cell for cell, _ in rows() if cell.startswith(f"`{section}.kind` ")]
    return {x for cell in cells for x in re.findall(r"`([\w-]+)`", cell)}


def functions() -> list[str]:
    """What recipes name instead: `module:function`, or a further function of it."""
    found, module = list[str](), ""
    for _, cell in rows():
        for name in re.findall(r"`([^` ]+)`", cell):
            path = name.rpartition("=")[2]
            module = path.partition(":")[0] if ":" in path else module
            if ":" in path:
                found.append(path)
            elif module.startswith("examples.zoo") and re.fullmatch(r"\w+", name):
                found.append(f"{module}:{name}")
    return found


def test_recipes_name_functions_in_place_of_kinds() -> None:
    """Each of the zoo is there; a kind that has left is refused, as `arguments` are."""
    pytest.importorskip("torchvision", reason="extra `vision`")
    assert {"cifar10", "image-folder", "glue"} <= kinds("data")
    assert {"resnet", "torchvision", "bert"} <= kinds("model")
    for section in ("data", "model"):
        for kind in kinds(section):
            with pytest.raises(RecipeError, match=f"{section}.kind: no kind {kind!r}"):
                resolve("digits-vit", [f"{section}.kind={kind}"])
    assert {"examples.zoo.pictures:stl10", "torchvision.models:resnet18"} <= {
        *functions()
    }
    for name in functions():
        if name.split(":")[0] not in NOT_HERE:
            assert callable(load_function(name)), name
    given = ["model.kind=function", "model.function=a:b", "model.arguments={x = 1}"]
    with pytest.raises(RecipeError, match=r"model\.arguments: .* finite number"):
        resolve("digits-vit", given)
