"""Words of a text: as BERT splits it, and where they stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.recipes.data.bert_words import located_words, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat's mat.", ["the", "cat", "'", "s", "mat", "."]),
        ("Café\u0301  DÉJÀ", ["cafe", "deja"]),
        ("a\tb\u2028c\u3000d", ["a", "b", "c", "d"]),
        ("so\u00adft\u200b", ["soft"]),
        ("$5^2~", ["$", "5", "^", "2", "~"]),
        ("\u4f60\u597d ok", ["\u4f60", "\u597d", "ok"]),
        ("“quoted”—dash", ["“", "quoted", "”", "—", "dash"]),
        ("\u0301", []),
        ("", []),
    ],
)
def test_words_and_signs_are_told_apart(text: str, words: list[str]) -> None:
    """Lower case without accents, each sign alone, each Chinese character too."""
    assert words_of(text, lower_case=True) == words


def test_case_and_accents_can_stay() -> None:
    """For vocabularies that know them."""
    assert words_of("Élan VITAL", lower_case=False) == ["Élan", "VITAL"]


@given(text=st.text(max_size=40), lower_case=st.booleans())
def test_places_are_those_of_the_words(text: str, *, lower_case: bool) -> None:
    """Each word alone at its place gives itself; no two overlap."""
    words = list(located_words(text, lower_case=lower_case))
    assert [word.text for word in words] == words_of(text, lower_case=lower_case)
    end = 0
    for word in words:
        assert end <= word.begin < word.end <= len(text)
        end = word.end
        alone = words_of(text[word.begin : word.end], lower_case=lower_case)
        assert alone == [word.text]


@given(text=st.text(st.characters(max_codepoint=126), max_size=40))
def test_the_short_way_for_ascii_is_the_long_way(text: str) -> None:
    """A character beyond ASCII at the end takes the long one."""
    assert words_of(f"{text} \u4f60", lower_case=True) == [
        *words_of(text, lower_case=True),
        "\u4f60",
    ]
