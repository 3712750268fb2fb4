"""Two views of images of every reader, and whose classes the k-NN classifier knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.objectives import KnnEvaluation
from hocket.recipes.training.task import Task, make_task
from hocket.run.weights.momentum import CopyEvery, Momentum
from tests.recipes.models.test_kinds import image_folder
from tests.recipes.support import stl10_folder
from tests.recipes.support.cifar_folder import cifar10

SIDE: Final = 32
NUM_STEPS: Final = 70
SMALL: Final = (
    "model.width=4",
    "model.num_blocks=1",
    "training.batch_size=4",
    "pipeline.num_microbatches=1",
    f"data.side={SIDE}",
)


def task_of(kind: str, write: Callable[[Path], object], folder: Path) -> Task:
    """BYOL of these images."""
    write(folder)
    return make_task(resolved(kind, folder))


def resolved(kind: str, folder: Path, *settings: str) -> Recipe:
    """The recipe."""
    data = [f"data.function=examples.zoo.{kind}", f"data.path={folder}"]
    taken = ["data.shift_pixels=", "data.flip="]
    return resolve("cifar10-byol", [*SMALL, *data, *taken, *settings]).recipe


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("cifar:cifar10", cifar10),
        ("pictures:image_folder", image_folder),
        ("pictures:stl10", stl10_folder.write),
    ],
)
def test_views_of_all_readers(
    kind: str, write: Callable[[Path], object], tmp_path: Path
) -> None:
    """Normalised tensors of one size; the same image twice, by its row."""
    task = task_of(kind, write, tmp_path)
    knn = task.evaluate
    assert isinstance(knn, KnnEvaluation)
    views, num = knn.views, knn.test.samples.num_samples
    rows = torch.tensor([0, num])
    both = views.inputs(rows, None)

    assert both.shape == (2, 3, SIDE, SIDE)
    assert both[0].equal(both[1])
    expected = knn.test.samples.targets(rows[:1], None).repeat(2)
    assert views.targets(rows, None).equal(expected)
    assert task.metrics is None


def test_the_classifier_knows_labelled_images(tmp_path: Path) -> None:
    """Where training is on images without labels, those of the same data with some."""
    stl10_folder.write(tmp_path)
    task = make_task(resolved("pictures:stl10", tmp_path, "data.unlabeled=true"))
    knn = task.evaluate
    assert isinstance(knn, KnnEvaluation)
    rows = torch.arange(task.training.num_samples)
    assert task.training.targets(rows, None).eq(-1).all()
    assert knn.training.samples.targets(torch.arange(2), None).ge(0).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["teacher.update=momentum", "teacher.momentum=0.9"], Momentum(0.9)),
        (
            [
                "teacher.update=momentum",
                "teacher.momentum=0.9",
                "teacher.final_momentum=1.0",
                "teacher.buffers=averaged",
            ],
            Momentum(0.9, 1.0, NUM_STEPS, buffers="averaged"),
        ),
        (
            ["teacher.update=copy", "teacher.copy_every_steps=3"],
            CopyEvery(3),
        ),
    ],
)
def test_a_teacher_moves_as_the_section_says(
    settings: list[str], expected: Momentum | CopyEvery
) -> None:
    """A momentum rises over the whole training."""
    delay = int(expected.buffers == "own")  # old versions of others are not kept
    more = [f"teacher.delay={delay}", f"training.max_steps={NUM_STEPS}"]
    recipe = resolve("kd-digits", [*settings, *more]).recipe
    teacher = make_task(recipe).make_teachers()["teacher"]
    assert teacher.update == expected
    assert teacher.delay == delay
    assert not teacher.whole_batch
