"""A recipe's file reaches what lies beside it, nothing else unless the user says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from hocket.errors import RecipeError
from hocket.recipes.config.resolve import Resolved, resolve
from hocket.recipes.config.sections import DataFunctionSettings

TEXT: Final = """\
[model]
kind = "vit"

[data]
kind = "function"
function = "examples.zoo.text:windows"
path = "{path}"

[task]
loss = "examples.zoo.text:loss"

[optimizer]
kind = "adamw"
"""
TEXT_KIND: Final = 'kind = "function", function = "examples.zoo.text:windows"'
TEXT_KIND_LINES: Final = TEXT_KIND.replace(", ", "\n") + "\n"
FUNCTIONS: Final = """\
[model]
kind = "function"
function = "{model}"

[data]
kind = "digits"

[optimizer]
kind = "sgd"
"""


@pytest.fixture
def recipe_dir(free_dir: Path) -> Path:
    """A folder that came from another user, beside a private one."""
    (free_dir / "private").mkdir()
    (free_dir / "private" / "key.txt").write_text("secret")
    folder = free_dir / "sent"
    folder.mkdir()
    (folder / "near.txt").write_text("text")
    return folder


def write(folder: Path, text: str) -> str:
    """A recipe in a folder, by its path from the folder above."""
    (folder / "recipe.toml").write_text(text)
    return f"{folder.name}/recipe.toml"


def refusal(source: str, *settings: str) -> str:
    """What is said of a recipe that is refused."""
    with pytest.raises(RecipeError) as caught:
        resolve(source, settings)
    return str(caught.value)


def path_of(resolved: Resolved) -> str:
    """The text that a recipe reads."""
    assert isinstance(resolved.recipe.data, DataFunctionSettings)
    return str(resolved.recipe.data.arguments["path"])


@pytest.mark.parametrize(
    "path",
    [
        "../private/key.txt",
        "near/../../private/key.txt",
        "/etc/hosts",
        "~/x",
        "~nobody-of-this-name/x",
        "loop/x",
    ],
)
def test_paths_elsewhere_are_refused(recipe_dir: Path, path: str) -> None:
    """With the key, the path, the line and both ways out."""
    (recipe_dir / "loop").symlink_to(recipe_dir / "loop")
    message = refusal(write(recipe_dir, TEXT.format(path=path)))
    assert f"data.path: {path!r} is outside of the recipe's folder" in message
    assert "--set data.path=" in message
    assert "--allow-outside" in message
    assert "sent/recipe.toml, line 7" in message


@pytest.mark.parametrize(
    "said",
    [
        f'data = {{{TEXT_KIND}, path = "../private/key.txt"}}',
        f'[data]\n{TEXT_KIND_LINES}"path" = "../private/key.txt"',
        f'[data]\n{TEXT_KIND_LINES}path = """\\\n../private/key.txt"""',
        f'data.{TEXT_KIND_LINES}path = "../private/key.txt"'.replace("\n", "\ndata."),
    ],
)
def test_however_it_is_written(recipe_dir: Path, said: str) -> None:
    """TOML has several ways to say one thing, of which some are on no line."""
    head, _, rest = TEXT.partition("[data]")
    tail = rest[rest.index("[task]") :]
    source = write(recipe_dir, f"{said}\n{head}{tail}")
    assert "data.path: '../private/key.txt' is outside" in refusal(source)
    assert path_of(resolve(source, ["data.path=near.txt"])).endswith("near.txt")


def test_a_path_that_can_be_none(recipe_dir: Path) -> None:
    """A NUL in a path: refused in a file, and no file on the command line."""
    source = write(recipe_dir, TEXT.format(path="near\\u0000.txt"))
    assert "is outside of the recipe's folder" in refusal(source)
    assert path_of(resolve(source, ['data.path="a\\u0000"'])) == "a\0"


def test_a_link_leads_elsewhere_too(recipe_dir: Path) -> None:
    """A name that looks near and is not."""
    os.symlink(recipe_dir.parent / "private", recipe_dir / "data")
    message = refusal(write(recipe_dir, TEXT.format(path="data/key.txt")))
    assert "is outside of the recipe's folder" in message


def test_paths_beside_the_recipe_are_its_own(recipe_dir: Path) -> None:
    """Also in other words."""
    for path in ("near.txt", "./near.txt", "sub/../near.txt"):
        source = write(recipe_dir, TEXT.format(path=path))
        assert path_of(resolve(source)) == str(recipe_dir / "near.txt")


def test_the_user_may_name_anything(recipe_dir: Path) -> None:
    """On the command line; or by letting the file do so."""
    source = write(recipe_dir, TEXT.format(path="../private/key.txt"))
    key = recipe_dir.parent / "private" / "key.txt"

    assert path_of(resolve(source, ["data.path=private/key.txt"])) == str(key)
    assert path_of(resolve(source, allow_outside=True)) == str(key)


@pytest.mark.parametrize("key", ["folder", "profile_folder"])
def test_a_recipe_writes_nowhere_else(recipe_dir: Path, key: str) -> None:
    """Runs go into the current folder, wherever the recipe lies."""
    text = TEXT.format(path="near.txt")
    message = refusal(write(recipe_dir, f'{text}\n[run]\n{key} = "/etc/cron.d"\n'))
    assert f"run.{key}: '/etc/cron.d' is outside of the current folder" in message
    source = write(recipe_dir, f'{text}\n[run]\n{key} = "mine"\n')
    assert getattr(resolve(source).recipe.run, key) == "mine"


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:run", "hocket:launch", "absent:f"]
)
def test_modules_elsewhere_are_refused(recipe_dir: Path, name: str) -> None:
    """A recipe that was sent must not run what happens to be installed."""
    message = refusal(write(recipe_dir, FUNCTIONS.format(model=name)))
    module = name.partition(":")[0]
    assert f"model.function: the module {module!r} is not in the recipe's" in message


def test_a_module_cannot_stand_for_another(recipe_dir: Path) -> None:
    """A file `os.py` beside the recipe does not make `os:system` the recipe's own."""
    (recipe_dir / "os.py").write_text("")
    assert "the module 'os' is not" in refusal(
        write(recipe_dir, FUNCTIONS.format(model="os:system"))
    )


def test_modules_beside_the_recipe_are_its_own(recipe_dir: Path) -> None:
    """And are looked for there; those of the command line, in the current folder."""
    (recipe_dir / "own_model_here.py").write_text("def make(): ...\n")
    source = write(recipe_dir, FUNCTIONS.format(model="own_model_here:make"))

    assert resolve(source).import_folders == (recipe_dir,)
    said = resolve(source, ["model.function=any:make"])
    assert said.import_folders == (recipe_dir.parent,)
    assert resolve("digits-vit").import_folders == ()


@pytest.mark.parametrize("name", ["my_module", ":f", "a b:c", "m:f()", "../m:f"])
def test_a_function_is_named_in_one_way(recipe_dir: Path, name: str) -> None:
    """As 'module:function'."""
    message = refusal("digits-vit", f"task.loss={name}")
    assert f"task.loss: {name!r} should name a function" in message
