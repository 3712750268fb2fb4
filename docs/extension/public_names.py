"""The directive `public-names`: what `import hocket` gives, with all its members.

    ```{public-names} schedules planner     every public name that lives in these rooms
    ```
    ```{public-module} hocket.freeze        every name of a public module
    ```

The build fails if a public name is in no page, or in two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Final

from docstring_markdown import linked, markdown_of
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import hocket

HOMES: Final = hocket._HOMES
NAMES: Final = frozenset(hocket.__all__)
FENCE: Final = "`" * 12  # longer than any in a docstring


class PublicNames(SphinxDirective):
    """`public-names`: a description of each public name of some rooms."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Describe the names, room by room."""
        mine = [
            name
            for room in self.arguments[0].split()
            for name, home in HOMES.items()
            if f"{home}.".startswith(f"hocket.{room}.")
        ]
        shown = self.env.domaindata.setdefault("hocket", {})
        shown[self.env.docname] = mine
        return _described(self, "hocket", [(n, getattr(hocket, n)) for n in mine])


class PublicModule(SphinxDirective):
    """`public-module`: a description of each name of a public module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Describe the names in the order of the module's `__all__`."""
        module = import_module(self.arguments[0])
        names = [(name, getattr(module, name)) for name in module.__all__]
        return _described(self, module.__name__, names)


def _described(
    directive: SphinxDirective, module: str, values: list[tuple[str, Any]]
) -> list[nodes.Node]:
    """The nodes of descriptions that are written as Markdown."""
    text = "\n\n".join(description_of(name, value, module) for name, value in values)
    found: list[nodes.Node] = directive.parse_text_to_nodes(text)
    return found


def description_of(name: str, value: object, module: str) -> str:
    """A name's directive of Sphinx's Python domain, as Markdown."""
    body = [markdown_of(_docstring(value), NAMES)]
    kind = "function"
    signature = ""
    if isinstance(value, type):
        kind = "exception" if issubclass(value, Exception) else "class"
        body += list(_members(value))
    elif not callable(value):
        kind = "data"
        body = [linked("A mapping: every schedule by its name, as an `Entry`.", NAMES)]
    if callable(value) and kind != "exception":
        signature = _signature(value)
        body.append(f"*In* `{value.__module__.replace('.', '/')}.py`")
    return _fenced(kind, name + signature, "\n\n".join(body), module)


def function_of(function: Callable[..., object]) -> str:
    """A function that is no public name, described in the same way."""
    text = markdown_of(inspect.getdoc(function) or "", NAMES)
    head = function.__name__ + _signature(function)
    return _fenced("function", head, text, "", ":no-index:")


def _docstring(value: object) -> str:
    """The docstring; a dataclass's with those of the dataclasses that it extends."""
    doc = inspect.getdoc(value) or ""
    if isinstance(value, type) and is_dataclass(value):
        bases = [base for base in value.__mro__[1:] if is_dataclass(base)]
        doc = "\n\n".join([doc, *(inspect.getdoc(base) or "" for base in bases)])
    return doc


def _signature(value: Callable[..., object]) -> str:
    """What it takes, and for a function what it returns; nothing for an enumeration."""
    if isinstance(value, type) and issubclass(value, Enum):
        return ""
    signature = inspect.signature(value)
    bare = [
        one.replace(default=...)
        if "<" in repr(one.default) and one.default is not inspect.Parameter.empty
        else one
        for one in signature.parameters.values()
        if one.name not in {"self", "cls"}
    ]
    return stringify_signature(
        signature.replace(parameters=bare),
        show_return_annotation=not isinstance(value, type),
        unqualified_typehints=True,
    ).replace("= Ellipsis", "= ...")


def _members(value: type) -> Iterator[str]:
    """An enumeration's members, or a class's public methods and properties.

    Those of a dataclass that it extends, and that has no public name, are its own.
    """
    if issubclass(value, Enum):
        for one in value:
            yield _fenced("attribute", one.name, "", "", f":value: {one.value!r}")
        return
    own = {field.name for field in fields(value)} if is_dataclass(value) else set()
    hidden = [x for x in value.__mro__[1:] if is_dataclass(x)]
    hidden = [x for x in hidden if x.__name__ not in NAMES]
    every = {k: v for x in (*reversed(hidden), value) for k, v in vars(x).items()}
    for name, member in every.items():
        doc = inspect.getdoc(member)
        if doc and not name.startswith("_") and name not in own:
            yield _member(name, member, markdown_of(doc, NAMES))


def _member(name: str, member: object, text: str) -> str:
    """A property or a method, of an instance or of the class."""
    if isinstance(member, property):
        return _fenced("property", name, text, "")
    if isinstance(member, classmethod | staticmethod):
        option = f":{type(member).__name__}:"
        head = name + _signature(member.__func__)
        return _fenced("method", head, text, "", option)
    if inspect.isfunction(member):
        return _fenced("method", name + _signature(member), text, "")
    return ""


def _fenced(kind: str, head: str, body: str, module: str, option: str = "") -> str:
    """One directive; a method's fence is shorter than that of its class."""
    fence = FENCE if module else FENCE[:-4]
    options = [f":module: {module}"] if module else []
    options += [option] if option else []
    return "\n".join([f"{fence}{{py:{kind}}} {head}", *options, "", body, fence])


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Fail if a public name is described nowhere, or twice.

    Raises:
        ValueError: names which.
    """
    pages = env.domaindata.get("hocket", {})
    shown = [name for names in pages.values() for name in names]
    wrong = [f"{name} of {HOMES[name]}" for name in HOMES if shown.count(name) != 1]
    if pages and wrong:
        raise ValueError(
            "each public name belongs on just one page; name its room in one "
            f"`public-names` of docs/reference/python: {', '.join(wrong)}"
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("public-module", PublicModule)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True}
