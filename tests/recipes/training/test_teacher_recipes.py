"""Recipes with a teacher: the published sizes, a plain loop's numbers, two workers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from hocket.cli.train import ENTRY
from hocket.planner.rank import PlanConfig
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.models.make import Predicting, Projected
from hocket.recipes.training.optimizer import make_optimizer, make_scheduler
from hocket.recipes.training.run_folder import claim_folder, enter_folder
from hocket.recipes.training.task import make_task
from hocket.recipes.training.train import plan_recipe, train_recipe
from hocket.run.data.loss import TOTAL, named_losses
from tests.recipes.support.cifar_folder import cifar10
from tests.run.support.forked import answers_of

RUN_TIMEOUT_S: Final = 200.0  # a tenth of it on free cores
SMALL: Final = (
    "model.width=16",
    "training.batch_size=30",
    "training.max_steps=4",
    "optimizer.num_warmup_steps=2",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=3",
)
TEACHER: Final = (
    "teacher_model.kind=vit",
    "teacher_model.width=8",
    "teacher_model.num_heads=2",
    "teacher_model.num_blocks=1",
    "teacher_model.mlp_width=8",
)
VIEWS: Final = (
    "data.max_samples=16",
    "model.width=16",
    "teacher.head_width=16",
    "teacher.output_width=8",
    "training.batch_size=8",
    "training.num_epochs=2",
    "training.num_loaders=0",
    "training.evaluate_every_epochs=1",
    "optimizer.num_warmup_steps=1",
    "checkpoint.every_epochs=2",
)
SMALL_VIT: Final = (
    "model.num_heads=2",
    "model.num_blocks=2",
    "model.mlp_width=16",
    "model.patch_size=16",
)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [x for x in map(json.loads, lines) if x["kind"] == kind]


@dataclass(frozen=True, slots=True)
class Own:
    """A teacher's outputs of these samples, as a loss reads them."""

    own: torch.Tensor


def plain_loop(recipe: Recipe) -> list[float]:
    """The losses of each step, of a loop over microbatches without a pipeline."""
    task = make_task(recipe)
    model = task.make_model()
    teacher = task.make_teachers()["teacher"].net.eval()
    optimizer = make_optimizer(recipe.optimizer)(model.parameters())
    scheduler = make_scheduler(task.learning_rate_share)(optimizer)
    losses = []
    for inputs, targets in task.loader():
        total = torch.zeros(())
        for some, wanted in zip(inputs.split(10), targets.split(10), strict=True):
            with torch.no_grad():
                teachers = {"teacher": Own(teacher(some))}
            found = task.loss(model(some), wanted, teachers)
            total = total + named_losses(found)[TOTAL] / 3
        losses.append(total.item())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        scheduler.step()
    return losses


def test_distillation_trains_as_a_plain_loop(tmp_path: Path) -> None:
    """Same batches, teacher, weights and learning rates: same losses."""
    profiles = f"run.profile_folder={tmp_path / 'profiles'}"
    resolved = resolve("kd-digits", [*SMALL, *TEACHER, profiles])
    run_dir = claim_folder(tmp_path / "run", resolved.to_toml())
    evaluation = train_recipe(resolved.recipe, run_dir)

    losses = [step["loss"] for step in records(run_dir, "step")]
    assert losses == pytest.approx(plain_loop(resolved.recipe), rel=1e-4)
    assert 0 <= evaluation.metrics["accuracy"] <= 1


def bert(prefix: str, num_blocks: int) -> tuple[str, ...]:
    """Settings of a small BERT."""
    sizes = ("width=16", "num_heads=2", "mlp_width=16", f"num_blocks={num_blocks}")
    kind = ("kind=function", "function=examples.zoo.bert:bert")
    return tuple(f"{prefix}.{x}" for x in (*sizes, *kind))


def test_distilbert_has_three_losses(tmp_path: Path) -> None:
    """Their weighted sum is what is trained, on a text; evaluated by guesses."""
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be\n" * 100)
    settings = (
        f"data.path={path}",
        "data.num_tokens=8",
        *bert("model", 1),
        *bert("teacher_model", 2),
        *SMALL[1:],
        f"run.profile_folder={tmp_path / 'profiles'}",
    )
    resolved = resolve("kd-distilbert", settings)
    run_dir = claim_folder(tmp_path / "run", resolved.to_toml())
    evaluation = train_recipe(resolved.recipe, run_dir)

    assert 0 <= evaluation.metrics["masked_accuracy"] <= 1
    steps = records(run_dir, "step")
    assert len(steps) == 4
    for step in steps:
        soft, mlm, cosine = (step[x] for x in ("soft", "mlm", "cosine"))
        assert step["loss"] == pytest.approx(5 * soft + 2 * mlm + cosine, rel=1e-4)


