"""Read a recipe: the file, then `--set`, then the defaults; all faults at once.

    built-in name ─┐
                   ├─▶ TOML ──▶ + --set section.key=value ──▶ Recipe, and of each
    path of a file ┘                                          value where it is from

A later source replaces single keys of an earlier one, never whole sections.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from hocket.core.formats.documents import Key, lines_of_keys, read_toml
from hocket.errors import RecipeError
from hocket.nearest import nearest
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.run_files import RECIPE_NAME
from hocket.recipes.user_functions import checkout, is_in_zoo, is_known

SUFFIX: Final = ".toml"
DEFAULT_ORIGIN: Final = "default"
SET_ORIGIN: Final = "--set"

Sections = dict[str, Any]
READ: Final[tuple[Key, ...]] = (  # relative to the recipe's folder
    ("data", "path"),
    ("data", "vocabulary"),
    ("model", "pretrained"),
    ("teacher", "weights"),
    ("teacher_model", "pretrained"),
    ("checkpoint", "resume"),
)
WRITTEN: Final[tuple[Key, ...]] = (  # relative to the current folder
    ("run", "folder"),
    ("run", "profile_folder"),
    ("cache", "folder"),
)
IMPORTED: Final[tuple[Key, ...]] = (
    ("model", "function"),
    ("teacher_model", "function"),
    ("data", "function"),
    ("task", "loss"),
    ("task", "metrics"),
    ("task", "evaluate"),
    ("run", "callbacks"),
    ("run", "loggers"),
)
NO_PATHS: Final = {"resume": "auto", "loggers": "tensorboard"}  # values: words

_WAY_OUT: Final = (
    "say it on the command line (--set {key}=...), or allow it (--allow-outside)"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A recipe with every value in place.

    Args:
        recipe: what to do.
        origins: the origin of each value that is not a default: a file's line, `--set`.
        import_folders: the folders of the modules that it names.
    """

    recipe: Recipe
    origins: Mapping[Key, str]
    import_folders: tuple[Path, ...] = ()

    def to_toml(self) -> str:
        """The whole recipe as TOML, which reads back as the same recipe.

        TOML knows no None: keys without a value are left out.
        """
        lines: list[str] = []
        for section, values in self.recipe.model_dump(exclude_none=True).items():
            lines += ["", f"[{section}]"]
            for name in sorted(values, key=lambda x: x not in ("kind", "policy")):
                origin = self.origins.get((section, name), DEFAULT_ORIGIN)
                lines.append(f"{name} = {_toml(values[name])}  # {origin}")
        return "\n".join([*lines[1:], ""])


def builtin_names() -> list[str]:
    """Return the names of the built-in recipes."""
    folder = files("hocket.recipes") / "builtin"
    return sorted(
        entry.name.removesuffix(SUFFIX)
        for entry in folder.iterdir()
        if entry.name.endswith(SUFFIX)
    )


def resolve(
    source: str, settings: Sequence[str] = (), *, allow_outside: bool = False
) -> Resolved:
    """Read the recipe of this name or path, and lay the settings over it.

    Args:
        source: a built-in recipe's name, or the path of a TOML file.
        settings: `section.key=value` each; the value is TOML, or else a plain string.
            Without a value, the key is taken away.
        allow_outside: lets the file name paths and modules that are not in its folder.

    Raises:
        RecipeError: there is no such recipe, or it is not valid; names every fault,
            its key, and where it was said.
    """
    label, text, folder = _read(source)
    sections = _parse(label, text)
    said_here = {_key_of(setting) for setting in settings}
    strays = [] if allow_outside else [*outside_paths(sections, folder)]
    found = [(key, fault) for key, fault in strays if key not in said_here]
    import_folders = [folder] if functions_in(sections) - said_here else []
    make_absolute(sections, folder)
    origins = {key: f"{label}, line {n}" for key, n in lines_of_keys(text).items()}
    faults = [*_lay_over(sections, origins, settings)]
    if functions_in(sections) & said_here or (import_folders and allow_outside):
        import_folders.append(Path.cwd())
    import_folders += zoo_folders(sections)
    for key in [*_large_integers(sections)]:
        found.append((key, "an integer of more than 64 bits"))
        (sections if len(key) == 1 else sections[key[0]]).pop(key[-1])
    for section, field in Recipe.model_fields.items():
        if field.is_required():
            sections.setdefault(section, {})
    if isinstance(sections["run"], dict):
        sections["run"].setdefault("name", Path(label).name.removesuffix(SUFFIX))
    try:
        recipe = Recipe.model_validate(sections)
    except ValidationError as error:
        found += faults_of(error, sections)
    faults += [f"{_name(key)}{fault}{_where(key, origins)}" for key, fault in found]
    if faults:
        raise RecipeError(_sentence(label, faults))
    return Resolved(recipe, origins, tuple(import_folders))


