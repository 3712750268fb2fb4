"""PipeTransformer's experiments as recipes: their sizes, and each in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from hocket.cli.train import ENTRY
from hocket.errors import DataError
from hocket.freeze import Alpha
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.run_folder import claim_folder, enter_folder
from hocket.recipes.training.task import Task, make_task
from hocket.recipes.training.train import freezing_options, make_pipeline, train_recipe
from hocket.recipes.training.watchers import TENSORBOARD_NAME
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.data.sample_loader import SampleLoader
from tests.examples.test_squad import CONTEXT, file_of, question, write
from tests.recipes.models.test_kinds import image_folder, sst2
from tests.recipes.support.cifar_folder import cifar100
from tests.recipes.support.freeze_variants import VARIANTS
from tests.recipes.support.real_data import real
from tests.run.support.forked import answers_of
from tests.run.support.forked_launch import launch_forked

RUN_TIMEOUT_S: Final = 200.0  # a tenth of it on free cores
BATCH: Final = 8
SMALL: Final = (
    "model.width=8",
    "model.num_blocks=4",
    "model.num_heads=2",
    "model.mlp_width=16",
    f"training.batch_size={BATCH}",
    "training.num_loaders=0",
    "optimizer.num_warmup_steps=0",
    "pipeline.num_microbatches=2",
)
IMAGES: Final = (
    *("data.side=32", "model.patch_size=16"),
    *("model.kind=vit", "model.function="),  # in place of timm's
)
DRAWN: Final = (
    *("data_s", "forward_s", "backward_s", "reduce_s", "cache_s", "transition_s"),
    *("num_active_parameters", "num_frozen_parameters", "num_stages", "num_replicas"),
)
NOT_DRAWN: Final = {"kind", "layout", "epoch", "num_steps", "num_samples"}
SENTENCES: Final = ("data.num_tokens=32", "data.num_pieces=200")


def squad(folder: Path) -> None:
    """Eight questions about one paragraph."""
    said = ("1889", "Gustave Eiffel", "Paris", "tower")
    questions = [question(CONTEXT, said[i % 4], id=str(i)) for i in range(BATCH)]
    write(folder, file_of(CONTEXT, *questions))


@dataclass(frozen=True, slots=True)
class Published:
    """What the paper's scripts say of a recipe.

    Args:
        width: of the model.
        num_blocks: of the model.
        num_epochs: of training.
        batch_size: of each pipeline.
        settings: that make the data small.
        write: a small folder of the data's form.
    """

    width: int
    num_blocks: int
    num_epochs: int
    batch_size: int
    settings: tuple[str, ...]
    write: Callable[[Path], Any]


RECIPES: Final = {
    "cifar100-vit": Published(768, 12, 10, 320, IMAGES, lambda x: cifar100(x, 32)),
    "imagenet-vit": Published(768, 12, 10, 400, IMAGES, image_folder),
    "sst2-bert": Published(768, 12, 3, 64, SENTENCES, sst2),
    "squad-bert": Published(
        1024,
        24,
        3,
        64,
        (*SENTENCES, "data.num_question_tokens=8", "data.stride=8"),
        squad,
    ),
}


def small(name: str, folder: Path) -> tuple[str, ...]:
    """The settings that make a recipe small, with its data in a folder."""
    published = RECIPES[name]
    folder.mkdir()
    published.write(folder)
    profiles = f"run.profile_folder={folder / 'profiles'}"
    return (f"data.path={folder}", profiles, *SMALL, *published.settings)


@pytest.mark.parametrize("name", RECIPES)
def test_is_of_the_published_size(name: str) -> None:
    """Eight devices in one pipeline; alpha 1/5 at the ends of epochs, or none."""
    recipe, published = resolve(name, ["data.path=any"]).recipe, RECIPES[name]
    model: Any = recipe.model

    assert (model.width, model.num_blocks) == (published.width, published.num_blocks)
    assert recipe.training.num_epochs == published.num_epochs
    assert recipe.training.batch_size == published.batch_size
    assert recipe.pipeline.layout == "8x1"
    found = freezing_options(recipe.freeze, recipe.cache, 5, Path())
    assert found["freeze"] == Alpha(1 / 5, every_steps=5)
    asked = ["data.path=any", "freeze.policy=alpha"]
    assert resolve(name, asked).recipe == recipe
    baseline = resolve(name, ["data.path=any", "freeze.policy=none"]).recipe
    assert freezing_options(baseline.freeze, baseline.cache, 5, Path()) == {}


@pytest.mark.parametrize("name", RECIPES)
def test_model_and_data_fit_together(name: str, tmp_path: Path) -> None:
    """A batch goes through and back."""
    recipe = resolve(name, small(name, tmp_path / "data")).recipe
    task = make_task(recipe)
    inputs, targets = SampleLoader(task.training, BATCH).example()
    model = task.make_model()
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    named_losses(task.loss(output, targets))[TOTAL].backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


def test_reads_the_real_sst2() -> None:
    """Thousands of sentences, of at most 256 tokens."""
    settings = [f"data.path={real('sst2')}", "data.num_pieces=8000", *SMALL]
    task = make_task(resolve("sst2-bert", settings).recipe)
    inputs, labels = SampleLoader(task.training, BATCH).example()
    assert task.training.num_samples > 5_000
    assert inputs["input_ids"].shape == (BATCH, 256)
    assert {*labels.tolist()} <= {0, 1}


def test_answers_are_scored_as_squad_scores_them(tmp_path: Path) -> None:
    """A few steps on one worker: F1 is at least exact match, both are shares."""
    settings = (
        *small("squad-bert", tmp_path / "data"),
        "pipeline.layout=1x1",
        "training.max_steps=3",
        "freeze.every_steps=1",
    )
    resolved = resolve("squad-bert", settings)
    run_dir = claim_folder(tmp_path / "run", resolved.to_toml())
    evaluation = train_recipe(resolved.recipe, run_dir)
    found = dict(evaluation.metrics)
    assert [*found] == ["f1", "exact_match"]
    assert 0.0 <= found["exact_match"] <= found["f1"] <= 1.0
    assert evaluation.loss > 0.0


def test_a_cache_of_random_samples_is_refused_before_the_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recipe's own setting: it was found after capture and profiling."""
    settings = (
        *small("cifar100-vit", tmp_path / "data"),
        "pipeline.layout=1x1",
        "cache.ram_bytes=10000000",
    )
    recipe = resolve("cifar100-vit", settings).recipe
    monkeypatch.setattr(Task, "make_model", lambda _: pytest.fail("it is made"))
    with pytest.raises(DataError, match=r"differ .* --set cache.draws_once=true draws"):
        make_pipeline(make_task(recipe), tmp_path, profile_dir=None)


