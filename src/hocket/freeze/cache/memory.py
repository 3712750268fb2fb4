"""The entries in memory."""

from __future__ import annotations

from hocket.freeze.cache.entry import Content, Key
from hocket.freeze.cache.next_use import Furthest, NextUse


class Memory:
    """Keeps the entries that are used next, as many as there is room for.

    Args:
        budget_bytes: the most that all of them have.
        use: when entries are used next.
    """

    def __init__(self, budget_bytes: int, use: NextUse) -> None:
        self.use = use
        self.num_bytes = 0
        self._budget_bytes = budget_bytes
        self._entries: dict[Key, Content] = {}
        self._order = Furthest()

    def __contains__(self, key: Key) -> bool:
        """Whether an entry is there."""
        return key in self._entries

    def get(self, key: Key) -> Content | None:
        """Return an entry, if it is there."""
        return self._entries.get(key)

    def put(self, key: Key, content: Content) -> bool:
        """Keep an entry, unless all in its place are used before it.

        Returns:
            Whether it is there.
        """
        if key in self._entries:
            return True
        time = self.use.of(key)
        if not self.makes_room(len(content), time):
            return False
        self._entries[key] = content
        self._order.set(key, time)
        self.num_bytes += len(content)
        return True

    def makes_room(self, num_bytes: int, time: int) -> bool:
        """Drop entries that are used later than at a time; return whether it fits."""
        if num_bytes > self._budget_bytes:
            return False
        while self.num_bytes + num_bytes > self._budget_bytes:
            last = self._order.last()
            if last is None or last[0] <= time:
                return False
            self.drop(last[1])
        return True

    def move(self, key: Key) -> None:
        """Say that the time of an entry's next use has changed."""
        self._order.move(key, self.use.of(key))

    def rank(self, use: NextUse) -> None:
        """Begin another order of samples, or another place in it."""
        self.use = use
        for key in self._entries:
            self.move(key)

    def drop(self, key: Key) -> None:
        """Drop an entry, if it is there."""
        content = self._entries.pop(key, None)
        if content is not None:
            self.num_bytes -= len(content)
            self._order.remove(key)

    def keep(self, present: bytes, before: bytes) -> None:
        """Drop all entries but those of two prefixes."""
        for key in [x for x in self._entries if x.prefix not in (present, before)]:
            self.drop(key)
