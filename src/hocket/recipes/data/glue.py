"""Four tasks of GLUE, from their TSV files: SST-2, MRPC, QQP and MNLI.

    task   files, the first that is there                      columns, by their names
    SST-2  train.tsv, dev.tsv                                  sentence, label
    MRPC   train.tsv, dev.tsv, or msr_paraphrase_train.txt,    #1 String, #2 String,
           msr_paraphrase_test.txt                             Quality
    QQP    train.tsv, dev.tsv                                  question1, question2,
                                                               is_duplicate
    MNLI   train.tsv, dev_matched.tsv                          sentence1, sentence2,
                                                               gold_label

Tabs separate fields; quotation marks have no special meaning.

Source: Wang et al., "GLUE: A multi-task benchmark and analysis platform for natural
language understanding", arXiv:1804.07461; https://gluebenchmark.com/tasks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.bert_tokenizer import (
    BertTokenizer,
    batch_of,
    make_tokenizer,
)
from hocket.recipes.data.origin import DataOrigin
from hocket.run.data.samples import EpochRandom

_URL: Final = "https://gluebenchmark.com/tasks"
_FEWEST_TOKENS: Final = 8  # three of them are special


class GlueTask(Enum):
    """A task; its value is its name in recipes."""

    SST2 = "sst2"
    MRPC = "mrpc"
    QQP = "qqp"
    MNLI = "mnli"

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(TABLES[self].labels)


@dataclass(frozen=True, slots=True)
class GlueTable:
    """A task's files and columns.

    Args:
        origin: where to get them.
        training: names of the training file, in the order of preference.
        evaluation: names of the evaluation file, in the order of preference.
        sentences: the columns of one or two sentences.
        label: the column of the label.
        labels: the label's values; the first is class 0.
        has_header: whether each file must begin with the names of its columns.
        num_faulty: the most lines with a wrong number of fields that are left out, as
            official files have some.
    """

    origin: DataOrigin
    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    sentences: tuple[str, ...]
    label: str
    labels: tuple[str, ...] = ("0", "1")
    has_header: bool = True
    num_faulty: int = 0


TABLES: Final = {
    GlueTask.SST2: GlueTable(
        DataOrigin("SST-2", _URL, "a folder with train.tsv and dev.tsv"),
        ("train.tsv",),
        ("dev.tsv",),
        ("sentence",),
        "label",
        has_header=False,  # GLUE's have one, copies often have not
    ),
    GlueTask.MRPC: GlueTable(
        DataOrigin(
            "MRPC",
            f"{_URL} or https://www.microsoft.com/en-us/download/details.aspx?id=52398",
            "a folder with train.tsv and dev.tsv, or with msr_paraphrase_train.txt and "
            "msr_paraphrase_test.txt",
        ),
        ("train.tsv", "msr_paraphrase_train.txt"),
        ("dev.tsv", "msr_paraphrase_test.txt"),
        ("#1 String", "#2 String"),
        "Quality",
    ),
    GlueTask.QQP: GlueTable(
        DataOrigin("QQP", _URL, "a folder with train.tsv and dev.tsv"),
        ("train.tsv",),
        ("dev.tsv",),
        ("question1", "question2"),
        "is_duplicate",
        num_faulty=10,  # the official train.tsv has a few questions with a line feed
    ),
    GlueTask.MNLI: GlueTable(
        DataOrigin("MNLI", _URL, "a folder with train.tsv and dev_matched.tsv"),
        ("train.tsv",),
        ("dev_matched.tsv",),
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
    ),
}


@dataclass(frozen=True, slots=True)
class Sentences:
    """One file's sentences, or pairs of them, and their labels.

    Args:
        path: the file.
        texts: one or two texts of each sample.
        labels: (N,), int64.
        fingerprint: the CRC-32 of texts and labels.
        left_out: the numbers of faulty lines that were left out.
    """

    path: Path
    texts: Sequence[tuple[str, ...]]
    labels: Tensor
    fingerprint: int
    left_out: tuple[int, ...] = ()

    def words(self) -> Iterator[str]:
        """Yield all texts, to build a vocabulary from."""
        for sample in self.texts:
            yield from sample


@dataclass(frozen=True, slots=True)
class GlueSamples:
    """Sentences as BERT's inputs.

    Args:
        sentences: the sentences and their labels.
        tokenizer: splits them into pieces.
        num_tokens: T of every sample: longer ones are cut, shorter ones padded.
    """

    sentences: Sentences
    tokenizer: BertTokenizer
    num_tokens: int

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.sentences.labels)

    @property
    def fingerprint(self) -> int:
        """The CRC-32 of texts, labels and vocabulary."""
        return self.tokenizer.fingerprint ^ self.sentences.fingerprint

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `token_type_ids`, each (B, T), int64."""
        del draw
        texts = [self.sentences.texts[row] for row in rows.tolist()]
        return batch_of(
            [
                self.tokenizer.encode(
                    sample[0], sample[1] if len(sample) > 1 else None, self.num_tokens
                )
                for sample in texts
            ]
        )

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B,), int64."""
        del draw
        return self.sentences.labels[rows]


def load_glue(
    task: GlueTask,
    folder: Path,
    *,
    num_tokens: int,
    vocabulary: Path | None = None,
    num_entries: int = 30_522,
) -> tuple[GlueSamples, GlueSamples]:
    """Load a task's samples for training and for evaluation, as BERT's inputs.

    Args:
        task: the task.
        folder: the folder of the task's own files.
        num_tokens: T of every sample: longer ones are cut, shorter ones padded.
        vocabulary: a `vocab.txt` of an uncased BERT; one is built from the training
            texts when not given.
        num_entries: the largest size of a vocabulary that is built.

    Raises:
        DataError: a file is missing or malformed, or a label is none of the task's;
            names the file and the line.
    """
    if num_tokens < _FEWEST_TOKENS:
        raise DataError(
            f"{num_tokens} tokens per sample are too few for sentences: give at least "
            f"{_FEWEST_TOKENS}"
        )
    training, evaluation = read_glue(task, folder)
    tokenizer = make_tokenizer(vocabulary, training.words(), num_entries)
    return (
        GlueSamples(training, tokenizer, num_tokens),
        GlueSamples(evaluation, tokenizer, num_tokens),
    )


def read_glue(task: GlueTask, folder: Path) -> tuple[Sentences, Sentences]:
    """Read a task's sentences for training and for evaluation.

    Raises:
        DataError: as `load_glue`.
    """
    table = TABLES[task]
    training, evaluation = (
        _read(table.origin.find(folder, *names), table)
        for names in (table.training, table.evaluation)
    )
    return training, evaluation


@dataclass(slots=True)
class _Rows:
    """The samples read from a file so far."""

    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)


def _read(path: Path, table: GlueTable) -> Sentences:
    lines = table.origin.lines(path)
    first, columns, num_fields = _columns(path, lines[0], table)
    rows = _Rows()
    for line, text in enumerate(lines[first:], start=first + 1):
        fields = text.split("\t")
        if len(fields) != num_fields:
            rows.left_out.append(line)
            if len(rows.left_out) <= table.num_faulty:
                continue
            raise DataError(
                f"{path}, line {line}: {len(fields)} fields between tabs where "
                f"{num_fields} are due. {table.origin.advice}"
            )
        *sentences, label = (fields[column].strip() for column in columns)
        if label not in table.labels:
            raise DataError(
                f"{path}, line {line}: label {label!r} is none of "
                f"{', '.join(table.labels)}. {table.origin.advice}"
            )
        rows.texts.append(tuple(sentences))
        rows.labels.append(table.labels.index(label))
    if not rows.labels:
        raise DataError(f"{path} has no sample: {table.origin.advice}")
    return Sentences(
        path,
        rows.texts,
        torch.tensor(rows.labels, dtype=torch.int64),
        zlib.crc32(repr((rows.texts, rows.labels)).encode()),
        tuple(rows.left_out),
    )


def _columns(path: Path, header: str, table: GlueTable) -> tuple[int, list[int], int]:
    """Return the first sample's line, its columns, and the fields of each line."""
    names = [name.strip() for name in header.split("\t")]
    wanted = (*table.sentences, table.label)
    if all(name in names for name in wanted):
        return 1, [names.index(name) for name in wanted], len(names)
    if not table.has_header:
        return 0, list(range(len(wanted))), len(wanted)
    missing = ", ".join(name for name in wanted if name not in names)
    raise DataError(
        f"{path}, line 1: no column {missing} in the header, which has "
        f"{', '.join(names)}. {table.origin.advice}"
    )
