"""The directive `command`: what a command of `hocket` takes, from the command itself.

```{command} plan
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.core import TyperCommand

from hocket.cli.main import LazyCommand


class Command(SphinxDirective):
    """`command`: usage, help, and a table of arguments and options."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Describe the command."""
        loaded = LazyCommand(self.arguments[0]).load()
        text = "\n\n".join(_described(loaded, f"hocket {loaded.name}"))
        found: list[nodes.Node] = self.parse_text_to_nodes(text)
        return found


def _described(command: TyperCommand, name: str) -> Iterator[str]:
    """A command as Markdown: its usage, its help and its tables."""
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {usage}\n```"
    yield command.help or ""
    for kind in ("argument", "option"):
        rows = [
            parameter.get_help_record(context)
            for parameter in command.params
            if parameter.param_type_name == kind
        ]
        if rows:
            yield "\n".join(
                [
                    f"| {kind} | what it does |\n|---|---|",
                    *(f"| {_literal(one)} | {_escaped(said)} |" for one, said in rows),
                ]
            )


def _literal(text: str) -> str:
    """Code that a cell can hold."""
    return "`" + text.replace("|", "\\|") + "`"


def _escaped(text: str) -> str:
    """A text that a cell can hold."""
    return re.sub(r"([|<*\[])", r"\\\1", " ".join(text.split()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
