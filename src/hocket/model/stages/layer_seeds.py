"""Seeds the generator per layer, so that random numbers do not depend on the cut."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from torch import fx, nn

from hocket.model.trace.trace import Trace

# The layers to seed before and after one call of a module.
_Around: TypeAlias = tuple[int | None, int | None]


class LayerSeeds:
    """Seeds the generator before each layer that draws random numbers.

    A layer is numbered in the uncut model, so that it draws the same numbers in
    whatever stage it runs.

    Attributes:
        seed: takes a layer's number and seeds the generator that the layer draws from;
            None where random numbers are drawn as they come.
        draws_numbers: whether some layers draw Python's or NumPy's random numbers.
    """

    __slots__ = ("draws_numbers", "seed")

    def __init__(self) -> None:
        self.seed: Callable[[int], None] | None = None
        self.draws_numbers = False

    def before(self, layer: int) -> None:
        """Called by the stage's code before the first draw of a layer."""
        if self.seed is not None:
            self.seed(layer)


class SeededModule:
    """Runs a module as it is, and seeds the layers inside of it.

    What its submodules call as their forward is replaced while it runs:

        captured   seed(4)  dropout  linear  seed(5)  dropout
        as it is   [ seed(4)  drop_1 ]  [ up ]  [ seed(5)  drop_2 ]

    Args:
        module: the module.
        points: where to seed which layer.
        seeds: asked there.
    """

    def __init__(
        self,
        module: nn.Module,
        points: Mapping[str, Sequence[_Around]],
        seeds: LayerSeeds,
    ) -> None:
        self.module = module
        self._seeds = seeds
        self._points = [(module.get_submodule(path), x) for path, x in points.items()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self._seeds.seed is None:
            return self.module(*args, **kwargs)
        before = [vars(part).get("forward") for part, _ in self._points]
        try:
            for part, around in self._points:
                vars(part)["forward"] = self._seeded(part.forward, around)
            return self.module(*args, **kwargs)
        finally:
            for (part, _), forward in zip(self._points, before, strict=True):
                if forward is None:
                    del vars(part)["forward"]
                else:
                    vars(part)["forward"] = forward

    def _seeded(
        self, forward: Callable[..., Any], around: Sequence[_Around]
    ) -> Callable[..., Any]:
        calls = iter(around)

        def seeded(*args: Any, **kwargs: Any) -> Any:
            before, after = next(calls, (None, None))
            if before is not None:
                self._seeds.before(before)
            out = forward(*args, **kwargs)
            if after is not None:
                self._seeds.before(after)
            return out

        return seeded


def drawing_seeds(trace: Trace, key: str) -> dict[str, int]:
    """Return a seed for each call in a call of a module that draws Python's numbers."""
    return {
        one: zlib.crc32(one.encode())
        for one in sorted(trace.drawing)
        if key in (one, *trace.spans[one].around)
    }


def seed_points(
    trace: Trace, key: str, draws: Mapping[fx.Node, int]
) -> tuple[int | None, dict[str, list[_Around]]]:
    """Return where a module that runs as it is seeds the layers inside of it.

    That is before the innermost module that draws, or where its code goes on after the
    last module that it has called.

    Args:
        trace: the trace.
        key: the module's call.
        draws: the calls before which captured code seeds, and the layers' numbers.

    Returns:
        The layer to seed before the module; and those around each call of a submodule,
        by its path in the module.
    """
    path = key.partition("@")[0]
    calls: dict[str, list[str]] = {}  # of each module, by path
    for one, span in trace.spans.items():
        if key in (one, *span.around):
            calls.setdefault(span.path, []).append(one)
    points: dict[str, list[_Around]] = {}
    first: int | None = None
    for at, is_before, number in _seeded_calls(trace, key, draws):
        if at == key:
            first = number if first is None else first
            continue
        where = at.partition("@")[0]
        inside = where[len(path) + 1 :] if path else where
        known = calls.setdefault(where, [at])  # of a child of an nn.Sequential
        pairs = points.setdefault(inside, [(None, None) for _ in known])
        place = calls[where].index(at)
        before, after = pairs[place]
        pairs[place] = (number, after) if is_before else (before, number)
    return first, points


def _seeded_calls(
    trace: Trace, key: str, draws: Mapping[fx.Node, int]
) -> Iterator[tuple[str, bool, int]]:
    """Yield each call at which a layer is seeded, whether before it, and the layer."""
    for one, number in drawing_seeds(trace, key).items():
        yield one, True, number
    last: dict[str, str] = {}  # the last call made by each call
    for node in trace.members[key]:
        chain = ("", *trace.modules.get(node, ()))
        if node in draws:
            at = last.get(chain[-1], chain[-1])
            yield at, at == chain[-1], draws[node]
        last.update(pairwise(chain))