@pytest.mark.parametrize("name", ["cifar10-byol", "cifar10-mocov3"])
def test_a_teacher_begins_as_the_student(name: str, tmp_path: Path) -> None:
    """Without its predictor; and a batch is two views of as many images."""
    sizes = (*VIEWS, *(SMALL_VIT if "moco" in name else ()))
    recipe = resolve(name, [f"data.path={cifar10(tmp_path)}", *sizes]).recipe
    task = make_task(recipe)
    student = task.make_model()
    teacher = task.make_teachers()["teacher"]

    assert isinstance(student, Predicting)
    assert isinstance(teacher.net, Projected)
    assert not isinstance(teacher.net, Predicting)
    state = student.state_dict()
    assert all(torch.equal(state[k], x) for k, x in teacher.net.state_dict().items())
    assert {k.partition(".")[0] for k in state.keys() - teacher.net.state_dict()} == {
        "predictor"
    }
    inputs, targets = next(iter(task.loader()))
    assert inputs.shape == (16, 3, 32, 32)
    assert targets[:8].equal(targets[8:])
    assert not inputs[:8].equal(inputs[8:])


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    "name", [pytest.param("cifar10-byol", marks=pytest.mark.long), "cifar10-mocov3"]
)
def test_two_views_train_on_two_workers(name: str, tmp_path: Path) -> None:
    """Steps, k-NN accuracies, and a checkpoint with both nets, as `hocket train`."""
    (tmp_path / "data").mkdir()
    sizes = (*VIEWS, *(SMALL_VIT if "moco" in name else ()))
    settings = (
        f"data.path={cifar10(tmp_path / 'data')}",
        f"run.profile_folder={tmp_path / 'profiles'}",
        *sizes,
    )
    run_dir, lock = enter_folder(resolve(name, settings), tmp_path / "run")
    answers_of(ENTRY, str(run_dir), folder=tmp_path, whole_s=RUN_TIMEOUT_S)
    lock.release()
    evaluations = records(run_dir, "evaluation")

    assert [step["num_samples"] for step in records(run_dir, "step")] == [16] * 4
    assert len(evaluations) == 2
    assert all(0 <= x["knn_accuracy"] <= 1 for x in evaluations)
    assert list((run_dir / "checkpoints").glob("step-*"))


def trained(folder: Path, *settings: str) -> list[float]:
    """The losses of MoCo-v3 on one worker, of the steps that this run trained."""
    folder.mkdir()
    data = f"data.path={cifar10(folder)}"
    profiles = f"run.profile_folder={folder / 'profiles'}"
    one = ("pipeline.num_workers=1", "pipeline.num_microbatches=2")
    every = (*VIEWS, *SMALL_VIT, *one, data, profiles, *settings)
    resolved = resolve("cifar10-mocov3", every)
    run_dir = claim_folder(folder / "run", resolved.to_toml())
    train_recipe(resolved.recipe, run_dir)
    return [step["loss"] for step in records(run_dir, "step")]


def test_a_run_with_two_views_goes_on(tmp_path: Path) -> None:
    """From a checkpoint of both nets, with a delayed teacher: the same losses."""
    delay = "teacher.delay=1"
    saves = ("checkpoint.every_epochs=", "checkpoint.every_steps=2")
    whole = trained(tmp_path / "whole", delay, *saves)
    checkpoints = tmp_path / "whole" / "run" / "checkpoints"
    first = next(iter(checkpoints.glob("step-*2")))
    rest = trained(tmp_path / "rest", delay, f"checkpoint.resume={first}")

    assert len(whole) == 4
    assert rest == whole[2:]


def test_a_plan_says_what_the_teacher_gains() -> None:
    """In a note beside the ranking, for a kind of device."""
    config = PlanConfig(num_devices=2, hardware="v100-32g")
    ranking = plan_recipe(resolve("kd-digits", [*SMALL, *TEACHER]), config)
    assert any("With teacher" in note for note in ranking.notes)


