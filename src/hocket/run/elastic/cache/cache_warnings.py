"""Warns at the end of a step, once, that the cache keeps less than it was asked to."""

from __future__ import annotations

from warnings import warn

from hocket.freeze.cache.disk import slot_size
from hocket.freeze.cache.settings import Cache
from hocket.freeze.cache.shard import file_bytes


class CacheWarning(UserWarning):
    """The cache keeps less than it was asked to; training goes on."""


class CacheWarnings:
    """Collects warnings while a step runs; each text is given once."""

    def __init__(self) -> None:
        self._given: dict[str, bool] = {}

    def add(self, text: str) -> None:
        """Add a warning."""
        self._given.setdefault(text, False)

    def give(self) -> None:
        """Warn of what is new.

        Warns:
            CacheWarning: each text.
        """
        for text, is_given in self._given.items():
            if not is_given:
                self._given[text] = True
                warn(text, CacheWarning, stacklevel=3)


def small_budgets(settings: Cache, num_bytes: int) -> tuple[list[str], bool]:
    """Find the budgets that are smaller than one entry.

    Args:
        settings: folder and budgets.
        num_bytes: the bytes of one sample's outputs.

    Returns:
        What to say of each; and whether an entry fits nowhere.
    """
    budgets = (
        ("ram_bytes", settings.ram_bytes, num_bytes),
        ("disk_bytes", settings.disk_bytes, file_bytes(slot_size(num_bytes), 1)),
    )
    small = [
        f"{name} {has} is less than the {needs} bytes of one sample's outputs"
        for name, has, needs in budgets
        if 0 < has < needs
    ]
    return small, len(small) == sum(has > 0 for _, has, _ in budgets)
