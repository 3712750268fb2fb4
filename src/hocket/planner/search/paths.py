"""The longest paths through the waits, from the beginning and to the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from hocket.planner.search.problem import StartLag


@dataclass(frozen=True, slots=True)
class Paths:
    """The longest paths from the beginning to each task, and from it to the end.

    Args:
        head_s: no order starts the task earlier.
        tail_s: no order ends sooner than this after the task's start.
    """

    head_s: tuple[float, ...]
    tail_s: tuple[float, ...]

    @property
    def longest_s(self) -> float:
        """The longest path."""
        return max(self.tail_s, default=0.0)

    @classmethod
    def of(cls, seconds: Sequence[float], waits: Iterable[StartLag]) -> Paths:
        """Return the longest paths through every task.

        Args:
            seconds: the seconds of each task.
            waits: the lags between tasks; without a cycle.
        """
        waits = tuple(waits)
        order = tuple(in_order(range(len(seconds)), waits))
        place = {task: i for i, task in enumerate(order)}
        head_s, tail_s = [0.0] * len(seconds), [*seconds]
        for before, after, lag_s in sorted(waits, key=lambda w: place[w.before]):
            head_s[after] = max(head_s[after], head_s[before] + lag_s)
        for before, after, lag_s in sorted(waits, key=lambda w: -place[w.after]):
            tail_s[before] = max(tail_s[before], lag_s + tail_s[after])
        return cls(tuple(head_s), tuple(tail_s))


def in_order(keys: Sequence[Any], waits: Iterable[StartLag]) -> Iterator[int]:
    """Return the tasks, each after all that it waits for; else by the lowest key.

    Args:
        keys: a comparable key of each task.
        waits: the lags between tasks; without a cycle.
    """
    num_tasks = len(keys)
    followers: list[list[int]] = [[] for _ in keys]
    num_missing = [0] * num_tasks
    for before, after, _ in waits:
        followers[before].append(after)
        num_missing[after] += 1
    ready = [(keys[task], task) for task in range(num_tasks) if not num_missing[task]]
    heapify(ready)
    while ready:
        _, task = heappop(ready)
        yield task
        for after in followers[task]:
            num_missing[after] -= 1
            if not num_missing[after]:
                heappush(ready, (keys[after], after))