def folder_of_images(folder: Path) -> Path:
    """256 images of 100 classes to train on, and one to evaluate on."""
    image = pytest.importorskip("PIL.Image", reason="extra `vision`").new("RGB", (4, 4))
    for number in range(256):
        inside = folder / "train" / f"{number % 100:02}"
        inside.mkdir(parents=True, exist_ok=True)
        image.save(inside / f"{number}.png")
    (folder / "val" / "00").mkdir(parents=True)
    image.save(folder / "val" / "00" / "x.png")
    return folder


def millions(net: nn.Module) -> float:
    """How many million parameters a net has."""
    return sum(x.numel() for x in net.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("imagenet100-vit", [], 303),
        (
            "imagenet100-vit",
            [
                "model.patch_size=14",
                "model.width=1280",
                "model.num_blocks=32",
                "model.mlp_width=5120",
            ],
            631,
        ),
        ("kd-soft-target", ["teacher.weights=any"], 58),
        ("kd-soft-target", ["teacher.weights=any", "model.depth=101"], 43),
    ],
)
def test_distillation_has_the_published_sizes(
    name: str, settings: list[str], expected: float, tmp_path: Path
) -> None:
    """TSPipe's poster: ViT-Large and -Huge teach ResNet-101 and -152, 16 a batch."""
    if "vit" in name:
        pytest.importorskip("timm", reason="extra `recipes`")
    path = f"data.path={folder_of_images(tmp_path)}"
    recipe = resolve(name, [path, *settings]).recipe
    task = make_task(recipe)
    with torch.device("meta"):
        net = task.make_model()

    assert millions(net) == pytest.approx(expected, rel=0.01)
    assert recipe.pipeline.num_workers == 8
    if recipe.teacher is not None:
        assert recipe.training.batch_size == 16


@pytest.mark.parametrize(
    ("name", "depth", "expected"),
    [
        ("byol-resnet", 50, 23.5),
        ("byol-resnet", 101, 42.5),
        ("byol-resnet", 152, 58.1),
        ("mocov3-vit", 12, 85.8),
    ],
)
def test_two_views_have_the_published_sizes(
    name: str, depth: int, expected: float, tmp_path: Path
) -> None:
    """Of the net without heads; with a momentum that rises to 1."""
    if "vit" in name:
        pytest.importorskip("timm", reason="extra `recipes`")
    key = "num_blocks" if "vit" in name else "depth"
    path = f"data.path={folder_of_images(tmp_path)}"
    recipe = resolve(name, [path, f"model.{key}={depth}"]).recipe
    task = make_task(recipe)
    with torch.device("meta"):
        net = task.make_model()

    assert isinstance(net, Predicting)
    assert millions(net.model) == pytest.approx(expected, rel=0.01)
    assert recipe.teacher is not None
    assert recipe.teacher.final_momentum == 1.0
    assert recipe.training.batch_size == (256 if name == "byol-resnet" else 128)


@pytest.mark.parametrize(
    ("name", "width", "num_blocks", "expected"),
    [
        ("text-bert", 768, 12, 110),
        ("kd-distilbert", 768, 6, 67),
        ("text-bert", 2048, 24, 1280),
        ("kd-distilbert", 2048, 8, 473),
    ],
)
def test_bert_has_the_published_sizes(
    name: str, width: int, num_blocks: int, expected: float, tmp_path: Path
) -> None:
    """BERT-base and -xlarge, and their students; of a vocabulary of 30,522 pieces."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to"]
    entries = [*special, *map(str, range(30_522 - len(special)))]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    (tmp_path / "text.txt").write_text("to to to to\n" * 40_000)
    settings = [
        f"data.path={tmp_path / 'text.txt'}",
        f"data.vocabulary={tmp_path / 'vocab.txt'}",
        f"model.width={width}",
        f"model.mlp_width={4 * width}",
        f"model.num_heads={width // 64}",
        f"model.num_blocks={num_blocks}",
    ]
    if name == "kd-distilbert":
        settings.append("teacher.weights=any")
    recipe = resolve(name, settings).recipe
    task = make_task(recipe)
    with torch.device("meta"):
        net = task.make_model()

    assert millions(net) == pytest.approx(expected, rel=0.01)
