"""For which lengths a graph is right that was captured for any.

What a model's code decides by a length holds for some lengths only:

    if tokens.shape[1] > 512: ...        captured with 7: right for 2 to 512

torch.export notes such conditions over the symbols of the dimensions that it left open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]

from hocket.model.trace.example import Place


@dataclass(frozen=True, slots=True)
class OpenLengths:
    """The dimensions that a graph leaves open, and what its code takes for granted.

    Args:
        symbols: by place.
        guards: conditions, all of which must hold.
        smallest: the smallest size of each symbol.
        samples: the number of samples that it was exported with, by symbol.
        is_any: whether it is right for all lengths: it calls modules alone.
    """

    symbols: Mapping[Place, Any] = field(default_factory=dict)
    guards: tuple[Any, ...] = ()
    smallest: Mapping[Any, int] = field(default_factory=dict)
    samples: Mapping[Any, int] = field(default_factory=dict)
    is_any: bool = False

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
        values = dict(self.samples)
        for place, size in sizes.items():
            symbol = self.symbols.get(place)
            if size < self.smallest.get(symbol, own[place]) or (
                symbol is None and size != own[place]
            ):
                return f"it is not captured for {_shown(place, names)} = {size}"
            values[symbol] = size
        exact = {symbol: sympy.Integer(size) for symbol, size in values.items()}
        for guard in self.guards:
            if guard.xreplace(exact) != sympy.true:
                return f"its code decides by lengths: {self._text(guard, names)}"
        return ""

    def _text(self, guard: Any, names: Sequence[str]) -> str:
        text = str(guard)
        for place, symbol in self.symbols.items():
            text = text.replace(str(symbol), _shown(place, names))
        return text


def _shown(place: Place, names: Sequence[str]) -> str:
    return f"{names[place[0]]}.shape[{place[1]}]"
