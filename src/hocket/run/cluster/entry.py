"""Names of functions that another process imports: `module:name`, `script.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.errors import RunError


def entry_name(function: Callable[..., Any]) -> str:
    """Return the name by which another process imports a function.

    Raises:
        RunError: another process cannot import it.
    """
    name = function.__qualname__
    module = function.__module__
    if "<" in name:
        raise RunError(
            f"workers cannot import {name}: define it at the top of a module or script"
        )
    if module != "__main__":
        return f"{module}:{name}"
    main = inspect.getmodule(function)
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return f"{spec.name}:{name}"
    path = getattr(main, "__file__", None)
    if path is None:
        raise RunError(
            f"workers cannot import {name} from an interactive session: put it into a "
            "file"
        )
    return f"{Path(path).absolute()}:{name}"


def load_entry(entry: str) -> Callable[..., Any]:
    """Import a function by its name.

    Raises:
        RunError: the module has no such function.
    """
    module_name, _, path = entry.rpartition(":")
    module: object = (
        _import_script(Path(module_name))
        if module_name.endswith(".py")
        else importlib.import_module(module_name)
    )
    function: Any = module
    for name in path.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        raise RunError(f"entry {entry!r}: {module_name} has no function {path!r}")
    found: Callable[..., Any] = function
    return found


def _import_script(path: Path) -> object:
    """Import the script that the user started, without its `__main__` part.

    The name is the one that multiprocessing uses, so that processes which the worker
    starts (a DataLoader's) find the script's functions too.
    """
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    if spec is None or spec.loader is None:
        raise RunError(f"entry {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return module