def drawn_of(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of epochs: steps and values, by tag."""
    board = EventAccumulator(str(run_dir / TENSORBOARD_NAME))
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith("epoch/")]
    return {tag: [(x.step, x.value) for x in board.Scalars(tag)] for tag in tags}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard
@pytest.mark.timeout(220)
def test_layers_freeze_and_workers_become_replicas(tmp_path: Path) -> None:
    """Two workers, an epoch of four steps at 2x1, then two at 1x2."""
    settings = (
        *small("cifar100-vit", tmp_path / "data"),
        "pipeline.layout=2x1",
        "training.num_epochs=3",
        "freeze.alpha=0.5",
        'freeze.shapes={2 = "1x2"}',
        "cache.ram_bytes=10000000",
        "cache.draws_once=true",
    )
    resolved = resolve("cifar100-vit", settings)
    steps_per_epoch = make_task(resolved.recipe).steps_in()
    run_dir, lock = enter_folder(resolved, tmp_path / "run")
    answers_of(ENTRY, str(run_dir), folder=tmp_path, whole_s=RUN_TIMEOUT_S)
    lock.release()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    epochs = [record for record in records if record["kind"] == "epoch"]

    assert [x["num_steps"] for x in epochs] == [steps_per_epoch * n for n in (1, 2, 3)]
    assert [x["layout"] for x in epochs] == ["2x1", "1x2", "1x2"]
    assert [x["num_frozen"] for x in epochs] == [0, 2, 3]
    assert [x["transition_s"] > 0 for x in epochs] == [False, True, True]
    whole = epochs[0]["num_active_parameters"]
    assert all(
        x["num_active_parameters"] + x["num_frozen_parameters"] == whole for x in epochs
    )
    assert epochs[0]["message_bytes_per_s"] > 0
    assert epochs[0]["num_reductions"] == 0 < epochs[1]["num_reductions"]
    assert [x["cache_s"] > 0 for x in epochs] == [False, True, True]
    assert drawn_of(run_dir) == {
        f"epoch/{name}": [
            (x["num_steps"], pytest.approx(inf if x[name] is None else x[name]))
            for x in epochs
        ]
        for name in epochs[0].keys() - NOT_DRAWN
    } | {
        "epoch/num_stages": [(n * steps_per_epoch, 2 - (n > 1)) for n in (1, 2, 3)],
        "epoch/num_replicas": [(n * steps_per_epoch, 1 + (n > 1)) for n in (1, 2, 3)],
    }
    assert {f"epoch/{name}" for name in DRAWN} <= drawn_of(run_dir).keys()
    page = (run_dir / "report.html").read_text()
    assert "1x2" in page
    assert "transition" in page


@pytest.mark.long  # tests/recipes/config/test_freeze.py has what becomes of settings
@pytest.mark.timeout(220)
def test_each_part_can_be_left_out(tmp_path: Path) -> None:
    """By settings of a recipe; that replicas alone are made, the test above shows."""
    settings = [
        *small("cifar100-vit", tmp_path / "data"),
        *("pipeline.layout=2x1", "training.num_epochs=3"),
    ]
    entry = "tests.recipes.support.freeze_variants:train_variants"
    arguments = [settings, str(tmp_path)]
    found, other = launch_forked(entry, arguments, num_workers=2, run_dir=tmp_path)

    assert found == other
    assert {*found} == {*VARIANTS}
    ends = {name: [tuple(x[:2]) for x in epochs] for name, epochs in found.items()}
    assert ends["nothing freezes"] == [("2x1", 0)] * 3
    assert ends["cut again"] == [("2x1", 0), ("2x1", 2), ("2x1", 2)]
    assert ends["cut again"] == ends["cache"] == ends["frozen in place"]
    assert ends["all"] == [("2x1", 0), ("1x2", 2), ("1x2", 2)]
    assert ends["greedy"] == ends["all"]  # the stem has most of the parameters
    hits = {name: [x[2] for x in epochs] for name, epochs in found.items()}
    assert hits["cache"] == hits["all"] == [0, 0, 32]
    assert not any(sum(x) for name, x in hits.items() if name not in ("cache", "all"))
