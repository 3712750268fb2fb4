"""`hocket compare`: two runs side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hocket.cli.shared.output import aligned
from hocket.core.formats.documents import read_toml
from hocket.draw.quantity import byte_size, percent, seconds, short
from hocket.errors import ParseError, RecipeError
from hocket.recipes.run_files import METRICS_NAME, RECIPE_NAME, read_metrics

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, as `hocket train` left.")
]
Row = tuple[str, ...]
_NONE: Final = "–"


def compare_command(first: RunArgument, second: RunArgument) -> None:
    """Compare two runs: settings, losses, step time by cause, memory.

    Says which settings differ, and the first step at which the losses part.
    """
    a, b = _ComparedRun.read(first), _ComparedRun.read(second)
    settings, numbers = [*_settings(a, b)], [*_numbers(a, b)]
    for title, head, rows in (
        ("Settings that differ", ("", a.name, b.name), settings or [("none", "", "")]),
        ("Numbers", ("", a.name, b.name, "difference"), numbers),
    ):
        lines = "\n".join(line.rstrip() for line in aligned([head, *rows]))
        typer.echo(f"{title}\n\n{lines}\n")
    typer.echo(_sentence(a, b))


@dataclass(frozen=True, slots=True)
class _ComparedRun:
    """What a run's folder holds.

    Args:
        name: the folder's name.
        settings: every entry of the recipe, as `training.seed`.
        steps: the numbers of each step, by its number.
        summary: the numbers of the whole run; empty if it has not ended.
    """

    name: str
    settings: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, Any]]
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _ComparedRun:
        """Read a run's folder.

        Raises:
            RecipeError: it is no folder of a run.
            ParseError: a file in it cannot be read.
        """
        recipe, metrics = folder / RECIPE_NAME, folder / METRICS_NAME
        for path in (recipe, metrics):
            if not path.exists():
                raise RecipeError(
                    f"{folder} is no folder of a run: it has no {path.name}"
                )
        try:
            settings = dict(_flat(read_toml(recipe.read_text("utf-8"))))
        except ValueError as error:
            raise ParseError(f"{recipe}: {error}") from None
        records = list(read_metrics(metrics))
        steps = {int(x["step"]): x for x in records if x["kind"] == "step"}
        ends = [x for x in records if x["kind"] == "summary"]
        return cls(folder.name, settings, steps, ends[-1] if ends else {})

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step."""
        return self.steps[max(self.steps)]["loss"] if self.steps else None

    @property
    def peak_bytes(self) -> float | None:
        """The most memory of any step."""
        peaks = [step.get("peak_bytes") or 0 for step in self.steps.values()]
        return max(peaks, default=None)


def _flat(entries: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _settings(a: _ComparedRun, b: _ComparedRun) -> Iterator[Row]:
    for name in dict.fromkeys((*a.settings, *b.settings)):
        values = a.settings.get(name), b.settings.get(name)
        if values[0] != values[1]:
            texts = (_NONE if x is None else json.dumps(x, default=str) for x in values)
            yield name, *texts


def _numbers(a: _ComparedRun, b: _ComparedRun) -> Iterator[Row]:
    def pair(name: str) -> tuple[Any, Any]:
        return a.summary.get(name), b.summary.get(name)

    yield _row("last loss", (a.last_loss, b.last_loss), short)
    yield _row("last evaluation's loss", pair("loss"), short)
    yield _row("samples/s while training", pair("samples_per_s"), short)
    for name in "measured", "predicted":
        yield _row(f"step, {name}", pair(f"{name}_step_s"), seconds)
        yield _row(f"bubble, {name}", pair(f"{name}_bubble_fraction"), percent)
        steady = pair(f"{name}_steady_bubble_fraction")
        yield _row(f"steady bubble, {name}", steady, percent)
    idle = [x or {} for x in pair("idle_s")]
    for cause in dict.fromkeys((*idle[0], *idle[1])):
        values = [times.get(cause) for times in idle]
        if any(values):
            yield _row(f"idle: {cause}", values, seconds)
    yield _row("rank 0's peak memory", (a.peak_bytes, b.peak_bytes), byte_size)


def _row(
    name: str, values: Sequence[float | None], text: Callable[[float], str]
) -> Row:
    """Return a row: both values, and by how much the second one is larger."""
    first, second = values
    cells = (_NONE if value is None else text(value) for value in values)
    change = _NONE
    if first == second and first is not None:
        change = "same"
    elif first and second is not None:
        change = f"{100 * (second / first - 1):+.1f} %".replace("-", "−")
        change = "same" if change in ("+0.0 %", "−0.0 %") else change
    return name, *cells, change


def _sentence(a: _ComparedRun, b: _ComparedRun) -> str:
    """Say at which step the losses part, and by how much."""
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        return "the runs have no step in common"
    for step in common:
        first, second = a.steps[step]["loss"], b.steps[step]["loss"]
        if first != second:
            gap = "" if None in (first, second) else f", {second - first:+.3g}"
            return f"losses part at step {step}: {first} and {second}{gap}"
    return f"losses are equal, bit for bit, in all {len(common):,} common steps"
