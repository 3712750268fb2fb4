"""Recipes are read from files and `--set`; all that is wrong is named at once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import RecipeError
from hocket.recipes.config.resolve import builtin_names, resolve
from hocket.recipes.config.sections import DataFunctionSettings, SgdSettings

SMALL: Final = """\
[model]
kind = "vit"

[data]
kind = "digits"

[optimizer]
kind = "adamw"
"""
TEXT: Final = """\
"function"
function = "examples.zoo.text:windows"
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    """A recipe's file, named as one would in its folder."""
    (folder / name).write_text(text, encoding="utf-8")
    return name


def faults(source: str, *settings: str) -> str:
    """The message with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        resolve(source, settings)
    return str(caught.value)


def test_built_in_recipes_are_found_by_name() -> None:
    """Those that the README names are there, and complete but for the user's data."""
    names = [
        "byol-resnet",
        "cifar10-byol",
        "cifar10-kd",
        "cifar10-mocov3",
        "cifar10-resnet",
        "cifar10-resnext",
        "cifar10-vit",
        "cifar100-resnext",
        "cifar100-vit",
        "densenet121",
        "digits-vit",
        "ffnn-16",
        "flowers102-resnext",
        "gpt-medium",
        "imagenet-vit",
        "imagenet100-vit",
        "kd-digits",
        "kd-distilbert",
        "kd-soft-target",
        "mnli-bert",
        "mobilenet-v3",
        "mocov3-vit",
        "mrpc-bert",
        "nasnet-mobile",
        "qqp-bert",
        "resnet50",
        "rnn-16",
        "squad-bert",
        "sst2-bert",
        "text-bert",
        "text-gpt",
        "torchvision",
    ]
    assert builtin_names() == names
    for name in names:
        path = [] if "digits" in name else ["data.path=any"]
        path += ["teacher.weights=any"] if "kd" in name else []
        assert resolve(name, path).recipe.run.name == name


def test_a_small_recipe_has_every_default(free_dir: Path) -> None:
    """Three kinds are enough: all else has a default, and the file names the run."""
    recipe = resolve(write(free_dir, SMALL)).recipe
    assert recipe.run.name == "mine"
    assert recipe.pipeline.num_workers == 2
    assert recipe.training.max_steps is None


def test_settings_replace_single_values() -> None:
    """`--set` wins over the file, value by value; the last one counts."""
    recipe = resolve(
        "digits-vit",
        ["training.seed=3", "training.seed = 4", "pipeline.schedule=gpipe"],
    ).recipe
    assert recipe.training.seed == 4
    assert recipe.pipeline.schedule == "gpipe"
    assert (
        recipe.training.num_epochs == resolve("digits-vit").recipe.training.num_epochs
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("pipeline.cut=['blocks.3']", ("blocks.3",)),
        ('pipeline.cut=["blocks.1", "blocks.3"]', ("blocks.1", "blocks.3")),
    ],
)
def test_values_are_toml(setting: str, expected: tuple[str, ...]) -> None:
    """Lists, strings in quotes, numbers: what TOML reads is read as TOML."""
    workers = f"pipeline.num_workers={len(expected) + 1}"
    cut = resolve("digits-vit", [setting, workers]).recipe.pipeline.cut
    assert tuple(cut or ()) == expected


def test_a_value_that_is_no_toml_is_a_string() -> None:
    """So that a shell needs no quotes within quotes."""
    recipe = resolve("digits-vit", ["run.name=first-try"]).recipe
    assert recipe.run.name == "first-try"


def test_a_setting_without_a_value_takes_the_key_away() -> None:
    """TOML has no word for nothing; an empty string is one in quotes."""
    taken = resolve("digits-vit", ["training.evaluate_every_epochs="])
    assert taken.recipe.training.evaluate_every_epochs is None
    assert "evaluate_every_epochs" not in taken.to_toml()
    message = faults("digits-vit", "training.evaluate_every_steps=5")
    assert "5: say one of them (--set KEY= takes one away)" in message
    message = faults("digits-vit", "model.kind=")
    assert "model.kind: missing" in message


def test_another_kind_takes_other_keys(free_dir: Path) -> None:
    """Each kind of optimizer, model and data has its own keys, and no other's."""
    recipe = resolve(
        write(free_dir, SMALL), ["optimizer.kind=sgd", "optimizer.momentum=0.9"]
    ).recipe
    assert isinstance(recipe.optimizer, SgdSettings)
    assert recipe.optimizer.momentum == 0.9
    message = faults("mine.toml", "optimizer.momentum=0.9")
    assert "optimizer.momentum: no such key" in message


def test_all_faults_at_once(free_dir: Path, golden: Callable[[str, str], None]) -> None:
    """Each with its key, where it was said, and the nearest name that is valid."""
    text = """\
[model]
kind = "vit"
widht = 32
pooling = "tokens"
num_heads = "four"

[data]
kind = "digit"

[optimiser]
kind = "adamw"

[optimizer]
kind = "adamw"
beta1 = 1.5

[training]
num_epochs = 0
num_epoch = 3

[pipeline]
schedule = "1f1c"
num_workers = 3
num_replicas = 2
cut = "blocks.3"
"""
    message = faults(
        write(free_dir, text),
        "training.seeds=1",
        "training.batch_size=many",
        "seed=3",
        "run.name=../elsewhere",
    )
    golden("recipes/all_faults.txt", message)


