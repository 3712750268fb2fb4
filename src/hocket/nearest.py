"""The hint after an unknown name: the known name that was most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_MOST_SHOWN: Final = 40  # of more names, only the nearest ones
_NUM_NEAREST: Final = 5
_LEAST_ALIKE: Final = 0.3  # of names that are shown, not guessed; difflib's ratio


def nearest(word: str, names: Iterable[str]) -> str:
    """Suggest what was most likely meant; if no name is near, list the names.

    Args:
        word: what was written, and is not among the names.
        names: the known ones; of more than 40 only the nearest five are listed.

    >>> nearest("gpipes", ["1f1b", "gpipe"])
    "did you mean 'gpipe'?"
    >>> nearest("fast", ["1f1b", "gpipe"])
    "there are '1f1b', 'gpipe'"
    >>> nearest("v100", ["p100", "v100-16g", "v100-32g"])
    "did you mean 'v100-16g' or 'v100-32g'?"
    """
    known = list(names)
    if begun := [x for x in known if word and x.startswith(word.lower())]:
        return f"did you mean {' or '.join(map(repr, begun[:_NUM_NEAREST]))}?"
    if close := get_close_matches(word.lower(), known, n=1):
        return f"did you mean {close[0]!r}?"
    if len(known) <= _MOST_SHOWN:
        return f"there are {', '.join(map(repr, known)) or 'none'}"
    alike = get_close_matches(word, known, _NUM_NEAREST, _LEAST_ALIKE)
    return f"the nearest are {', '.join(map(repr, alike or known[:_NUM_NEAREST]))}"