def resolved_in(run_dir: str | Path) -> Resolved:
    """Return the recipe that a run's folder holds, as it was resolved.

    Raises:
        RecipeError: there is none.
    """
    return resolve(str(Path(run_dir) / RECIPE_NAME), allow_outside=True)


def _read(source: str) -> tuple[str, str, Path]:
    """The recipe's label, its text, and the folder its paths start from."""
    path = Path(source)
    if source in builtin_names():
        entry = files("hocket.recipes") / "builtin" / f"{source}{SUFFIX}"
        return source, entry.read_text(encoding="utf-8"), Path.cwd()
    if not _is_file(path):
        way_out = (
            f"there is no such file in {path.resolve().parent}"
            if path.suffix == SUFFIX or len(path.parts) > 1
            else nearest(source, builtin_names()) + " (or the path of a TOML file)"
        )
        raise RecipeError(f"no recipe {source!r}: {way_out}")
    try:
        return source, path.read_text(encoding="utf-8"), path.resolve().parent
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{source} cannot be read as text: {error}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def _parse(label: str, text: str) -> Sections:
    try:
        return read_toml(text)
    except ValueError as error:
        raise RecipeError(f"{label} is not TOML: {error}") from error


def _lay_over(
    sections: Sections, origins: dict[Key, str], settings: Iterable[str]
) -> Iterable[str]:
    """Put each `section.key=value` in its place; yields what is wrong with any."""
    for setting in settings:
        _, equals, value = setting.partition("=")
        key = _key_of(setting)
        if not equals or len(key) != 2 or not all(key):
            yield f"--set {setting}: it must read section.key=value"
            continue
        section, leaf = key
        if not isinstance(sections.setdefault(section, {}), dict):
            continue  # the file's fault, which is reported as such
        if not value.strip():
            sections[section].pop(leaf, None)
            origins.pop(key, None)
            continue
        given = {section: {leaf: _value(value.strip())}}
        make_absolute(given, Path.cwd())
        sections[section].update(given[section])
        origins[key] = SET_ORIGIN


def _key_of(setting: str) -> Key:
    """The key that a setting says something about."""
    return tuple(part.strip() for part in setting.partition("=")[0].split("."))


def _value(text: str) -> Any:
    """A value as TOML reads it; what TOML does not read is a string as it stands."""
    try:
        return read_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _large_integers(sections: Mapping[str, Any]) -> Iterator[Key]:
    """Yield each key whose value has an integer of more than 64 bits."""
    for section, values in sections.items():
        leaves: dict[Key, Any] = {(section,): values}
        if isinstance(values, dict):
            leaves = {(section, name): value for name, value in values.items()}
        yield from (key for key, value in leaves.items() if _is_large(value))


def _is_large(value: Any) -> bool:
    if isinstance(value, int):
        return not -(2**63) <= value < 2**63
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(map(_is_large, inside))


