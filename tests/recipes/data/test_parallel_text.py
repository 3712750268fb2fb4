"""Parallel text: pairs stay pairs, and what does not belong together is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.data.parallel_text import ParallelText, load_parallel_text
from hocket.recipes.data.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary
from tests.recipes.support.real_data import real

TRAIN = {
    "train.en": "a man sleeps .\na man\n\nman a a a\n",
    "train.de": "ein mann schläft .\nein mann\nübrig\nmann ein ein ein\n",
    "val.en": "a dog sleeps .\n",
    "val.de": "ein hund schläft .\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    """The files of a data set."""
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return folder


def load(folder: Path, **changed: Any) -> tuple[ParallelText, ParallelText]:
    """Short sentences, and words that occur once."""
    settings = {"num_source_tokens": 5, "num_target_tokens": 4, "min_count": 1}
    return load_parallel_text(folder, **{**settings, **changed})


def test_sentences_are_marked_cut_and_padded(tmp_path: Path) -> None:
    """The target is the decoder input one word later; words of training are known."""
    training, validation = load(write(tmp_path, TRAIN))
    assert (training.num_samples, training.source_vocabulary.num_entries) == (3, 8)
    source, given = training.inputs(torch.arange(3), None)
    due = training.targets(torch.arange(3), None)
    ids = {w: i for i, w in enumerate(training.source_vocabulary.entries)}
    a, man, sleeps, dot = (ids[word] for word in ("a", "man", "sleeps", "."))
    assert source.tolist() == [
        [a, man, sleeps, dot, END],
        [a, man, END, PAD, PAD],
        [man, a, a, a, END],
    ]
    assert given.shape == due.shape == (3, 4)
    assert (given[:, 0] == BEGIN).all()
    for row in range(3):
        num_words = int((given[row] != PAD).sum()) - 1
        assert torch.equal(due[row, :num_words], given[row, 1 : num_words + 1])
        assert due[row, num_words] == END
        assert (due[row, num_words + 1 :] == PAD).all()
    assert source.dtype == given.dtype == due.dtype == torch.int64

    ((english, german), said) = (
        validation.inputs(torch.tensor([0]), None),
        validation.targets(torch.tensor([0]), None),
    )
    assert english[0, 1] == german[0, 2] == UNKNOWN
    words = validation.target_vocabulary.decode(said[0].tolist())
    assert words == "ein <unk> schläft"  # the dot was cut off


def test_pairs_with_an_empty_side_are_left_out(tmp_path: Path) -> None:
    """On both sides, so that the others still belong together; they are counted."""
    training, validation = load(write(tmp_path, TRAIN))
    assert (training.num_left_out, validation.num_left_out) == (1, 0)
    assert list(training.target.lines)[2] == "mann ein ein ein"


def test_a_vocabulary_takes_the_most_frequent(tmp_path: Path) -> None:
    """Of equally frequent ones the first by spelling; rare ones are unknown."""
    lines = ["b b c", "a c d"]
    words = Vocabulary.of(lines, max_entries=7, min_count=1)
    assert words.entries == ("<pad>", "<unk>", "<s>", "</s>", "b", "c", "a")
    frequent = Vocabulary.of(lines, max_entries=100, min_count=2)
    assert frequent.entries[4:] == ("b", "c")
    assert frequent.encode("c x b") == [5, UNKNOWN, 4]
    assert frequent.decode([BEGIN, 5, UNKNOWN, 4, END, 4]) == "c <unk> b"
    with pytest.raises(
        DataError, match="of 4 different words 0 occur at least 3 times"
    ):
        Vocabulary.of(lines, max_entries=100, min_count=3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"train.de": "ein\nzwei\n"},
            r"train\.en has 4 lines and .*train\.de has 2: each line must translate",
        ),
        ({"val.en": ""}, r"val\.en is empty"),
        ({"val.en": "\n"}, "have no line with words in both"),
        ({"train.en": None}, r"has no file train\.en: parallel text is expected as a"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    """Both numbers of lines, both files, and the way out."""
    write(tmp_path, TRAIN)
    for name, text in files.items():
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_sentences_without_room_for_a_word_are_refused(tmp_path: Path) -> None:
    """One token is the mark alone."""
    with pytest.raises(DataError, match="5 and 1 tokens hold no word"):
        load(write(tmp_path, TRAIN), num_target_tokens=1)


def test_directions_and_names_can_be_chosen(tmp_path: Path) -> None:
    """German to English, from files of other names."""
    renamed = {name.replace("train", "news"): text for name, text in TRAIN.items()}
    training, _ = load(
        write(tmp_path, renamed), source="de", target="en", training="news"
    )
    assert training.source.lines[1] == "ein mann"
    assert training.fingerprint != load(write(tmp_path, TRAIN))[0].fingerprint


def test_the_real_multi30k_is_read() -> None:
    """29,000 pairs, none left out; two words in a hundred are rare in English."""
    training, validation = load_parallel_text(
        real("multi30k"), num_source_tokens=40, num_target_tokens=40
    )
    assert (training.num_samples, validation.num_samples) == (29_000, 1_014)
    assert training.num_left_out == 0
    source, _ = validation.inputs(torch.arange(1_014), None)
    rare = (source == UNKNOWN).sum() / (source > END).sum()
    assert rare < 0.03
    row = torch.tensor([3])
    said = training.target_vocabulary.decode(training.targets(row, None)[0].tolist())
    assert said == training.target.lines[3].strip()
