"""Compare two runs by the files in their folders: settings, losses, time, memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hocket.core.formats.documents import read_toml
from hocket.draw.html.content import Table
from hocket.draw.quantity import byte_size, seconds, short
from hocket.errors import ParseError, RecipeError
from hocket.recipes.run_files import METRICS_NAME, RECIPE_NAME, read_metrics

_NONE: Final = "–"
Row = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class RunFolderFiles:
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
    def read(cls, folder: Path) -> RunFolderFiles:
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


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs side by side.

    Args:
        first: one run.
        second: the other one; differences are its numbers less the first one's.
    """

    first: RunFolderFiles
    second: RunFolderFiles

    @property
    def tables(self) -> tuple[Table, ...]:
        """The settings that differ; losses; step time by cause; memory."""
        head = (self.first.name, self.second.name)
        return (
            Table("Settings that differ", ("", *head), tuple(self._settings())),
            Table("Numbers", ("", *head, "difference"), tuple(self._numbers())),
        )

    @property
    def sentence(self) -> str:
        """Say at which step the losses part, and by how much."""
        common = sorted(self.first.steps.keys() & self.second.steps.keys())
        if not common:
            return "the runs have no step in common"
        for step in common:
            a, b = (run.steps[step]["loss"] for run in (self.first, self.second))
            if a != b:
                gap = "" if None in (a, b) else f", {_signed(b - a)}"
                return f"losses part at step {step}: {a} and {b}{gap}"
        return f"losses are equal, bit for bit, in all {len(common):,} common steps"

    def _settings(self) -> Iterator[tuple[str, str, str]]:
        a, b = self.first.settings, self.second.settings
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                yield name, _text(a.get(name)), _text(b.get(name))

    def _numbers(self) -> Iterator[Row]:
        def pair(name: str) -> tuple[Any, Any]:
            return self.first.summary.get(name), self.second.summary.get(name)

        yield _row("last loss", [*map(_last_loss, (self.first, self.second))], short)
        yield _row("last evaluation's loss", pair("loss"), short)
        yield _row("samples/s", pair("samples_per_s"), short)
        yield _row("step, measured", pair("measured_step_s"), seconds)
        yield _row("step, predicted", pair("predicted_step_s"), seconds)
        idle = [x or {} for x in pair("idle_s")]
        for cause in dict.fromkeys((*idle[0], *idle[1])):
            values = [times.get(cause) for times in idle]
            if any(values):
                yield _row(f"idle: {cause}", values, seconds)
        peaks = [_peak(run) for run in (self.first, self.second)]
        yield _row("peak memory of rank 0", peaks, byte_size)


def _flat(entries: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _last_loss(run: RunFolderFiles) -> float | None:
    return run.steps[max(run.steps)]["loss"] if run.steps else None


def _peak(run: RunFolderFiles) -> float | None:
    peaks = [step.get("peak_bytes") or 0 for step in run.steps.values()]
    return max(peaks, default=None)


def _text(value: object) -> str:
    return _NONE if value is None else json.dumps(value, default=str)


def _row(
    name: str, values: Sequence[float | None], text: Callable[[float], str]
) -> Row:
    first, second = values
    cells = [_NONE if value is None else text(value) for value in values]
    if first is None or second is None:
        return name, cells[0], cells[1], _NONE
    if not first:
        return name, cells[0], cells[1], _NONE if second else "same"
    return name, cells[0], cells[1], _percent(second / first - 1)


def _percent(share: float) -> str:
    text = f"{100 * share:+.1f} %".replace("-", "−")
    return "same" if text in ("+0.0 %", "−0.0 %") else text


def _signed(number: float) -> str:
    return f"{number:+.3g}"
