"""All entries of one worker: those in memory, and those on disk behind them.

training   put ─────▶ memory ◀───── get
             │           ▲ read ahead: what is used next
a thread     └─▶ disk ───┘

The thread is woken once in a step, by `used`: where workers have as many cores as there
are, each time that it takes a lock may cost the training a time slice.

The entries in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from hocket.freeze.cache.disk import Disk
from hocket.freeze.cache.entry import Content, Key
from hocket.freeze.cache.next_use import Furthest, NextUse
from hocket.freeze.cache.settings import Cache

_MOST_WAITING_BYTES: Final = 64 << 20  # on their way to the disk


class Store:
    """Entries in memory and on disk, with a thread that writes and reads ahead.

    Args:
        settings: folder and budgets.
        use: when entries are used next.
    """

    def __init__(self, settings: Cache, use: NextUse) -> None:
        self._use = use
        self._memory = Memory(settings.ram_bytes, use)
        self._disk = Disk(Path(settings.folder).absolute(), settings.disk_bytes, use)
        self._changed = threading.Condition(threading.RLock())
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting_bytes = 0  # of all jobs that are not done
        self._num_waiting = 0
        self._ahead: Iterator[tuple[int, Key]] = iter(())
        self._reads = False  # whether there is more to read ahead
        self._in_hand: tuple[int, Key, Content] | None = None  # no room for it yet
        self._ends = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why nothing more is written to the disk; empty if all is well."""
        return self._disk.problem

    def begin(self, use: NextUse) -> None:
        """Begin another order of samples, or another place in it."""
        self.flush()
        with self._changed:
            self._use = use
            self._memory.rank(use)
            self._disk.rank(use)

    def keep(self, present: bytes, before: bytes) -> None:
        """Drop all entries but those of two prefixes.

        Args:
            present: what is stored from now on.
            before: what it is computed from.
        """
        self.read_ahead(())
        self.flush()
        with self._changed:
            self._memory.keep(present, before)
            self._disk.keep(present, before)

    def get(self, key: Key, *, from_disk: bool = False) -> Content | None:
        """Return an entry; None if there is no whole one.

        Args:
            key: the entry's.
            from_disk: do not look into the memory.
        """
        content = None
        if not from_disk:
            with self._changed:
                content = self._memory.get(key)
        return self._disk.read(key) if content is None else content

    def put(
        self,
        keys: Sequence[Key],
        contents: Callable[[], Sequence[Content]],
        num_bytes: int,
    ) -> None:
        """Keep entries, from the next `used` or `flush` on.

        Args:
            keys: the entries' keys.
            contents: returns them; called once, in the thread.
            num_bytes: the bytes of all contents together.
        """

        def store_all() -> None:
            for key, content in zip(keys, contents(), strict=True):
                with self._changed:
                    self._memory.put(key, content)
                self._disk.write(key, content)

        self._submit(num_bytes, store_all)

    def refresh(self) -> None:
        """Look for entries that other workers have written."""
        self._disk.refresh()

    def used(self, keys: Iterable[Key], over: Iterable[Key]) -> None:
        """Rank the entries of a step again, and drop those that are not used again.

        Args:
            keys: those that were to be used until now.
            over: those that will not be used again.
        """
        with self._changed:
            for key in keys:
                self._memory.move(key)
                self._disk.move(key)
            for key in over:
                self._memory.drop(key)
                self._disk.drop(key)
            if self._jobs or self._reads:
                self._changed.notify_all()

    def read_ahead(self, ahead: Iterable[tuple[int, Key]]) -> None:
        """Bring entries from the disk into the memory, as far as there is room.

        Args:
            ahead: when each is used, in order.
        """
        with self._changed:
            self._ahead, self._reads, self._in_hand = iter(ahead), True, None
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that was put is kept.

        Raises:
            BaseException: what ended the thread.
        """
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_waiting or self._error)
            self._raise()

    def close(self) -> None:
        """Write what is left, and close all files."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        self._disk.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _submit(self, num_bytes: int, job: Callable[[], None]) -> None:
        with self._changed:
            if self._waiting_bytes > _MOST_WAITING_BYTES:
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._waiting_bytes <= _MOST_WAITING_BYTES or self._error
            )
            self._raise()
            self._waiting_bytes += num_bytes
            self._num_waiting += 1
            self._jobs.append((num_bytes, job))

    def _work(self) -> None:
        try:
            while self._work_once():
                pass
        except BaseException as error:  # raised where it is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _work_once(self) -> bool:
        """Do one job, and read one entry ahead; return whether to go on."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._jobs or self._ends or (self._reads and self._has_room())
            )
            job = self._jobs.popleft() if self._jobs else None
            if job is None and self._ends:
                return False
        if job is not None:
            job[1]()
            with self._changed:
                self._waiting_bytes -= job[0]
                self._num_waiting -= 1
                self._changed.notify_all()
        if self._reads and not self._ends:
            self._read_one()
        return True

    def _has_room(self) -> bool:
        """Keep the entry in hand, if there is one, and if there is room for it now."""
        if self._in_hand is not None:
            time, key, content = self._in_hand
            if time >= self._use.now and not self._memory.put(key, content):
                return False
            self._in_hand = None
        return True

    def _read_one(self) -> None:
        with self._changed:
            if not self._has_room():
                return
            ahead = self._ahead
        found = next(ahead, None)
        if found is None:
            with self._changed:
                self._reads = self._reads and ahead is not self._ahead
            return
        time, key = found
        if time < self._use.now or key in self._memory:
            return
        content = self._disk.read(key)
        with self._changed:
            if content is not None and ahead is self._ahead:
                self._in_hand = time, key, content
                self._has_room()


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