def _toml(value: Any) -> str:
    """A TOML value. JSON's strings, numbers, truths and lists are TOML's as well."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_toml(name)} = {_toml(one)}" for name, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _name(key: Key) -> str:
    return f"{'.'.join(key)}: " if key else ""


def _where(key: Key, origins: Mapping[Key, str]) -> str:
    """Where the key was said; of a key that was not, where its section begins."""
    for known in (key, key[:1]):
        if known in origins:
            return f" ({origins[known]})"
    return ""


def _sentence(label: str, faults: Sequence[str]) -> str:
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return "\n".join([f"the recipe {label} has {count}:", *(f"  {f}" for f in faults)])


# Restricts a recipe's file to paths and modules in its own folder.
#
# Recipes are shared. A recipe by another author must not read files, write folders or
# import modules elsewhere on this machine, such as
#
#   data.path = "../../.ssh/id_rsa"    run.folder = "/etc"    model.function = "os:..."
#
# Settings on the command line may name any path or module, and `--allow-outside` lets a
# recipe's file do so, too.
def make_absolute(sections: Mapping[str, Any], folder: Path) -> None:
    """Make the paths that a recipe reads absolute."""
    for (section, name), path in _said(sections, READ):
        full = _full(path, folder)
        if NO_PATHS.get(name) != path and full is not None:
            sections[section][name] = str(full)


def outside_paths(
    sections: Mapping[str, Any], folder: Path
) -> Iterator[tuple[Key, str]]:
    """Yield each key whose path or module is outside, with an error sentence.

    Args:
        sections: the file's sections.
        folder: the file's folder.
    """
    for keys, base, whose in (
        (READ, folder, "the recipe's folder"),
        (WRITTEN, Path.cwd(), "the current folder"),
    ):
        for key, path in _said(sections, keys):
            if NO_PATHS.get(key[1]) != path and not _is_inside(path, base):
                yield key, f"{path!r} is outside of {whose} {base}: {_way_out(key)}"
    for key, name in _imported(sections):
        module = name.partition(":")[0]
        if not is_known(name) and not _is_beside(module, folder):
            yield (
                key,
                f"the module {module!r} is not in the recipe's folder {folder}: "
                f"{_way_out(key)}",
            )


def functions_in(sections: Mapping[str, Any]) -> set[Key]:
    """Return the keys that name the user's functions."""
    return {key for key, name in _imported(sections) if not is_known(name)}


def zoo_folders(sections: Mapping[str, Any]) -> list[Path]:
    """Return the folder of hocket's repository, if a function in it is named."""
    named = any(is_in_zoo(name.partition(":")[0]) for _, name in _imported(sections))
    folder = checkout() if named else None
    return [] if folder is None else [folder]


def _imported(sections: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield each name of a function, under its key."""
    for key, name in _said(sections, IMPORTED):
        if NO_PATHS.get(key[1]) != name:
            yield key, name


def _said(
    sections: Mapping[str, Any], keys: tuple[Key, ...]
) -> Iterator[tuple[Key, str]]:
    """Yield the strings under these keys; a list's entries one by one."""
    for section, name in keys:
        values = sections.get(section)
        value = values.get(name) if isinstance(values, dict) else None
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                yield (section, name), one


def _is_inside(path: str, folder: Path) -> bool:
    """Return whether a path is in a folder after links are resolved."""
    full = _full(path, folder)
    return full is not None and full.is_relative_to(folder.resolve())


def _full(path: str, folder: Path) -> Path | None:
    """Resolve a path; None if it cannot be resolved."""
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop, an unknown user, a NUL
        return None


def _is_beside(module: str, folder: Path) -> bool:
    """Return whether a module's file is in a folder, and no loaded module hides it."""
    top, *_ = parts = module.split(".")
    if top in sys.stdlib_module_names or top == "hocket":
        return False
    path = folder.joinpath(*parts)
    files = [path.with_suffix(".py"), path / "__init__.py"]
    if not any(file.is_file() and _is_inside(str(file), folder) for file in files):
        return False
    loaded = getattr(sys.modules.get(top), "__file__", None)
    return loaded is None or _is_inside(loaded, folder)


def _way_out(key: Key) -> str:
    return _WAY_OUT.format(key=".".join(key))


# What pydantic found wrong with a recipe, in our words and with a way out.
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
