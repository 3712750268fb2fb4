"""Writes docs/reference/seen-and-refused.md, of the conformance suite's own cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.conformance.cases import FILES
from tests.conformance.script import WAYS, Case
from tests.conformance.table import KINDS, NAMES, ROWS, Row

PAGE: Final = Path(__file__).parents[2] / "docs/reference/seen-and-refused.md"
_HEAD: Final = """# What a plain loop sees, and what is refused

What the plain loop would do, the pipeline does (*followed*), or it refuses by an error
that names what (*refused*), when it is made or at the step in which it happens. There
is no third class. `tests/conformance/` holds this page: each case is a small script of
a plain loop, run in nine ways, and compared with the loop over the user's own modules
to 1e-10, or to 1e-7 where a case computes in float32. `tests/tested_with/page.py`
writes the page.
"""
_SIGNS: Final = {"equal": "=", "refused": "refused", "open": "open", "none": "-"}


def seen_page() -> str:
    """Return the page in Markdown."""
    sections = [_HEAD, _kinds(), _matrix(), *_reasons(), _names()]
    return "\n".join(sections)


def _kinds() -> str:
    lines = ["## Kinds", "", "| what | answer | how | cases |", "|---|---|---|---|"]
    lines += [f"| {x.what} | {x.answer} | {x.how} | {_count(x)} |" for x in ROWS]
    return "\n".join(lines) + "\n"


def _count(row: Row) -> str:
    if not row.file:
        return "-"
    cases = [x for file, found in _by_file() if file == row.file for x in found]
    return f"{len(cases)}, `{row.file}.py`"


def _by_file() -> Iterator[tuple[str, list[Case]]]:
    for module in FILES:
        found = [x for x in vars(module).values() if isinstance(x, Case)]
        yield module.__name__.rpartition(".")[2], found


def _matrix() -> str:
    kinds: Counter[str] = Counter()
    lines = [f"| case | {' | '.join(WAYS.values())} |", "|---" * (len(WAYS) + 1) + "|"]
    num_cases = 0
    for file, cases in _by_file():
        lines.append(f"| **{file}** |" + " |" * len(WAYS))
        num_cases += len(cases)
        for case in cases:
            found = [case.verdict(way).kind for way in WAYS]
            kinds.update(found)
            cells = " | ".join(_SIGNS[kind] for kind in found)
            lines.append(f"| {case.what} | {cells} |")
    return (
        f"## Cases\n\n{num_cases} cases: {kinds['equal']} cells equal the plain loop "
        f"(=), {kinds['refused']} are refused by name,\n{kinds['open']} are still "
        f"open, and {kinds['none']} ways cannot run their case (-).\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _reasons() -> Iterator[str]:
    for kind, title, verb in (
        ("refused", "Refused: what the error says", "the error says"),
        ("open", "Still open: neither equal nor refused", "today"),
    ):
        lines = [
            f"| {case.what} | {text} | {', '.join(ways)} |"
            for _, cases in _by_file()
            for case in cases
            for text, ways in _texts(case, kind).items()
        ]
        if lines:
            head = [f"## {title}", "", f"| case | {verb} | ways |", "|---|---|---|"]
            yield "\n".join([*head, *lines]) + "\n"


def _texts(case: Case, kind: str) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for way, name in WAYS.items():
        verdict = case.verdict(way)
        if verdict.kind == kind:
            found.setdefault(verdict.text, []).append(name)
    return found


def _names() -> str:
    head = ["| name | answer | how |", "|---|---|---|"]
    names = [f"| `{name}` | {a} | {how} |" for name, (a, how) in NAMES.items()]
    kinds = [f"| {name} | {a} | {how} |" for name, (a, how) in KINDS.items()]
    return "\n".join(
        ["## Public names of `torch.nn.Module`", "", *head, *names, *kinds, ""]
    )
