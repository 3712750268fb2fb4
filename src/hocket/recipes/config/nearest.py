"""What to say of a word that is in no list: the nearest that is, or all that are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, names: Iterable[str]) -> str:
    """A way out for whoever wrote `word`, which is not among `names`.

    >>> nearest("gpipes", ["1f1b", "gpipe"])
    "did you mean 'gpipe'?"
    >>> nearest("fast", ["1f1b", "gpipe"])
    "there are '1f1b', 'gpipe'"
    """
    known = list(names)
    if close := get_close_matches(word, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"there are {', '.join(map(repr, known))}"
