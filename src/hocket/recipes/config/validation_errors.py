"""What pydantic found wrong with a recipe, in our words and with a way out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hocket.core.formats.documents import Key
from hocket.nearest import nearest
from hocket.recipes.config.recipe import Recipe


def faults_of(
    error: ValidationError, sections: Mapping[str, Any]
) -> Iterator[tuple[Key, str]]:
    """The key and a sentence, for each fault.

    Args:
        error: from validating `sections` as a Recipe.
        sections: what was validated.
    """
    for details in error.errors():
        key = _key(details["loc"])
        for sentence in _sentences(details, key, sections):
            yield _named(key, details["type"], sentence), sentence


def _key(loc: tuple[str | int, ...]) -> Key:
    """Where it is in the file: without the kind, which pydantic adds to the path."""
    parts = tuple(map(str, loc))
    field = Recipe.model_fields.get(parts[0]) if parts else None
    if field is not None and field.discriminator is not None:
        return parts[:1] + parts[2:]
    return parts


def _named(key: Key, fault: str, sentence: str) -> Key:
    """The key that the sentence is about: of a wrong kind, the kind.

    Of a section's options, the one that the sentence begins with.
    """
    if fault.startswith("union_tag"):
        return (*key, _discriminator(key[0]))
    name = sentence.partition(" ")[0]
    is_option = fault == "value_error" and len(key) == 1
    if is_option and any(name in c.model_fields for c in _classes(key[0]).values()):
        return (*key, name)
    return key


def _sentences(
    details: Mapping[str, Any], key: Key, sections: Mapping[str, Any]
) -> Iterator[str]:
    value, context = details["input"], details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            noun = "key" if len(key) > 1 else "section"
            yield f"no such {noun}; {nearest(key[-1], _names_beside(key, sections))}"
        case "missing":
            yield f"missing: add it to the recipe, or --set {'.'.join(key)}=VALUE"
        case "union_tag_not_found" | "union_tag_invalid":
            kind, kinds = context.get("tag"), [*map(str, _classes(key[0]))]
            unknown = (
                f"no {_discriminator(key[0])} {kind!r}; {nearest(f'{kind}', kinds)}"
            )
            missing = f"missing; there are {', '.join(map(repr, kinds))}"
            yield missing if kind is None else unknown
        case "literal_error":
            names = re.findall(r"'([^']+)'", context["expected"])
            yield f"no {value!r:.80}; {nearest(str(value), names)}"
        case "value_error":
            yield from str(context["error"]).splitlines()
        case "tuple_type" | "sequence_str":
            yield f"{value!r:.80} should be a list, such as [{value!r:.80}]"
        case "model_type" | "model_attributes_type":
            yield f"{value!r:.80} should be a section, [{'.'.join(key)}] and its keys"
        case _:
            yield details["msg"].replace("Input", f"{value!r:.80}", 1)


def _names_beside(key: Key, sections: Mapping[str, Any]) -> list[str]:
    """The names that could stand where `key` stands."""
    if len(key) == 1:
        return list(Recipe.model_fields)
    classes = _classes(key[0])
    kind = None if None in classes else sections[key[0]][_discriminator(key[0])]
    return list(classes[kind].model_fields)


def _classes(section: str) -> dict[str | None, type[BaseModel]]:
    """The classes of a section, by kind; under no kind where there is only one."""
    annotation = Recipe.model_fields[section].annotation
    members = [x for x in get_args(annotation) or (annotation,) if x is not NoneType]
    fields = [member.model_fields.get(_discriminator(section)) for member in members]
    return {
        kind: member
        for member, field in zip(members, fields, strict=True)
        for kind in ([None] if field is None else get_args(field.annotation))
    }


def _discriminator(section: str) -> str:
    """The key that says which kind of section it is."""
    return str(Recipe.model_fields[section].discriminator or "kind")
