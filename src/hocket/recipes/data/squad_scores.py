"""SQuAD's two measures of an answer: exact match, and F1 over words.

    found      "The Eiffel Tower,"  ──▶ "eiffel tower"     lower case, no punctuation,
    answer     "Eiffel tower"       ──▶ "eiffel tower"     no articles, single spaces

Of several right answers, the one that scores best counts.

Source: the official evaluate-v1.1.py, and evaluate-v2.0.py for questions that have no
answer, to which the right answer is none.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Final

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return an answer as it is compared.

    >>> normalized("The  Eiffel Tower, an icon!")
    'eiffel tower icon'
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(found: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones, else 0."""
    return float(any(normalized(found) == each for each in _right(answers)))


def f1(found: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, the best of all.

    >>> round(f1("built by Gustave Eiffel", ["Gustave Eiffel's firm"]), 3)
    0.286
    """
    return max(_f1(normalized(found).split(), each.split()) for each in _right(answers))


def _right(answers: Sequence[str]) -> list[str]:
    """Return the right answers, normalized; none is right where there are none."""
    return [each for each in map(normalized, answers) if each] or [""]


def _f1(found: list[str], right: list[str]) -> float:
    if not found or not right:
        return float(found == right)
    num_same = sum((Counter(found) & Counter(right)).values())
    return 2 * num_same / (len(found) + len(right))
