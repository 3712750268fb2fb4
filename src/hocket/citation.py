"""The papers behind a run, as BibTeX.

    "zb-v" ─▶ docstring of its schedule ─▶ "Source: Qi et al., arXiv:2401.10241 ..."
                                                                      │
    @inproceedings{qi2024zero, ...}  ◀─ papers.bib ◀─ eprint, doi, title or shorttitle

What has a source names it in its own docstring; papers.bib says how a paper is cited.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from hocket import freeze
from hocket.errors import PlanError
from hocket.nearest import nearest
from hocket.schedules import SCHEDULES

_SOURCES: Final = re.compile(r"^Sources?: .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_ARXIV: Final = re.compile(r"\barXiv:(\d{4}\.\d{5})")
_ENTRY: Final = re.compile(r"^@\w+\{.*?^\}", re.MULTILINE | re.DOTALL)
_FIELD: Final = re.compile(r"^  (eprint|doi|title|shorttitle) = \{(.*)\}", re.MULTILINE)


def citation(*subjects: object) -> str:
    """Return the papers behind schedules, recipes and parts of a run, as BibTeX.

    Args:
        subjects: each the name of a schedule or of a recipe, the path of a recipe's
            file, a `Pipeline`, or a class, function or object of hocket's that names
            its source, as `hocket.freeze.Alpha` and `hocket.Byol` do.

    Returns:
        Each paper once, in the order of `papers.bib`; then those that only an arXiv
        number names. Empty if no subject names a source.

    Raises:
        PlanError: no schedule and no recipe has this name; names the nearest.

    >>> print(citation("tspipe").partition(",")[0])
    @inproceedings{lim2022tspipe
    """
    text = _plain("\n\n".join(part for one in subjects for part in _sources(one)))
    cited = [entry for entry, marks in _papers().items() if _names(text, marks)]
    known = {mark for marks in _papers().values() for mark in marks}
    cited += [
        f"@misc{{arxiv{number},\n  eprint = {{{number}}}\n}}"
        for number in dict.fromkeys(_ARXIV.findall(text))
        if number not in known
    ]
    return "\n\n".join(cited)


def _sources(subject: object) -> Iterator[str]:
    """Yield the sentences in which a subject names its sources."""
    if hasattr(subject, "plan"):  # a Pipeline: what it plays has a name
        subject = subject.plan.schedule_name
        if subject not in SCHEDULES:  # an order that was given, or read from a file
            return
    if not isinstance(subject, str):
        is_definition = isinstance(subject, type) or inspect.isroutine(subject)
        yield from _sources_of(subject if is_definition else type(subject))
    elif subject in SCHEDULES:
        yield from _sources_of(SCHEDULES[subject].make)
    else:
        yield from _recipe_sources(subject)


def _sources_of(definition: object) -> Iterator[str]:
    """Yield those of a class or a function; if it has none, those of its module."""
    module = sys.modules.get(getattr(definition, "__module__", ""))
    for documented in (definition, module):
        found = _SOURCES.findall(inspect.getdoc(documented) or "")
        if found:
            yield from found
            return


def _recipe_sources(name: str) -> Iterator[str]:
    """Yield those of a recipe: its first comments, its schedule, its way to freeze."""
    builtin = files("hocket") / "recipes" / "builtin"
    names = [path.name.removesuffix(".toml") for path in builtin.iterdir()]
    if name in names:
        text = (builtin / f"{name}.toml").read_text(encoding="utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        known = [*SCHEDULES, *names]
        raise PlanError(
            f"no schedule or recipe is named {name!r}; {nearest(name, known)}"
        )
    yield text.partition("\n\n")[0].replace("\n# ", " ")
    recipe = tomllib.loads(text)
    schedule = recipe.get("pipeline", {}).get("schedule", "")
    if schedule in SCHEDULES:
        yield from _sources(schedule)
    policy = recipe.get("freeze", {}).get("policy", "")
    class_name = "".join(part.capitalize() for part in policy.split("-"))
    if class_name in freeze.__all__:
        yield from _sources(getattr(freeze, class_name))


def _plain(text: str) -> str:
    """Return a text without braces, on one line."""
    return " ".join(re.sub(r"[{}]", "", text).split())


def _names(text: str, marks: frozenset[str]) -> bool:
    """Return whether a text has one of a paper's marks as whole words."""
    return any(re.search(rf"(?<!\w){re.escape(mark)}(?![\w-])", text) for mark in marks)


@cache
def _papers() -> dict[str, frozenset[str]]:
    """Return each entry of papers.bib with what a source may name it by."""
    text = (files("hocket") / "papers.bib").read_text(encoding="utf-8")
    return {
        entry: frozenset(_plain(value) for _, value in _FIELD.findall(entry))
        for entry in _ENTRY.findall(text)
    }
