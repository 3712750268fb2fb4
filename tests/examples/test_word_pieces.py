"""BERT's tokenizer: its words, pieces and pairs, and vocabularies built from texts."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.zoo.glue import glue
from examples.zoo.word_pieces import WordPieces, build_vocabulary, word_pieces
from hocket.errors import DataError
from tests.recipes.support.real_data import real

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = WordPieces([*SPECIAL, "play", "##ful", "##ly", "##f", "a", "un", "##a"])

words = st.text(st.characters(categories=["Ll", "Lu", "Nd", "Po", "Zs"]), max_size=12)


def words_of(text: str) -> list[str]:
    """The words that a vocabulary of just this text has."""
    try:
        tokenizer = build_vocabulary([text], 1000)
    except DataError:  # there is none
        return []
    encoding = tokenizer.pieces(text)
    found: dict[int, str] = {}
    for word, piece in zip(encoding.word_ids, encoding.tokens, strict=True):
        assert word is not None
        found[word] = found.get(word, "") + piece.removeprefix("##")
    return list(found.values())


def written(tokenizer: WordPieces, text: str) -> list[str]:
    """The pieces as text."""
    return [tokenizer.entries[i] for i in tokenizer.pieces(text).ids]


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
def test_words_and_signs_are_split(text: str, words: list[str]) -> None:
    """Lower case without accents, each sign alone, each Chinese character too."""
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Playfully", ["play", "##ful", "##ly"]),
        ("playf a", ["play", "##f", "a"]),
        ("unplay", ["[UNK]"]),  # un + ##play, which there is not
        ("a" * 100, ["a", *["##a"] * 99]),
        ("a" * 101, ["[UNK]"]),
    ],
)
def test_words_are_taken_apart_longest_first(text: str, pieces: list[str]) -> None:
    """A word that cannot be written to its end is unknown as a whole."""
    assert written(SMALL, text) == pieces


def test_pairs_have_marks_types_and_a_mask() -> None:
    """As in figure 2 of BERT's paper, padded to the length of all."""
    pair = SMALL.pieces("play").ids, SMALL.pieces("a a").ids
    batch = SMALL.batch([pair, (SMALL.pieces("playful").ids, None)], 8)
    assert batch["input_ids"].tolist() == [
        [2, 5, 3, 9, 9, 3, 0, 0],
        [2, 5, 6, 3, 0, 0, 0, 0],
    ]
    assert batch["token_type_ids"].tolist() == [
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0] * 8,
    ]
    assert batch["attention_mask"].tolist() == [
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@given(
    num_a=st.integers(0, 30), num_b=st.integers(0, 30), num_tokens=st.integers(5, 40)
)
def test_what_is_too_long_is_cut_from_the_longer(
    num_a: int, num_b: int, num_tokens: int
) -> None:
    """As if the last piece of the longer one went away until both fit."""
    encoded = SMALL.batch([([9] * num_a, [5] * num_b)], num_tokens)
    while num_a + num_b > num_tokens - 3:
        if num_a > num_b:
            num_a -= 1
        else:
            num_b -= 1
    ids = encoded["input_ids"][0].tolist()
    assert (ids.count(9), ids.count(5)) == (num_a, num_b)
    num_used = int(encoded["attention_mask"].sum())
    assert num_used == num_a + num_b + 3
    assert ids[num_used:] == [0] * (num_tokens - num_used)
    assert encoded["token_type_ids"].sum() == num_b + 1


@given(texts=st.lists(words, min_size=1, max_size=8), num_entries=st.integers(40, 90))
def test_a_built_vocabulary_knows_its_texts(texts: list[str], num_entries: int) -> None:
    """Nothing is unknown, and the pieces say the text again."""
    texts = [*texts, "some word"]
    least = build_vocabulary(texts, 10_000).num_entries
    tokenizer = build_vocabulary(texts, max(num_entries, least - 1))
    assert tokenizer.num_entries <= max(num_entries, least - 1)
    assert len(set(tokenizer.entries)) == tokenizer.num_entries
    for text in texts:
        pieces = written(tokenizer, text)
        assert "[UNK]" not in pieces
        said = "".join(piece.removeprefix("##") for piece in pieces)
        assert said == "".join(words_of(text))


def test_frequent_words_come_first() -> None:
    """Of equally frequent ones the first by spelling, so that all workers agree."""
    tokenizer = build_vocabulary(["bb aa bb cc aa bb", "dd"], 5 + 4 + 4 + 3)
    assert tokenizer.entries[-3:] == ("bb", "aa", "cc")


def test_a_vocabulary_needs_words_and_room() -> None:
    """The error names the numbers that are missing."""
    with pytest.raises(DataError, match="the texts hold no word"):
        build_vocabulary(["", " \t"], 100)
    message = "4 entries has no place for the characters .* must be 7 or more"
    with pytest.raises(DataError, match=message):
        build_vocabulary(["ab a"], 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "is empty"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n\na\n", "6 entries, 6 of them different"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nb\na\n", "7 entries, 6 of them different"),
        (b"[PAD]\n[UNK]\na\n", r"3 entries, .* without \[CLS\], \[SEP\]"),
        (b"[PAD]\n\xff\n", r"vocab\.txt cannot be read as UTF-8: .* byte 0xff"),
    ],
)
def test_a_malformed_vocabulary_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    """With the file, or what is missing, and where a sound one is to be had."""
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        word_pieces(str(path), [], 0)
    assert "huggingface.co/google-bert/bert-base-uncased" in str(caught.value)


def test_real_text_is_written_as_by_transformers() -> None:
    """All sentences of MRPC, with the vocabulary of bert-base-uncased."""
    transformers = pytest.importorskip("transformers")
    folder = real("mrpc")
    vocabulary = folder / "bert-base-uncased-vocab.txt"
    oracle = transformers.BertTokenizer(str(vocabulary))
    own = word_pieces(str(vocabulary), [], 0)
    lines = (folder / "train.tsv").read_text(encoding="utf-8-sig").splitlines()[1:]
    for line in lines[:1500]:
        *_, first, second = line.split("\t")
        expected = oracle(first, second)["input_ids"]
        pair = own.pieces(first).ids, own.pieces(second).ids
        encoded = own.batch([pair], 256)
        num_used = int(encoded["attention_mask"].sum())
        assert encoded["input_ids"][0, :num_used].tolist() == expected


@pytest.mark.parametrize(
    ("task", "folder", "ids"),
    [
        ("mrpc", "mrpc", 0xE79A78D5),
        ("sst2", "sst2", 0xEA895643),
    ],
)
def test_ids_of_real_texts_stay(task: str, folder: str, ids: int) -> None:
    """Checkpoints of models trained on a built vocabulary read the same ids again."""
    training, _ = glue(str(real(folder)), task, num_tokens=64, num_pieces=8000)
    found = training.inputs(torch.arange(training.num_samples), None)["input_ids"]
    assert zlib.crc32(found.numpy().tobytes()) == ids
