"""For which sizes a graph is right that was captured for any.

What a model's code decides by a size holds for some sizes only:

    if tokens.shape[1] > 512: ...        captured with 7: right for 2 to 512
    if len(tokens) == 1: ...             captured with 13: right for 2 and more

Such conditions are over the symbols of the dimensions that torch.export left open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from hocket.model.trace.example import Place

# An expression over sizes, and whether it must hold or must not.
Condition: TypeAlias = tuple[Any, bool]

_SAMPLES: Final = sympy.Symbol("num_samples", integer=True, positive=True)
_ANY: Final[dict[Any, Any]] = {_SAMPLES: ValueRanges(1, int_oo)}


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """The dimensions that a graph leaves open, and what its code takes for granted.

    Args:
        symbols: by place; those of lengths.
        conditions: what must hold of lengths, and may speak of samples besides.
        of_samples: what must hold of the number of samples alone.
        only: the only number of samples that it is right for; 0 if others are, too.
        smallest: the smallest size of each symbol.
        known: numbers of samples that it is right for.
        asks: why no numbers but the known are right, if so.
        is_any: whether it is right for all lengths: it calls modules alone.
    """

    symbols: Mapping[Place, Any] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    of_samples: tuple[Condition, ...] = ()
    only: int = 0
    known: set[int] = field(default_factory=set)
    asks: str = ""
    smallest: Mapping[Any, int] = field(default_factory=dict)
    is_any: bool = False

    @classmethod
    def of(
        cls,
        symbols: Mapping[Place, Any],
        conditions: Iterable[Condition],
        ranges: Mapping[Any, Any],
        lengths: Collection[Place],
    ) -> OpenSizes:
        """Return the conditions that some sizes do not fulfil.

        Args:
            symbols: by place; of those that are not among `lengths`, samples.
            conditions: all that were asked.
            ranges: the sizes that each symbol may have, by these conditions.
            lengths: the places that are no samples.
        """
        same = {x: _SAMPLES for place, x in symbols.items() if place not in lengths}
        every = dict.fromkeys((x.xreplace(same), was) for x, was in conditions)
        smallest = {x: int(ranges[x].lower) for x in symbols.values() if x in ranges}
        sizes = {x: ValueRanges(least, int_oo) for x, least in smallest.items()} | _ANY
        open_ones = [x for x in every if _answer(x[0], sizes) is None]
        return cls(
            {place: x for place, x in symbols.items() if place in lengths},
            tuple(x for x in open_ones if x[0].free_symbols != {_SAMPLES}),
            tuple(x for x in open_ones if x[0].free_symbols == {_SAMPLES}),
            smallest=smallest,
        )

    def fault_of_samples(self, num_samples: int) -> str:
        """Return why it is not right for a number of samples; nothing if it is."""
        way_out = "leave out smaller batches (drop_last=True)"
        if self.only and num_samples != self.only:
            only = f"only with the {self.only} it was captured with"
            return f"it runs {only}, because its code fixes the number: {way_out}"
        if num_samples in self.known:
            return ""
        if self.asks:
            known = ", ".join(map(str, sorted(self.known)))
            return (
                f"its code was run with {known} alone, and {self.asks}: put that code "
                f"into a submodule of its own, or {way_out}"
            )
        for condition, was in self.of_samples:
            exact = condition.xreplace({_SAMPLES: sympy.Integer(num_samples)})
            if _answer(exact) is not was:
                text = _text(condition, was)
                return f"its code decides by the number ({text}): {way_out}"
        self.known.add(num_samples)
        return ""

    def fault(
        self, sizes: Mapping[Place, int], own: Mapping[Place, int], names: Sequence[str]
    ) -> str:
        """Return why the graph is not right for a batch; nothing if it is.

        Args:
            sizes: the batch's sizes behind its samples.
            own: those of the example, which all but the open dimensions keep.
            names: the leaves' names.
        """
        if self.is_any:
            return ""
        exact: dict[Any, Any] = {}
        for place, size in sizes.items():
            symbol = self.symbols.get(place)
            if size < self.smallest.get(symbol, own[place]) or (
                symbol is None and size != own[place]
            ):
                return f"it is not captured for {_shown(place, names)} = {size}"
            exact[symbol] = sympy.Integer(size)
        for condition, was in self.conditions:
            if _answer(condition.xreplace(exact)) is not was:
                text = _text(condition, was)
                for place, symbol in self.symbols.items():
                    text = text.replace(str(symbol), _shown(place, names))
                return f"its code decides by lengths: {text}"
        return ""


# Right for two samples and more.
BUT_ONE: Final = OpenSizes(of_samples=((sympy.Ne(_SAMPLES, 1), True),))


def _answer(condition: Any, ranges: dict[Any, Any] = _ANY) -> bool | None:
    """Return whether a condition holds for all sizes; None if for some only."""
    found = bound_sympy(condition, ranges)
    return bool(found.lower) if found.is_singleton() else None


def _text(condition: Any, was: bool) -> str:
    return str(PythonPrinter().doprint(condition if was else sympy.Not(condition)))


def _shown(place: Place, names: Sequence[str]) -> str:
    return f"{names[place[0]]}.shape[{place[1]}]"
