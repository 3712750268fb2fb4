"""hocket: the order of work in deep-network training, so that no device waits.

Names that need torch load when they are first used; the others never import it. Which
names there are, and where each lives, stands in `__init__.pyi`, as type checkers read
it.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

from hocket.version import __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_FOUND = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
    if alias.name != "__version__"
}

# Public modules: `hocket.checkpoint.verify(path)` works after `import hocket`.
_MODULES = frozenset(name for name, module in _FOUND.items() if module == "hocket")

# Where each public name lives. A name is imported when it is first asked for.
_HOMES = {name: _FOUND[name] for name in sorted(_FOUND) if name not in _MODULES}

__all__ = [  # noqa: PLE0604  (strings, sorted)
    *_HOMES,
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name in _MODULES:
        return import_module(f"hocket.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _drawing(drawn: object) -> str:
    """Return the HTML that notebooks show; `draw` loads when they ask for it."""
    html: str = import_module("hocket.draw.html.page").html_of(drawn)
    return html


def _csv() -> object:
    """Return what writes and reads PyTorch's CSV."""
    return import_module("hocket.core.formats.torch_csv")


import_module("hocket.core.formats.drawn").Drawn.drawing = _drawing
import_module("hocket.core.formats.drawn").Drawn.csv = _csv


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
