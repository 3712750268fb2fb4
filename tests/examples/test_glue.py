"""GLUE's files: every sample as it is written; errors name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.zoo.glue import TABLES, Sentences, glue
from hocket.errors import DataError
from tests.recipes.support.real_data import real

MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label"
)
MNLI_DEV = MNLI.replace("label1\t", "label1\tlabel2\tlabel3\tlabel4\tlabel5\t")

# Of each task: its files by name, and what they say.
Sound = tuple[
    dict[str, str], list[tuple[str, ...]], list[tuple[str, ...]], tuple[Any, Any]
]
SOUND: dict[str, Sound] = {
    "sst2": (
        {
            "train.tsv": "sentence\tlabel\nhide new secretions \t0\nmoving\t1\n",
            "dev.tsv": 'a "fine" film\t1\n',  # without a header, as copies are
        },
        [("hide new secretions",), ("moving",)],
        [('a "fine" film',)],
        ([0, 1], [1]),
    ),
    "mrpc": (
        {
            "train.tsv": f'{MRPC}\r\n1\t7\t8\tHe said " no .\tNo , " he said .\r\n',
            "dev.tsv": f"{MRPC}\n0\t7\t8\tone\ttwo",
        },
        [('He said " no .', 'No , " he said .')],
        [("one", "two")],
        ([1], [0]),
    ),
    "qqp": (
        {
            "train.tsv": f"{QQP}\n1\t2\t3\tWhy\u2028so?\tHow?\t1\nquestion with\na "
            "feed?\t0\n4\t5\t6\tWho?\t\t0\n",
            "dev.tsv": f"{QQP}\n1\t2\t3\tWhen?\tWhere?\t0\n",
        },
        [("Why\u2028so?", "How?"), ("Who?", "")],
        [("When?", "Where?")],
        ([1, 0], [0]),
    ),
    "mnli": (
        {
            "train.tsv": MNLI
            + "\n"
            + "\t".join([*"01234567", "A", "B", "x", "neutral"]),
            "dev_matched.tsv": MNLI_DEV
            + "\n"
            + "\t".join([*"01234567", "C", "D", *"xxxxx", "contradiction"]),
        },
        [("A", "B")],
        [("C", "D")],
        ([1], [2]),
    ),
}


def write(folder: Path, files: dict[str, str]) -> Path:
    """The files of a task."""
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return folder


def texts(samples: Sentences) -> list[tuple[str, ...]]:
    """The sentences of each sample."""
    return [tuple(x) for x in samples.texts]


@pytest.mark.parametrize("task", [*TABLES])
def test_samples_are_those_of_the_files(tmp_path: Path, task: str) -> None:
    """Quotation marks, byte-order marks, line ends, and other lines' columns.

    QQP's two faulty lines, a question with a line feed in it, are left out.
    """
    files, training, evaluation, labels = SOUND[task]
    first, second = glue(str(write(tmp_path, files)), task)
    assert texts(first) == training
    assert texts(second) == evaluation
    assert (first.labels.tolist(), second.labels.tolist()) == labels
    assert first.labels.dtype == torch.int64
    assert max(labels[0] + labels[1]) < first.num_classes


@pytest.mark.parametrize("task", [*TABLES])
def test_samples_become_what_bert_takes(tmp_path: Path, task: str) -> None:
    """With a vocabulary of the training texts, at the length asked for."""
    files, training, _, labels = SOUND[task]
    samples, others = glue(str(write(tmp_path, files)), task, num_tokens=16)
    inputs = samples.inputs(torch.arange(samples.num_samples), None)
    assert list(inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert {tensor.shape for tensor in inputs.values()} == {(len(training), 16)}
    assert inputs["token_type_ids"].any() == (task != "sst2")
    assert inputs["input_ids"].max() < samples.num_pieces
    assert samples.targets(torch.arange(len(training)), None).tolist() == labels[0]
    assert samples.fingerprint != others.fingerprint


def test_msr_files_are_read_where_they_are(tmp_path: Path) -> None:
    """Microsoft's own names; GLUE's are preferred where both are there."""
    files = SOUND["mrpc"][0]
    renamed = {
        "msr_paraphrase_train.txt": files["train.tsv"],
        "msr_paraphrase_test.txt": files["dev.tsv"],
    }
    training, test = glue(str(write(tmp_path, renamed)), "mrpc")
    assert (training.num_samples, test.num_samples) == (1, 1)
    write(tmp_path, {**files, "train.tsv": 2 * files["dev.tsv"].replace("one", "new")})
    with pytest.raises(DataError, match=r"train\.tsv, line 2"):
        glue(str(tmp_path), "mrpc")


FAULTS = {
    "missing": ("sst2", None, r"train\.tsv cannot be read"),
    "empty": ("sst2", "", "train.tsv is empty"),
    "header alone": ("qqp", QQP, "train.tsv has no sample"),
    "other header": (
        "mnli",
        "premise\thypothesis\tlabel\n",
        "line 1: the columns premise, hypothesis, label, where sentence1, sentence2, "
        "gold_label are due",
    ),
    "three fields": (
        "mrpc",
        f"{MRPC}\n1\t2\t3\ta\tb\n1\t2\ta\n",
        "line 3: 3 fields between tabs, .*where 5 and one of 0, 1 are due",
    ),
    "no tab": (
        "sst2",
        "good\t1\nbad 0\n",
        "line 2: 1 fields between tabs, .*where 2 and one of 0, 1 are due",
    ),
    "label 2": (
        "sst2",
        "sentence\tlabel\ngood\t2\n",
        "line 2: 2 fields between tabs, label '2', where 2 and one of 0, 1 are",
    ),
    "no label": (
        "mnli",
        MNLI + "\n" + "\t".join([*"01234567", "A", "B", "x", "-"]),
        "line 2: .*label '-', where 12 and one of entailment, neutral, contradiction",
    ),
    "eleven faulty lines": (
        "qqp",
        QQP + "\nx" * 11,
        "line 12: 1 fields between tabs, .*where 6 and one of 0, 1 are due",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_names_file_line_and_way_out(tmp_path: Path, fault: str) -> None:
    """What is wrong, where, what is due, and where the official files are."""
    task, text, message = FAULTS[fault]
    write(tmp_path, SOUND[task][0])
    path = tmp_path / "train.tsv"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        glue(str(tmp_path), task)
    assert str(path) in str(caught.value)
    assert "GLUE are at https://gluebenchmark.com/tasks" in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Another encoding, another task, and fewer tokens than marks."""
    write(tmp_path, SOUND["sst2"][0])
    (tmp_path / "dev.tsv").write_bytes("good\t1\ncaf\xe9\t0\n".encode("latin1"))
    with pytest.raises(DataError, match=r"dev\.tsv cannot be read as UTF-8.*0xe9"):
        glue(str(tmp_path), "sst2")
    with pytest.raises(DataError, match=r"num_tokens 7: there are sst2, .*of 8 tokens"):
        glue(str(tmp_path), "sst2", num_tokens=7)
    with pytest.raises(
        DataError, match=r"task 'cola'.*there are sst2, mrpc, qqp, mnli"
    ):
        glue(str(tmp_path), "cola")


def test_the_real_mrpc_is_read() -> None:
    """As many pairs as GLUE has, two thirds of them paraphrases; none unknown."""
    folder = real("mrpc")
    vocabulary = str(folder / "bert-base-uncased-vocab.txt")
    samples, others = glue(str(folder), "mrpc", vocabulary=vocabulary)
    assert (samples.num_samples, others.num_samples) == (3668, 408)
    assert samples.labels.float().mean().item() == pytest.approx(0.674, abs=1e-3)
    inputs = samples.inputs(torch.arange(64), None)
    assert inputs["input_ids"].max() < 30_522
    unknown = samples.words.entries.index("[UNK]")
    assert (inputs["input_ids"] == unknown).sum() <= 1


def test_the_real_sst2_is_read() -> None:
    """Files without a header, with quotation marks that belong to sentences."""
    training, evaluation = glue(str(real("sst2")), "sst2")
    assert (training.num_samples, evaluation.num_samples) == (6920, 872)
    assert training.labels.float().mean().item() == pytest.approx(0.52, abs=0.01)
