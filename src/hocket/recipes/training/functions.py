"""The user's own functions, which a recipe names as `module:function`.

They run as any code of the user's: a recipe that names functions is as good as the
module that it names. So names in a recipe's file mean modules beside that file, and
nothing else is imported unless the command line says so
(`hocket.recipes.config.allowed_paths`).
Checkpoints and plans name no functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hocket.errors import RecipeError
from hocket.recipes.data.dataset_samples import DatasetSamples
from hocket.recipes.training.records import Watcher
from hocket.run.data.samples import Samples


def load_function(name: str) -> Callable[..., Any]:
    """The function of a name.

    Args:
        name: `module:function`.

    Raises:
        RecipeError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise RecipeError(
            f"{name}: the module {module_name} cannot be imported ({error}): it must "
            "be beside the recipe's file, or installed"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RecipeError(
            f"{name}: {module.__file__} has no function {function_name!r}"
        )
    found: Callable[..., Any] = function
    return found


def own_data(name: str, arguments: Mapping[str, Any]) -> tuple[Samples, Samples]:
    """The samples for training and for evaluation that a function returns.

    Args:
        name: `module:function`. The function returns a pair, of each of which is taken
            what is `hocket.run.data.samples.Samples`, or else has a length and gives
            `(inputs, targets)` for an index, as torch's datasets do.
        arguments: of the function.

    Raises:
        RecipeError: it returns something else.
    """
    pair = load_function(name)(**arguments)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise RecipeError(
            f"{name} returned {type(pair).__name__}: it must return a pair, the data "
            "to train on and the data to evaluate on"
        )
    training, evaluation = (_samples(name, part) for part in pair)
    return training, evaluation


def own_watcher(name: str, run_dir: Path) -> Watcher:
    """Whom the main worker tells what happens, as a function of the user's makes it.

    Args:
        name: `module:function`, called with the run's folder.
        run_dir: that folder.

    Raises:
        RecipeError: what it returns cannot be told.
    """
    watcher: Watcher = load_function(name)(run_dir)
    missing = [
        method
        for method in ("step", "evaluation", "summary", "close")
        if not callable(getattr(watcher, method, None))
    ]
    if missing:
        raise RecipeError(
            f"{name} returned {type(watcher).__name__} without {', '.join(missing)}: a "
            "callback needs the methods of hocket.recipes.training.records.Watcher"
        )
    return watcher


def _samples(name: str, part: Any) -> Samples:
    if hasattr(part, "num_samples") and hasattr(part, "fingerprint"):
        own: Samples = part
        return own
    if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return DatasetSamples(part)
    raise RecipeError(
        f"{name} returned a pair with {type(part).__name__} in it: it must be "
        "hocket.run.data.samples.Samples, or have a length and give "
        "(inputs, targets) for an index"
    )
