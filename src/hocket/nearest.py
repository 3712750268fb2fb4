"""The hint after an unknown name: the known name that was most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_MOST_SHOWN: Final = 40  # of more names, only the nearest ones
_NUM_NEAREST: Final = 5
_LEAST_ALIKE: Final = 0.3  # of names that are shown, not guessed; difflib's ratio


def nearest(word: str, names: Iterable[str]) -> str:
    """Suggest the name that was most likely meant; if none is near, list the names.

    Args:
        word: what was written, and is not among the names.
        names: the known ones; of more than 40 only the nearest five are listed.

    >>> nearest("gpipes", ["1f1b", "gpipe"])
    "did you mean 'gpipe'?"
    >>> nearest("fast", ["1f1b", "gpipe"])
    "there are '1f1b', 'gpipe'"
    """
    known = list(names)
    if close := get_close_matches(word.lower(), known, n=1):
        return f"did you mean {close[0]!r}?"
    if len(known) <= _MOST_SHOWN:
        return f"there are {', '.join(map(repr, known)) or 'none'}"
    alike = get_close_matches(word, known, _NUM_NEAREST, _LEAST_ALIKE)
    return f"the nearest are {', '.join(map(repr, alike or known[:_NUM_NEAREST]))}"
