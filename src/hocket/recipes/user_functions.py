"""The user's own functions, which a recipe names as `module:function`.

They run as any code of the user's: a recipe that names functions is as good as the
module that it names. So names in a recipe's file mean modules beside that file, and
nothing else is imported unless the command line says so
(`hocket.recipes.config.resolve`).
Checkpoints and plans name no functions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from hocket.errors import RecipeError


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
