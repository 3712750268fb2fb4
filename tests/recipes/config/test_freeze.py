"""The sections [freeze] and [cache]: what they make, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.freeze import Alpha, ArgminGradient, Listed, Percentile, Plasticity
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.train import freezing_options
from tests.recipes.config.test_resolve import SMALL, faults, write

ALPHA = "freeze.policy=alpha"


def options(folder: Path, *settings: str) -> dict[str, Any]:
    """The arguments of a pipeline, for epochs of 7 steps; the recipe reads back."""
    resolved = resolve(write(folder, SMALL), settings)
    again = resolve(write(folder, resolved.to_toml(), "again.toml")).recipe
    assert again == resolved.recipe
    return freezing_options(again.freeze, again.cache, 7, folder)


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ((ALPHA,), Alpha(0.2, every_steps=7)),
        (("alpha=0.3", "every_steps=2", ALPHA), Alpha(0.3, every_steps=2)),
        (("freeze.policy=argmin-gradient",), ArgminGradient(0.2, every_steps=7)),
        (
            ("freeze.policy=argmin-gradient", "patience=3", "layers=blocks.*"),
            ArgminGradient(0.2, 3, every_steps=7, layers="blocks.*"),
        ),
        (
            ("freeze.policy=percentile", "percentile=40.0"),
            Percentile(percentile=40.0, every_steps=7),
        ),
        (
            ("freeze.policy=plasticity", "window=3", "unfreeze_at=0"),
            Plasticity(window=3, unfreeze_at=None, every_steps=7),
        ),
        (
            ("freeze.policy=listed", "num_frozen={2 = 4, 3 = 5}"),
            Listed({2: 4, 3: 5}, every_steps=7),
        ),
    ],
)
def test_makes_the_policy(
    free_dir: Path, settings: tuple[str, ...], policy: object
) -> None:
    """With the recipe's numbers, at the ends of epochs unless it says when."""
    full = [x if x.startswith("freeze") else f"freeze.{x}" for x in settings]
    assert options(free_dir, *full)["freeze"] == policy


def test_nothing_freezes_without_a_policy(free_dir: Path) -> None:
    """Where there is no section, and in the baseline of a recipe that has one."""
    assert options(free_dir) == {}
    assert options(free_dir, "freeze.policy=none") == {}


def test_shapes_and_cache_go_to_the_pipeline(free_dir: Path) -> None:
    """Stages and replicas by number of frozen layers; budgets, and a folder."""
    found = options(
        free_dir,
        ALPHA,
        'freeze.shapes={4 = "2x2", 6 = "1x4"}',
        "pipeline.layout=4x1",
        "cache.ram_bytes=1000",
        "cache.dtype=bfloat16",
    )
    assert found["shapes"] == {4: (2, 2), 6: (1, 4)}
    assert options(free_dir, ALPHA, "freeze.shapes={}")["shapes"] == {}
    assert options(free_dir, ALPHA)["shapes"] is None
    assert found["balance"] == "exact"
    greedy = options(free_dir, ALPHA, "freeze.balance=greedy")
    assert greedy["balance"] == "greedy"
    assert found["recut"]
    stays = ("freeze.recut=false", 'pipeline.cut=["blocks.1"]')
    assert not options(free_dir, ALPHA, *stays)["recut"]
    cache = found["cache"]
    assert (cache.ram_bytes, cache.disk_bytes, cache.dtype) == (1000, 0, "bfloat16")
    assert cache.folder == free_dir / "cache"  # the run's


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["freeze.policy=alph"], "freeze.policy: no policy 'alph'; did you mean"),
        (["freeze.alpha=0.3"], "freeze.policy: missing; there are 'none', 'alpha', "),
        (["freeze.policy=none", "freeze.alpha=0.3"], "freeze.alpha: no such key"),
        ([ALPHA, "freeze.alfa=0.3"], "freeze.alfa: no such key; did you mean 'alpha'"),
        ([ALPHA, "freeze.alpha=1.0"], "freeze.alpha: 1.0 should be less than 1"),
        ([ALPHA, "pipeline.schedule=auto"], "schedule='auto' is chosen once"),
        ([ALPHA, "pipeline.recompute=all"], "recompute does not go together with it"),
        (
            [ALPHA, "teacher.kind=distillation", "teacher.weights=x"],
            "freeze: a section [teacher] does not go together with it",
        ),
        (
            [ALPHA, "freeze.recut=false", 'freeze.shapes={4 = "1x2"}'],
            "freeze: shapes has no effect without recut",
        ),
        (
            [ALPHA, "freeze.recut=false", "cache.ram_bytes=1"],
            "freeze: cache does not go together with recut=False",
        ),
        (
            [ALPHA, 'pipeline.cut=["blocks.1"]'],
            "cut names the stages of one shape: leave it out, or take recut=False",
        ),
        (["cache.ram_bytes=1"], "cache: has no effect without layers that freeze"),
        ([ALPHA, "cache.draws_once=true"], "ram_bytes and disk_bytes are 0: give one"),
        ([ALPHA, 'freeze.shapes={a = "1x2"}'], "'a' should be a whole number"),
        ([ALPHA, 'freeze.shapes={4 = "12"}'], "freeze.shapes.4: '12' is no layout"),
        (
            [ALPHA, 'freeze.shapes={4 = "2x2"}'],
            "2x2 cannot be: 2 workers with 8 microbatches in the whole batch can be "
            "2x1, 1x2",
        ),
    ],
)
def test_refuses(free_dir: Path, settings: list[str], message: str) -> None:
    """Unknown names, settings without an effect, and what freezing cannot have."""
    assert message in faults(write(free_dir, SMALL), *settings)


def test_memory_limits_the_choice_of_shapes(free_dir: Path) -> None:
    """It has an effect where shapes are given, too: they must fit."""
    memory = "pipeline.memory_bytes=1000000"
    assert options(free_dir, ALPHA, memory)
    assert options(free_dir, ALPHA, "freeze.shapes={}", memory)
