"""An error about an unknown name suggests the one that was meant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hocket.nearest import nearest

words = st.text("abcdefgh", min_size=4, max_size=8)


def test_near_and_far() -> None:
    """The nearest where one is near, otherwise the list."""
    assert nearest("gpipes", ["1f1b", "gpipe"]) == "did you mean 'gpipe'?"
    assert nearest("fast", ["1f1b", "gpipe"]) == "there are '1f1b', 'gpipe'"


def test_names_that_begin_so_come_first() -> None:
    """Others may be nearer by letters."""
    names = ["p100", "v100-16g", "v100-32g"]
    assert nearest("V100", names) == "did you mean 'v100-16g' or 'v100-32g'?"


@given(word=words, others=st.lists(words, max_size=4), at=st.integers(0, 3))
def test_one_letter_too_many_is_always_understood(
    word: str, others: list[str], at: int
) -> None:
    """Whatever else there is: the word itself is at least as near as all others."""
    mistyped = word[:at] + "x" + word[at:]
    assert nearest(mistyped, [*others, word]).startswith("did you mean")


def test_of_many_names_the_nearest_are_listed() -> None:
    """A model has hundreds of modules: five of them are enough to find one's way."""
    names = [f"blocks.{i}.mlp" for i in range(100)]
    text = nearest("block.attention", names)
    assert text.startswith("the nearest are 'blocks.")
    assert text.count("blocks.") == 5
    assert nearest("x", []) == "there are none"
