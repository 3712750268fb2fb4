"""Write numbers as people read them: times, bytes, shares, and the ticks of an axis."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit and how much of the base unit it is."""

    name: str
    size: float

    def number(self, amount: float) -> str:
        """Write an amount in this unit, without the unit's name."""
        return short(amount / self.size)

    def text(self, amount: float) -> str:
        """Write an amount in this unit, with its name."""
        return f"{self.number(amount)} {self.name}".rstrip()


_TIMES: Final = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6), Unit("ns", 1e-9))
_BYTES: Final = (
    Unit("TiB", 2.0**40),
    Unit("GiB", 2.0**30),
    Unit("MiB", 2.0**20),
    Unit("KiB", 2.0**10),
    Unit("B", 1.0),
)


def time_unit(longest_s: float) -> Unit:
    """Return the unit in which a span of time, and what is within it, reads best."""
    return next((u for u in _TIMES if longest_s >= u.size), _TIMES[-1])


def byte_unit(most_bytes: float) -> Unit:
    """Return the unit in which a number of bytes, and fewer, reads best."""
    return next((u for u in _BYTES if most_bytes >= u.size), _BYTES[-1])


def seconds(time_s: float) -> str:
    """Write a time with its unit.

    >>> seconds(0.0123456), seconds(0.0)
    ('12.35 ms', '0 s')
    """
    return time_unit(abs(time_s)).text(time_s) if time_s else "0 s"


def byte_size(num_bytes: float) -> str:
    """Write a number of bytes with its unit.

    >>> byte_size(3 * 2**20)
    '3 MiB'
    """
    return byte_unit(abs(num_bytes)).text(num_bytes)


def percent(share: float) -> str:
    """Write a share as a percentage.

    >>> percent(0.27272727)
    '27.3 %'
    """
    text = f"{100 * share:.1f}"
    return "0 %" if text in ("0.0", "-0.0") else f"{text} %"


def counted(number: int | str, noun: str) -> str:
    """Write a number and its noun.

    >>> counted(1, "step"), counted(4000, "microbatch"), counted("4 + 4", "stage")
    ('1 step', '4,000 microbatches', '4 + 4 stages')
    """
    text = f"{number:,}" if isinstance(number, int) else number
    ending = "" if text == "1" else "es" if noun.endswith("ch") else "s"
    return f"{text} {noun}{ending}"


def short(number: float) -> str:
    """Write at most four digits after leading zeros, and no trailing zeros.

    >>> short(33.600000000000001), short(123456.7), short(0.5)
    ('33.6', '123,457', '0.5')
    """
    if number == 0:
        return "0"
    decimals = max(0, 3 - floor(log10(abs(number))))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(limit: float, most: int) -> list[float]:
    """Return round numbers from 0 to `limit`, at most `most` + 1 of them.

    >>> ticks(33.6, 8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if limit <= 0:
        return [0.0]
    raw = limit / max(1, most)
    power = 10.0 ** floor(log10(raw))
    factor = next(f for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    gap = factor * power
    decimals = max(0, ceil(-log10(gap)) + 1)
    count = floor(limit / gap * (1 + 1e-9))
    return [round(i * gap, decimals) for i in range(count + 1)]
