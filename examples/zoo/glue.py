"""Four tasks of GLUE, from their TSV files: SST-2, MRPC, QQP and MNLI.

    [data]
    kind = "function"
    function = "examples.zoo.glue:glue"
    task = "mrpc"
    path = "MRPC"

Tabs separate fields; quotation marks have no special meaning.

Source: Wang et al., arXiv:1804.07461; https://gluebenchmark.com/tasks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from examples.zoo.word_pieces import WordPieces, read_text, word_pieces
from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom

ADVICE: Final = "the files of GLUE are at https://gluebenchmark.com/tasks"


@dataclass(frozen=True, slots=True)
class Table:
    """A task's files and columns.

    Args:
        training: names of the file to train on, the first that is there.
        evaluation: names of the file to evaluate on.
        sentences: the columns of one or two sentences.
        label: the column of the label.
        labels: its values; the first is class 0.
        needs_header: whether each file begins with the names of its columns.
        num_faulty: lines with another number of fields that may be left out.
    """

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    sentences: tuple[str, ...]
    label: str
    labels: tuple[str, ...] = ("0", "1")
    needs_header: bool = True
    num_faulty: int = 0


TABLES: Final = {
    "sst2": Table(
        ("train.tsv",),
        ("dev.tsv",),
        ("sentence",),
        "label",
        needs_header=False,  # GLUE's have one, copies often have not
    ),
    "mrpc": Table(
        ("train.tsv", "msr_paraphrase_train.txt"),
        ("dev.tsv", "msr_paraphrase_test.txt"),
        ("#1 String", "#2 String"),
        "Quality",
    ),
    "qqp": Table(
        ("train.tsv",),
        ("dev.tsv",),
        ("question1", "question2"),
        "is_duplicate",
        num_faulty=10,  # the official train.tsv has a few questions with a line feed
    ),
    "mnli": Table(
        ("train.tsv",),
        ("dev_matched.tsv",),
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
    ),
}


@dataclass(frozen=True, slots=True)
class Sentences:
    """One file's sentences, or pairs of them, as BERT's inputs.

    Args:
        texts: one or two texts of each sample.
        labels: (N,), int64.
        num_classes: labels are below it.
        words: splits texts into pieces.
        num_tokens: T of every sample: longer ones are cut, shorter ones padded.
        head: what a BERT has at its end.
    """

    texts: Sequence[Sequence[str]]
    labels: Tensor
    num_classes: int
    words: WordPieces
    num_tokens: int
    head: str = "classes"

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.labels)

    @property
    def num_pieces(self) -> int:
        """The size of the vocabulary."""
        return self.words.num_entries

    @property
    def fingerprint(self) -> int:
        """The CRC-32 of texts, labels and vocabulary."""
        both = self.texts, self.labels.tolist()
        return zlib.crc32(repr(both).encode(), self.words.fingerprint)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `token_type_ids`, each (B, T), int64."""
        del draw
        pairs = []
        for row in rows.tolist():
            first, *second = [self.words.pieces(x).ids for x in self.texts[row]]
            pairs.append((first, second[0] if second else None))
        return self.words.batch(pairs, self.num_tokens)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.labels[rows]


def glue(
    path: str,
    task: str,
    num_tokens: int = 128,
    vocabulary: str | None = None,
    num_pieces: int = 30_522,
) -> tuple[Sentences, Sentences]:
    """Read a task's sentences for training and for evaluation.

    Args:
        path: the folder of the task's own files.
        task: sst2, mrpc, qqp or mnli.
        num_tokens: T of every sample, 8 or more.
        vocabulary: a `vocab.txt` of an uncased BERT; one is built from the training
            texts where it is not said.
        num_pieces: the largest size of a vocabulary that is built.

    Raises:
        DataError: a file is missing or malformed, or a label is none of the task's;
            names the file and the line.
    """
    if task not in TABLES or num_tokens < 8:
        raise DataError(
            f"data.task {task!r} with data.num_tokens {num_tokens}: there are "
            f"{', '.join(TABLES)}, of 8 tokens or more"
        )
    table = TABLES[task]
    parts = [read(Path(path), x, table) for x in (table.training, table.evaluation)]
    texts = (text for sample in parts[0][0] for text in sample)
    words = word_pieces(vocabulary, texts, num_pieces)
    first, second = (
        Sentences(texts, labels, len(table.labels), words, num_tokens)
        for texts, labels in parts
    )
    return first, second


def read(
    folder: Path, names: Sequence[str], table: Table
) -> tuple[list[list[str]], Tensor]:
    """Read the texts and labels of the first of some files that is there.

    Raises:
        DataError: as `glue`.
    """
    path = next(
        (folder / x for x in names if (folder / x).is_file()), folder / names[0]
    )
    lines = read_text(path, ADVICE).removesuffix("\n").split("\n")
    first, columns, num_fields = _columns(path, lines[0], table)
    texts, labels, num_faulty = list[list[str]](), list[int](), 0
    for number, line in enumerate(lines[first:], start=first + 1):
        fields = line.split("\t")
        is_torn = len(fields) != num_fields
        num_faulty += is_torn
        if is_torn and num_faulty <= table.num_faulty:
            continue
        label = "" if is_torn else fields[columns[-1]].strip()
        if label not in table.labels:
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields between tabs, label "
                f"{label!r}, where {num_fields} and one of {', '.join(table.labels)} "
                f"are due: {ADVICE}"
            )
        texts.append([fields[column].strip() for column in columns[:-1]])
        labels.append(table.labels.index(label))
    if not labels:
        raise DataError(f"{path} has no sample: {ADVICE}")
    return texts, torch.tensor(labels)


def _columns(path: Path, header: str, table: Table) -> tuple[int, list[int], int]:
    """Return the first sample's line, its columns, and the fields of each line."""
    names = [name.strip() for name in header.split("\t")]
    wanted = (*table.sentences, table.label)
    if all(name in names for name in wanted):
        return 1, [names.index(name) for name in wanted], len(names)
    if not table.needs_header:
        return 0, list(range(len(wanted))), len(wanted)
    raise DataError(
        f"{path}, line 1: the columns {', '.join(names)}, where {', '.join(wanted)} "
        f"are due: {ADVICE}"
    )


def loss(output: Any, label_B: Tensor) -> Tensor:
    """Return the mean cross-entropy over all samples, in nats."""
    return functional.cross_entropy(output["logits"], label_B)


def accuracy(output: Any, label_B: Tensor) -> dict[str, Tensor]:
    """Return the share of samples whose class is predicted correctly."""
    return {"accuracy": (output["logits"].argmax(-1) == label_B).float().mean()}
