"""The options of `hocket simulate` that change costs: devices, links, jitter.

--costs run/ --slow rank=1:1.2 --link 0-1:10Gb/s --jitter 0.05
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hocket.errors import PlanError

if TYPE_CHECKING:
    from hocket.core.costs import Costs
    from hocket.core.program import Program

_SLOW: Final = re.compile(r"(?:rank=)?(\d+):(\d+(?:\.\d+)?)")
_LINK: Final = re.compile(r"(\d+)-(\d+):(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(b|B)/s")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The options that say where costs come from, and what is changed in them."""

    costs_from: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="RUN|FILE",
            help="The costs that a run has left in its folder, or such a file; "
            "instead of equal devices.",
        ),
    ] = None
    slow: Annotated[
        list[str] | None,
        typer.Option(
            "--slow",
            metavar="rank=D:X",
            help="What if device D took X times as long? Such as rank=1:1.2.",
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="A-B:SPEED",
            help="What if this link had another bandwidth? Such as 0-1:10Gb/s.",
        ),
    ] = None
    jitter: Annotated[
        float | None,
        typer.Option(
            "--jitter",
            metavar="X",
            help="What if ops took longer or shorter by chance? Their standard "
            "deviation over their mean, such as 0.05.",
        ),
    ] = None

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be changed."""
        return bool(self.slow or self.link) or self.jitter is not None

    def read(self) -> Costs | None:
        """Return the costs of `--costs`, or None without it.

        Raises:
            PlanError: there are none.
            ParseError: they cannot be read.
        """
        from hocket.core.formats.costs_json import from_json
        from hocket.core.formats.documents import read_text
        from hocket.recipes.run_files import COSTS_NAME

        if self.costs_from is None:
            return None
        path = self.costs_from
        if path.is_dir():
            path = path / COSTS_NAME
        if not path.exists():
            raise PlanError(
                f"{path} does not exist: `hocket train` leaves {COSTS_NAME} in a run's "
                "folder when the run ends"
            )
        return from_json(read_text(path), path=str(path))

    def changed(self, costs: Costs, program: Program) -> Costs:
        """Return the costs as they would be.

        Raises:
            CostsError: a device or number that cannot be.
            typer.BadParameter: an option that cannot be read.
        """
        from hocket.core.costs import with_bandwidth, with_slow_device

        for text in self.slow or ():
            found = _SLOW.fullmatch(text)
            if found is None:
                raise typer.BadParameter(f"--slow {text}: write rank=1:1.2")
            device, factor = int(found[1]), float(found[2])
            costs = with_slow_device(costs, program, device, factor)
        for text in self.link or ():
            ends, bytes_per_s = _speed(text)
            costs = with_bandwidth(costs, program, ends, bytes_per_s)
        return costs if self.jitter is None else replace(costs, jitter=self.jitter)


def _speed(text: str) -> tuple[tuple[int, int], float]:
    """Read `0-1:10Gb/s`: two devices, and bits (b) or bytes (B) per second."""
    found = _LINK.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"--link {text}: write 0-1:10Gb/s, or 0-1:1.2GB/s")
    a, b, number, prefix, binary, unit = found.groups()
    size = (1024 if binary else 1000) ** _POWERS[prefix]
    return (int(a), int(b)), float(number) * size / (8 if unit == "b" else 1)
