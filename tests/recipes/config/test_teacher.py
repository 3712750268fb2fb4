"""The section [teacher]: what it needs, and what it refuses, with the key."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hocket.recipes.config.resolve import resolve
from tests.recipes.config.test_resolve import SMALL, faults, write

FROZEN: Final = ("teacher.kind=distillation", "teacher.weights=runs/x")
CIFAR: Final = ("data.kind=function", "data.function=a:b")
BYOL: Final = ("teacher.kind=byol", "teacher.update=momentum", "teacher.momentum=0.9")


def test_no_teacher_where_none_is_said(free_dir: Path) -> None:
    """The text of such a recipe has no such section."""
    resolved = resolve(write(free_dir, SMALL))
    assert resolved.recipe.teacher is None
    assert "teacher" not in resolved.to_toml()


def test_a_teacher_reads_back(free_dir: Path) -> None:
    """With its defaults, and the path of its weights from the current folder."""
    resolved = resolve(write(free_dir, SMALL), FROZEN)
    again = resolve(write(free_dir, resolved.to_toml(), "again.toml"))
    assert again.recipe.teacher == resolved.recipe.teacher
    assert resolved.recipe.teacher is not None
    assert resolved.recipe.teacher.weights == str(free_dir / "runs/x")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["teacher.kind=byoll"], "teacher.kind: no kind 'byoll'; did you mean 'byol'?"),
        (["teacher.weights=x"], "teacher.kind: missing; there are 'distillation', "),
        ([*FROZEN, "teacher.weigth=1"], "teacher.weigth: no such key; did you mean"),
        (["teacher.kind=distillation"], "teacher.weights: missing: name the folder"),
        ([*FROZEN, "teacher.momentum=0.9"], "momentum 0.9 has no effect with update"),
        ([*FROZEN, "teacher.delay=1"], "delay 1 has no effect with update 'frozen'"),
        ([*FROZEN, "teacher.update=momentum"], "momentum is missing"),
        ([*FROZEN, "teacher.update=copy"], "copy_every_steps is missing"),
        (
            [*FROZEN, "teacher.soft_weight=0", "teacher.hard_weight=0"],
            "soft_weight and hard_weight are 0",
        ),
        ([*FROZEN, "task.loss=a:b"], "task.loss: has no effect with a section"),
        (["teacher_model.kind=vit"], "has no effect without a section [teacher]"),
        (
            [*CIFAR, *BYOL, "teacher_model.kind=vit"],
            "teacher_model: has no effect with teacher.update 'momentum'",
        ),
        (
            ["teacher.kind=distilbert", "teacher.weights=x"],
            "teacher.kind 'distilbert' reads masked text, not 'digits'",
        ),
        (BYOL, "reads two views of colour images, not 'digits'"),
        ([*CIFAR, *BYOL, "task.metrics=a:b"], "features are evaluated by k-NN"),
        (
            [*CIFAR, "teacher.kind=mocov3", "teacher.weights=x"],
            "teacher.update 'frozen': with teacher.kind 'mocov3' the teacher follows",
        ),
    ],
)
def test_says_what_is_wrong(settings: list[str], message: str, free_dir: Path) -> None:
    """In the recipe's own words, before anything is loaded."""
    assert message in faults(write(free_dir, SMALL), *settings)


def test_a_file_names_no_weights_elsewhere(free_dir: Path) -> None:
    """A recipe that was sent reads nothing outside of its folder."""
    section = '\n[teacher]\nkind = "distillation"\nweights = "../secret"\n'
    message = faults(write(free_dir, SMALL + section))
    assert "teacher.weights: '../secret' is outside of the recipe's folder" in message
    section = '\n[teacher_model]\nkind = "function"\nfunction = "os:system"\n'
    message = faults(write(free_dir, SMALL + section))
    assert "teacher_model.function: the module 'os' is not in the recipe's" in message
