"""Define what a page holds besides timelines: tables, charts over steps, and facts."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from hocket.errors import PlanError


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first column names the rows, the others are set as numbers.

    Args:
        title: above it.
        head: one text per column.
        rows: each with one text per column.
        is_open: False folds it away below its title.
        note: below it, in lines.

    Raises:
        PlanError: a row has another number of columns than the head.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_open: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse rows that do not fit the head."""
        for row in self.rows:
            if len(row) != len(self.head):
                raise PlanError(
                    f"table {self.title!r} has {len(self.head)} columns, and a row of "
                    f"{len(row)}: {', '.join(row)}"
                )


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity over steps. Values that are not finite leave a gap.

    Args:
        name: for the legend.
        steps: ascending.
        values: one per step.
        is_evaluation: drawn as points: measured now and then, on other data.

    Raises:
        PlanError: there are more steps than values, or fewer.
    """

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    is_evaluation: bool = False

    def __post_init__(self) -> None:
        """Refuse steps and values that do not belong together."""
        if len(self.steps) != len(self.values):
            raise PlanError(
                f"line {self.name!r} has {len(self.steps)} steps and "
                f"{len(self.values)} values"
            )

    def finite_values(self) -> list[float | None]:
        """Return the values, with None where there is no finite number."""
        return [value if isfinite(value) else None for value in self.values]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines of one unit over one axis of steps.

    Args:
        title: says what is drawn, with the unit.
        lines: at most a few.
    """

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture of one's own, above the timelines.

    Args:
        title: says what is drawn, with units.
        svg: the picture, with escaped texts: the page holds it as it is. The page's
            colours are its CSS variables, such as `var(--ink)`.
    """

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts to look up, such as a recipe, a machine or versions, folded away.

    Args:
        title: what it is.
        rows: `(name, value)` pairs.
        text: set as it is, in a fixed-width font.
    """

    title: str
    rows: tuple[tuple[str, str], ...] = ()
    text: str = ""
