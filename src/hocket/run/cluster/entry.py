"""How another process gets a function: by a name that it imports, or as a value.

    module:name      a function at the top of a module
    script.py:name   one of the script that was started
    fd:5             any other, from a notebook, a prompt or standard input: pickled by
                     value in memory that only this process and its children have

A value is unpickled in the process's own children alone, and only from the descriptor
that they inherit: no file or connection can offer another.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hocket.errors import MissingPackageError, RunError

_DESCRIPTOR: Final = "fd:"


def entry_name(function: Callable[..., Any]) -> str:
    """Return the name by which another process imports a function.

    Raises:
        RunError: another process cannot import it.
    """
    name = _name_of(function)
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
    if path is None or not Path(path).exists():  # such as <stdin>
        raise RunError(
            f"workers cannot import {name} from an interactive session: put it into a "
            "file"
        )
    return f"{Path(path).absolute()}:{name}"


def _name_of(function: Callable[..., Any]) -> str:
    """Return a function's name; with "<" where that alone does not say what it does."""
    name: str = getattr(function, "__qualname__", f"<{function!r}>")
    own = getattr(function, "__self__", None)  # a module has its built-in functions
    return name if isinstance(own, type | ModuleType | None) else f"<method {name}>"


@contextmanager
def inherited_entry(function: Callable[..., Any]) -> Iterator[tuple[str, list[int]]]:
    """Yield an entry for child processes, and the descriptors that they must inherit.

    Raises:
        MissingPackageError: the function has no name to import, and cloudpickle is not
            installed.
        RunError: the function, or what it refers to, cannot be pickled.
    """
    try:
        name = entry_name(function)
    except RunError:
        data = _pickled(function)
    else:
        yield name, []
        return
    descriptor = os.memfd_create("hocket-entry")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        yield f"{_DESCRIPTOR}{descriptor}", [descriptor]


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingPackageError(
            f"workers cannot import {_name_of(function)}, and get it by cloudpickle "
            "(pip install 'hocket[notebook]'); or put a function into a file"
        ) from error
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise RunError(
            f"{_name_of(function)} cannot be sent to workers: {error}. Make what it "
            "refers to inside of it, or put it into a file"
        ) from error
    return data


def load_entry(entry: str) -> Callable[..., Any]:
    """Import a function by its name, or read it from an inherited descriptor.

    Raises:
        RunError: the module has no such function.
    """
    if entry.startswith(_DESCRIPTOR):
        return _inherited(int(entry.removeprefix(_DESCRIPTOR)))
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


def _inherited(descriptor: int) -> Callable[..., Any]:
    """Return the function that the parent process has left in memory."""
    import cloudpickle  # the parent has it, too

    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    function: Callable[..., Any] = cloudpickle.loads(data)
    return function


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
