"""Every code block of the documents runs, or is read as far as can be."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

import hocket as package
from hocket.cli.main import COMMANDS
from tests.cli.shell import hocket
from tests.documents.blocks import (
    DOCUMENTS,
    KINDS,
    ROOT,
    blocks_in,
    blocks_of,
    commands_in,
    documents_with,
    name_of,
)
from tests.documents.shell import (
    TRAINING,
    cut_short,
    find_data,
    hocket_words,
    is_slow,
    prepare,
    read,
    run,
    run_script,
)

COMMAND: Final = re.compile(
    r"^ *(\.venv/bin/)?(hocket|torchrun|python3?|pip|make|git|sudo|docker) .*$", re.M
)
INDENTED: Final = re.compile(
    r"(?<=\n\n)    (?:\.venv/bin/)?(hocket|torchrun|pip|python3?) .*"
)


def test_every_block_has_a_kind_that_a_test_knows() -> None:
    """A new block is run or marked."""
    unknown = [
        f"{name_of(document)}:{block.line}: {block.kind!r}"
        for document in DOCUMENTS
        for block in blocks_in(document)
        if block.kind not in KINDS and not block.kind.startswith("{")
    ]
    assert not unknown, f"the kinds are those of tests/documents/blocks.py: {unknown}"


def test_no_command_hides_among_what_is_not_run() -> None:
    """Neither in a block of text, nor indented."""
    hidden = []
    for document in DOCUMENTS:
        texts = "\n".join(blocks_of(document, "text"))
        found = [line[0] for line in COMMAND.finditer(texts)]
        if document.name not in {"CONTRIBUTING.md", "CHANGELOG.md"}:
            found += INDENTED.findall(document.read_text(encoding="utf-8"))
        hidden += [f"{name_of(document)}: {command}" for command in found]
    assert not hidden, f"commands belong into a block `sh` or `sh full-size`: {hidden}"


@pytest.mark.parametrize("document", documents_with("sh"))
def test_commands_run(document: Path, free_dir: Path) -> None:
    """In the order of the page; slow ones are only read here."""
    prepare(document, free_dir)
    is_after_script = False  # then files are missing that the script makes
    for text in blocks_of(document, "sh"):
        for words in commands_in(text):
            own = hocket_words(words)
            if own is None:
                assert words[0] in {"python", "torchrun"}, f"not run: {words}"
                is_after_script = True
            elif is_slow(own) or is_after_script:
                read(own, free_dir)
            else:
                run(own)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", documents_with("sh"))
def test_slow_commands_run(document: Path, free_dir: Path) -> None:
    """Plans in full; what trains, in processes of its own, with a few steps."""
    prepare(document, free_dir)
    find_data(free_dir)
    for text in blocks_of(document, "sh"):
        for words in commands_in(text):
            own = hocket_words(words)
            if words[0] != "hocket" or own is None:
                run_script(words, free_dir)
            elif own[0] in TRAINING:
                done = hocket(*cut_short(own), cwd=free_dir, timeout_s=300)
                assert done.returncode == 0, f"{words}\n{done.stderr}"
            else:
                run(own)


@pytest.mark.parametrize("document", documents_with("sh full-size"))
def test_full_size_commands_can_be_read(document: Path, free_dir: Path) -> None:
    """What is too large for a test has options, recipes and settings that exist."""
    prepare(document, free_dir)
    for text in blocks_of(document, "sh full-size"):
        for words in commands_in(text):
            own = hocket_words(words)
            if own:
                read(own, free_dir)


def test_every_command_has_its_page() -> None:
    """With examples; what it takes is read from the command when the pages are made."""
    folder = ROOT / "docs/reference/commands"
    assert {path.stem for path in folder.glob("*.md")} == {*COMMANDS, "index"}
    listed = (folder / "index.md").read_text(encoding="utf-8").split()
    for name in COMMANDS:
        assert f"```{{command}} {name}\n" in (folder / f"{name}.md").read_text()
        assert any(blocks_of(folder / f"{name}.md", "sh", "sh full-size"))
        assert name in listed


@pytest.mark.parametrize("document", documents_with("toml"))
def test_settings_can_be_read(document: Path) -> None:
    """TOML parses."""
    for text in blocks_of(document, "toml"):
        assert tomllib.loads(text)


@pytest.mark.parametrize("document", documents_with("py"))
def test_fragments_name_what_exists(document: Path) -> None:
    """Imports work; names of hocket exist, and take the arguments that they get."""
    faults = [
        fault
        for text in blocks_of(document, "py")
        for node in ast.walk(ast.parse(text))
        for fault in faults_of(node)
    ]
    assert not faults


def faults_of(node: ast.AST) -> Iterator[str]:
    """What is wrong with one node of a fragment."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hocket"):
        module = import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                yield f"{node.module} has no {alias.name}"
    if isinstance(node, ast.Attribute | ast.Call):
        attribute = node.func if isinstance(node, ast.Call) else node
        try:
            value = value_of(attribute)
        except AttributeError as error:
            yield str(error)
            return
        if isinstance(node, ast.Call) and callable(value):
            yield from unknown_arguments(node, value)


def value_of(node: ast.expr) -> Any:
    """What a dotted name means, if it begins with `hocket` or `pipeline`; else None.

    Raises:
        AttributeError: it has no such part.
    """
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    roots = {"hocket": package, "pipeline": package.Pipeline}
    if node.id == "pipeline" and not path:
        return None  # torch has a function of this name
    value: Any = roots.get(node.id)
    for name in path if value is not None else ():
        if value is package.Pipeline and name == "plan":
            return None  # an attribute of the instance
        value = getattr(value, name)
    return value


def unknown_arguments(call: ast.Call, function: Any) -> Iterator[str]:
    """Names of a call that its function does not take."""
    taken = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in taken:
            yield f"line {call.lineno}: {ast.unparse(call.func)} has no {keyword.arg}="
