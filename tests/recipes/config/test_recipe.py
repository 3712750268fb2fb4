"""A recipe's keys: each one is used, and each one is written about."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Final, get_args

from pydantic import BaseModel

import hocket
from hocket.freeze.settings import Cache
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.models.make import Blocks
from hocket.recipes.training.train import POLICIES

SOURCE: Final = Path(inspect.getfile(hocket)).parent
FILES: Final = [
    *SOURCE.glob("recipes/**/*.py"),
    *SOURCE.glob("cli/*.py"),
    SOURCE / "options.py",
]
WRITTEN: Final = ("recipe", "settings")


def section_classes() -> Iterator[type[BaseModel]]:
    """Every class that a section can be; two sections name the kinds of models."""
    members = [
        member
        for field in Recipe.model_fields.values()
        for member in get_args(field.annotation) or (field.annotation,)
    ]
    yield from (member for member in dict.fromkeys(members) if member is not NoneType)


def keys() -> list[tuple[str, str]]:
    """`(class, key)` for every key of a recipe."""
    return [
        (cls.__name__, key) for cls in section_classes() for key in cls.model_fields
    ]


def attributes_read(path: Path) -> set[str]:
    """The names of all attributes that a file reads."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    patterns = [node for node in nodes if isinstance(node, ast.MatchClass)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}.union(
        *(pattern.kwd_attrs for pattern in patterns)
    )


def test_every_key_has_an_effect() -> None:
    """A setting that no code reads would be accepted and do nothing.

    `kind` and `policy` are read by the choice of their class; a policy of freezing, a
    cache and a stack of blocks are made of all keys that are their arguments.
    """
    readers = [path for path in FILES if path.stem not in WRITTEN]
    read = set().union(*map(attributes_read, readers))
    for made in (*POLICIES.values(), Cache, Blocks):
        read |= {field.name for field in fields(made)}
    assert {key for _, key in keys()} - read <= {"kind", "policy"}


def test_every_key_is_explained() -> None:
    """In the docstring of its class, or of one that it stands on."""
    unexplained = [
        f"{cls.__name__}.{key}"
        for cls in section_classes()
        for key in cls.model_fields
        if key not in ("kind", "policy")
        and f"{key}:" not in " ".join(c.__doc__ or "" for c in cls.__mro__)
    ]
    assert unexplained == []
