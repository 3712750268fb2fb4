"""All entries of one worker: those in memory, and those on disk behind them.

training   put ─────▶ memory ──▶ get
             │                    ▲
a thread     └─▶ disk ────────────┘  through a memory map

The thread is woken once in a step, by `used`: where workers have as many cores as there
are, each time that it takes a lock may cost the training a time slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from hocket.background import BackgroundCalls
from hocket.freeze.cache.disk import Disk
from hocket.freeze.cache.next_use import NextUse, Tier
from hocket.freeze.cache.shard import Content, Key
from hocket.freeze.settings import Cache

_MOST_WAITING_BYTES: Final = 64 << 20  # on their way to the disk


class Store:
    """Entries in memory and on disk, with a thread that writes.

    It opens no file until `keep` is called.

    Args:
        settings: folder and budgets.
        use: when entries are used next.

    Attributes:
        use: the same.
    """

    def __init__(self, settings: Cache, use: NextUse) -> None:
        self.use = use
        self._settings = settings
        self._folder = Path(settings.folder).absolute()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._memory = Memory(self._settings.ram_bytes, self.use)
        self._disk = Disk(self._folder, self._settings.disk_bytes, self.use)
        self._tiers = self._memory, self._disk
        self._fresh: list[tuple[int, Callable[[], None]]] = []  # of this step
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._jobs = BackgroundCalls("hocket cache")

    @property
    def problem(self) -> str:
        """Why nothing more is written to the disk; empty if all is well."""
        return self._disk.problem

    def begin(self, use: NextUse) -> None:
        """Begin another order of samples, or another place in it."""
        self.flush()
        self.use = use
        for tier in self._tiers:
            tier.begin(use)

    def keep(self, present: bytes, before: bytes) -> None:
        """Drop all entries but those of two prefixes.

        Args:
            present: what is stored from now on.
            before: what it is computed from.
        """
        self.flush()
        for tier in self._tiers:
            tier.keep(present, before)

    def get(self, key: Key, *, from_disk: bool = False) -> Content | None:
        """Return an entry; None if there is no whole one.

        Args:
            key: the entry's.
            from_disk: do not look into the memory.
        """
        content = None if from_disk else self._memory.get(key)
        if content is None:
            content = self._disk.read(key)
            if content is not None:
                self._memory.put(key, content)
        return content

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
                self._memory.put(key, content)
                self._disk.write(key, content)

        self._wait(_MOST_WAITING_BYTES)
        self._fresh.append((num_bytes, store_all))

    def refresh(self) -> None:
        """Look for entries that other workers have written."""
        self._disk.refresh()

    def used(self, keys: Sequence[Key] = (), over: Sequence[Key] = ()) -> None:
        """End a step: begin to keep what was put, and rank or drop what was used.

        Args:
            keys: those that were to be used until now.
            over: those that will not be used again.
        """
        for num_bytes, job in self._fresh:
            self._waiting.append((num_bytes, self._jobs.submit(job)))
        self._fresh.clear()
        for tier in self._tiers:
            for key in keys:
                tier.move(key)
            for key in over:
                tier.drop(key)

    def flush(self) -> None:
        """Wait until all that was put is kept.

        Raises:
            BaseException: what ended the thread's work.
        """
        self.used()
        self._wait(-1)

    def close(self) -> None:
        """Write what is left, close all files and forget all entries."""
        self.used()
        self._jobs.close()
        self._disk.close()
        self._begin_empty()

    def _wait(self, most_bytes: int) -> None:
        """Wait until no more than so many bytes are on their way."""
        while self._waiting:
            is_over = sum(num_bytes for num_bytes, _ in self._waiting) > most_bytes
            job = self._waiting[0][1]
            if not is_over and not job.done():
                return
            job.result()  # and again at the next call, if it failed
            self._waiting.popleft()


class Memory(Tier[Content]):
    """Keeps the entries that are used next, as many as there is room for.

    Any thread may call it.

    Args:
        budget_bytes: the most that all of them have.
        use: when entries are used next.
    """

    def __init__(self, budget_bytes: int, use: NextUse) -> None:
        super().__init__(use)
        self.num_bytes = 0
        self._budget_bytes = budget_bytes

    def get(self, key: Key) -> Content | None:
        """Return an entry, if it is there."""
        return self._entries.get(key)

    def put(self, key: Key, content: Content) -> bool:
        """Keep an entry, unless all in its place are used before it.

        Returns:
            Whether it is there.
        """
        time, most = self.use.of(key), self._budget_bytes - len(content)
        with self._lock:
            if key in self or most < 0:
                return key in self
            while self.num_bytes > most:
                if not self._drops_later(time):
                    return False
            self._entries[key] = content
            self._rank(key)
            self.num_bytes += len(content)
            return True

    def _free(self, entry: Content) -> None:
        self.num_bytes -= len(entry)