def test_what_no_section_sees_alone(
    free_dir: Path, golden: Callable[[str, str], None]
) -> None:
    """Values that are valid each and wrong together, with the numbers of both."""
    message = faults(
        write(free_dir, SMALL),
        "model.patch_size=3",
        "training.batch_size=8",
        "pipeline.num_workers=4",
        "pipeline.num_replicas=2",
        "pipeline.cut=['blocks.1', 'blocks.2']",
    )
    golden("recipes/cross_section_faults.txt", message)
    message = faults("mine.toml", "pipeline.stages_per_device=2")
    golden("recipes/schedule_refuses.txt", message)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.stop_metric=f1", "stop_metric 'f1' has no effect without stop_pat"),
        ("training.stop_goal=highest", "without stop_patience"),
        ("checkpoint.keep=2", "keep 2 has no effect without every_steps or every_epo"),
        ("checkpoint.background=false", "without every_steps or every_epochs"),
        ("checkpoint.allow_previous=true", "every_steps or every_epochs or resume"),
        ("optimizer.weight_decay_on=matrices", "no effect without weight_decay"),
    ],
)
def test_what_needs_another_key_is_refused_without_it(
    free_dir: Path, setting: str, words: str
) -> None:
    """It would be accepted and do nothing."""
    assert words in faults(write(free_dir, SMALL), setting)


def test_missing_kinds_are_listed(free_dir: Path) -> None:
    """An error about an empty recipe names each section's kinds."""
    message = faults(write(free_dir, ""))
    assert "model.kind: missing; there are 'vit', 'function'" in message
    assert "data.kind: missing; there are 'digits', 'function'" in message
    assert "optimizer.kind: missing; there are 'adamw', 'sgd', 'lars', " in message


def test_a_value_in_place_of_a_section(free_dir: Path) -> None:
    """The error about `training = 3` shows what a section looks like."""
    message = faults(write(free_dir, "training = 3\n" + SMALL), "training.seed=1")
    assert "training: 3 should be a section, [training] and its keys" in message
    assert "(mine.toml, line 1)" in message


def test_text_that_is_no_toml(free_dir: Path) -> None:
    """The file and the line."""
    message = faults(write(free_dir, '[model]\nkind = "vit\n'))
    assert message.startswith("mine.toml is not TOML")
    assert "line 2" in message


def test_bytes_that_are_no_text(free_dir: Path) -> None:
    """A picture given as a recipe."""
    (free_dir / "mine.toml").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    assert "mine.toml cannot be read as text" in faults("mine.toml")


def test_unknown_names_and_files(free_dir: Path) -> None:
    """A name is compared with the built-in ones; a path is looked for where it is."""
    assert "did you mean 'digits-vit'?" in faults("digit-vit")
    assert "there are 'byol-resnet', 'cifar10-byol', " in faults("llama")
    assert f"no such file in {free_dir}" in faults("resnet.toml")


@pytest.mark.parametrize("setting", ["training", "training.seed", "a.b.c=1", ".x=1"])
def test_settings_of_another_form(setting: str) -> None:
    """A setting is section.key=value, and an error says so."""
    assert f"--set {setting}: it must read section.key=value" in faults(
        "digits-vit", setting
    )


def test_paths_start_where_they_were_said(free_dir: Path) -> None:
    """In a file, from the file's folder; on the command line, from the current one."""
    (free_dir / "far").mkdir()
    text = SMALL.replace('"digits"', f'{TEXT}path = "near.txt"')
    text += '[task]\nloss = "examples.zoo.text:loss"\n'
    write(free_dir / "far", text)
    said_there = resolve("far/mine.toml").recipe.data
    said_here = resolve("far/mine.toml", ["data.path=near.txt"]).recipe.data
    assert isinstance(said_there, DataFunctionSettings)
    assert isinstance(said_here, DataFunctionSettings)
    assert said_there.arguments == {"path": str(free_dir / "far" / "near.txt")}
    assert said_here.arguments == {"path": str(free_dir / "near.txt")}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("digits-vit", []),
        ("digits-vit", ["training.max_steps=7", "pipeline.cut=['blocks.2']"]),
        ("text-gpt", ['data.path=a "quoted" näme\\.txt', "optimizer.kind=adamw"]),
    ],
)
def test_resolved_recipes_read_back_as_the_same(
    free_dir: Path, name: str, settings: list[str]
) -> None:
    """What a run's folder holds is the run's recipe, with nothing left to defaults."""
    resolved = resolve(name, settings)
    again = resolve(write(free_dir, resolved.to_toml(), "recipe.toml"))
    assert again.recipe == resolved.recipe
    written = tomllib.loads(resolved.to_toml())
    sections = resolved.recipe.model_dump(exclude_none=True)
    for section, values in sections.items():
        given = {key for key, value in values.items() if value is not None}
        assert set(written[section]) == given


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_string_reads_back(text: str) -> None:
    """Quotes, control characters, emoji: written in the way that TOML reads them."""
    resolved = resolve("digits-vit")
    run = resolved.recipe.run.model_copy(update={"folder": text})
    recipe = resolved.recipe.model_copy(update={"run": run})
    written = type(resolved)(recipe, {}).to_toml()
    assert tomllib.loads(written)["run"]["folder"] == text


def test_each_value_says_where_it_is_from() -> None:
    """In the resolved recipe: a line of the file, `--set`, or the default."""
    lines = resolve("digits-vit", ["training.seed=5"]).to_toml().splitlines()
    assert "seed = 5  # --set" in lines
    assert "num_replicas = 1  # default" in lines
    assert any(line.startswith('kind = "vit"  # digits-vit, line ') for line in lines)
