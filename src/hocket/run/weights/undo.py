"""What an update changes, kept so that it can be taken back to the last bit.

Nothing is computed backwards: tensors are copied. They and what holds them are put
back where they were, so that whoever else refers to them finds the old values too:

    optimizer ─┬─ state ──────── {p: {"step": 3, "exp_avg": ...}}    copied
               ├─ param_groups ─ [{"lr": 0.1, "params": [...]}]      its items noted
               └─ what it keeps beside: num_calls = 3                likewise
                  but no other object: the functions that it calls, a process group
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class Kept:
    """Tensors and containers as they are now, and as they can be again.

    Args:
        roots: tensors; dicts, lists, sets and deques, and what these hold; optimizers,
            learning-rate schedules and dataclasses, with their attributes. Anything
            else is taken for something that does not change.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._seen: set[int] = set()
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._refills: list[Callable[[], None]] = []
        for root in roots:
            self._keep(root)

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return sum(copy.nbytes for _, copy in self._tensors)

    def restore(self) -> None:
        """Put everything back in place."""
        for refill in self._refills:
            refill()
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)

    def _keep(self, value: object) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            self._tensors.append((value, value.detach().clone()))
            return
        inside = list(self._opened(value))
        if inside:
            self._seen.add(id(value))
        for part in inside:
            self._keep(part)

    def _opened(self, value: object) -> Iterator[object]:
        """What a value holds; how to fill it again is noted."""
        match value:
            case dict():
                self._refills.append(_refill_dict(value))
                yield from value.values()
            case list() | deque():
                self._refills.append(_refill_list(value))
                yield from value
            case set():
                self._refills.append(_refill_set(value))
            case tuple():
                yield from value
            case torch.optim.Optimizer() | LRScheduler():
                yield vars(value)
            case _ if is_dataclass(value) and hasattr(value, "__dict__"):
                yield vars(value)
            case _:
                return


def _refill_dict(held: dict[object, object]) -> Callable[[], None]:
    items = dict(held)

    def refill() -> None:
        held.clear()
        held.update(items)

    return refill


def _refill_list(held: list[object] | deque[object]) -> Callable[[], None]:
    items = list(held)

    def refill() -> None:
        held.clear()
        held.extend(items)

    return refill


def _refill_set(held: set[object]) -> Callable[[], None]:
    items = set(held)

    def refill() -> None:
        held.clear()
        held.update(items)

    return refill
