"""Walk the lanes of an order, each as far as what its next item waits for has come.

    d0  0F0 0F1 │ 0B0        0B0 waits for what 1B0 makes: d0 stands there until that
    d1  1F0 1B0              comes, and goes on then

Clocks, proofs and plans say what an item waits for, and what comes with it. How far the
lanes come does not depend on which of them goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_What = TypeVar("_What", bound=Hashable)


@dataclass(eq=False)
class Walk(Generic[_Item, _What]):
    """Lanes that stand at their next item while something is missing for it.

    Args:
        lanes: the items of each lane, in order.
        lacks: returns something that an item waits for and that has not come; None if
            it may begin.

    Attributes:
        position: how many items each lane has passed.
        waiting: the lanes that stand, by what they wait for.
    """

    lanes: Sequence[Sequence[_Item]]
    lacks: Callable[[_Item], _What | None]

    def __post_init__(self) -> None:
        """Let all lanes stand at their begin."""
        self.position = [0] * len(self.lanes)
        self.waiting: dict[_What, list[int]] = {}
        self._runnable = [*range(len(self.lanes))][::-1]

    def __iter__(self) -> Iterator[tuple[int, _Item]]:
        """Yield each item with its lane's number; it is done before the next one."""
        lacks, position = self.lacks, self.position
        while self._runnable:
            number = self._runnable.pop()
            lane = self.lanes[number]
            for place in range(position[number], len(lane)):
                missing = lacks(lane[place])
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(number)
                    break
                position[number] = place + 1
                yield number, lane[place]

    def come(self, what: _What) -> None:
        """Let the lanes go on that wait for something."""
        if what in self.waiting:
            self._runnable += self.waiting.pop(what)

    @property
    def heads(self) -> dict[int, _Item]:
        """The item at which each lane stands that has not come to its end."""
        pairs = zip(self.lanes, self.position, strict=True)
        return {n: lane[at] for n, (lane, at) in enumerate(pairs) if at < len(lane)}
