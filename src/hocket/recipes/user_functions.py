"""The functions that a recipe names as `module:function`.

They run as any code of the user's: a recipe that names functions is as good as the
module that it names. So names in a recipe's file mean modules beside that file, those
of `LIBRARIES`, or `examples.zoo` of hocket's own repository, and nothing else is
imported unless the command line says so (`hocket.recipes.config.resolve`).
Checkpoints and plans name no functions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Final

from hocket.errors import RecipeError
from hocket.nearest import nearest
from hocket.recipes.config.settings import FunctionSettings

ZOO: Final = "examples.zoo"
LIBRARIES: Final = frozenset({"torch.nn.functional", "torchvision.models"})
_INSIDE: Final = Path(*ZOO.split("."))
_REPOSITORY: Final = Path(__file__).parents[3]  # where hocket is not installed


def is_known(name: str) -> bool:
    """Whether a function is hocket's own, or one of `LIBRARIES`.

    Args:
        name: `module:function`.
    """
    module = name.partition(":")[0]
    return module in LIBRARIES or is_in_zoo(module)


def is_in_zoo(module: str) -> bool:
    """Whether a module is in the folder examples/zoo of hocket's repository."""
    return module.startswith(f"{ZOO}.")


def checkout() -> Path | None:
    """Return the folder that has examples/zoo in it; None outside of a checkout."""
    folders = (_REPOSITORY, Path.cwd())
    return next((path for path in folders if (path / _INSIDE).is_dir()), None)


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
            f"{name}: the module {module_name} cannot be imported ({error}): "
            f"{_way_out(module_name)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RecipeError(
            f"{name}: {module.__file__} has no function {function_name!r}"
        )
    found: Callable[..., Any] = function
    return found


def _way_out(module: str) -> str:
    if not is_in_zoo(module):
        return "it must be beside the recipe's file, or installed"
    if checkout() is not None:
        return "pip install 'hocket[recipes,vision]' has what its modules need"
    return (
        "it is in hocket's repository, not in its package: run this in a checkout, or "
        "copy its folder examples/zoo into the current folder"
    )


def call_function(section: str, settings: FunctionSettings, **offered: Any) -> Any:
    """Call a section's function with the section's other keys.

    Args:
        section: its name, for errors.
        settings: the function and its arguments.
        **offered: further arguments, for a function that has parameters of these names.

    Raises:
        RecipeError: it cannot be had, or does not take these arguments.
    """
    function, parameters = check_function(section, settings, [*offered])
    taken = {name: value for name, value in offered.items() if name in parameters}
    return function(**taken, **settings.arguments)


def check_function(
    section: str, settings: FunctionSettings, offered: list[str]
) -> tuple[Callable[..., Any], set[str]]:
    """Return a section's function, and the names of its parameters.

    Args:
        section: its name, for errors.
        settings: the function and its arguments.
        offered: names of further arguments, which it may take.

    Raises:
        RecipeError: it cannot be had, has no such argument, or needs another one.
    """
    name, given = settings.function, settings.arguments
    function = load_function(name)
    parameters = signature(function).parameters
    takes_any = any(x.kind is Parameter.VAR_KEYWORD for x in parameters.values())
    named = [x for x in parameters if x not in offered]
    faults = [
        f"{section}.{key}: {name} has no argument {key!r}; {nearest(key, named)}"
        for key in given
        if key not in named and not takes_any
    ]
    faults += [
        f"{section}.{key}: missing: {name} needs it: add it to the recipe, or --set "
        f"{section}.{key}=VALUE"
        for key in named
        if parameters[key].default is Parameter.empty
        and parameters[key].kind
        not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        and key not in given
    ]
    if faults:
        raise RecipeError("\n".join(faults))
    return function, set(parameters)
