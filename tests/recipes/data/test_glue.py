"""GLUE's files: every sample as it is written; errors name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import DataError
from hocket.recipes.data.glue import GlueTask, load_glue, read_glue
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
SOUND: dict[GlueTask, Sound] = {
    GlueTask.SST2: (
        {
            "train.tsv": "sentence\tlabel\nhide new secretions \t0\nmoving\t1\n",
            "dev.tsv": 'a "fine" film\t1\n',  # without a header, as copies are
        },
        [("hide new secretions",), ("moving",)],
        [('a "fine" film',)],
        ([0, 1], [1]),
    ),
    GlueTask.MRPC: (
        {
            "train.tsv": f'{MRPC}\r\n1\t7\t8\tHe said " no .\tNo , " he said .\r\n',
            "dev.tsv": f"{MRPC}\n0\t7\t8\tone\ttwo",
        },
        [('He said " no .', 'No , " he said .')],
        [("one", "two")],
        ([1], [0]),
    ),
    GlueTask.QQP: (
        {
            "train.tsv": f"{QQP}\n1\t2\t3\tWhy\u2028so?\tHow?\t1\nquestion with\na "
            "feed?\t0\n4\t5\t6\tWho?\t\t0\n",
            "dev.tsv": f"{QQP}\n1\t2\t3\tWhen?\tWhere?\t0\n",
        },
        [("Why\u2028so?", "How?"), ("Who?", "")],
        [("When?", "Where?")],
        ([1, 0], [0]),
    ),
    GlueTask.MNLI: (
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


@pytest.mark.parametrize("task", list(GlueTask))
def test_samples_are_those_of_the_files(tmp_path: Path, task: GlueTask) -> None:
    """Quotation marks, byte-order marks, line ends, and other lines' columns.

    QQP's two faulty lines, a question with a line feed in it, are left out.
    """
    files, training, evaluation, labels = SOUND[task]
    first, second = read_glue(task, write(tmp_path, files))
    assert list(first.texts) == training
    assert list(second.texts) == evaluation
    assert (first.labels.tolist(), second.labels.tolist()) == labels
    assert first.labels.dtype == torch.int64
    assert first.left_out == ((3, 4) if task is GlueTask.QQP else ())
    assert max(labels[0] + labels[1]) < task.num_classes


@pytest.mark.parametrize("task", list(GlueTask))
def test_samples_become_what_bert_takes(tmp_path: Path, task: GlueTask) -> None:
    """With a vocabulary of the training texts, at the length asked for."""
    files, training, _, labels = SOUND[task]
    samples, others = load_glue(task, write(tmp_path, files), num_tokens=16)
    inputs = samples.inputs(torch.arange(samples.num_samples), None)
    assert list(inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert {tensor.shape for tensor in inputs.values()} == {(len(training), 16)}
    assert inputs["token_type_ids"].any() == (task is not GlueTask.SST2)
    assert inputs["input_ids"].max() < samples.tokenizer.num_entries
    assert samples.targets(torch.arange(len(training)), None).tolist() == labels[0]
    assert samples.fingerprint != others.fingerprint


def test_msr_files_are_read_where_they_are(tmp_path: Path) -> None:
    """Microsoft's own names; GLUE's are preferred where both are there."""
    files = SOUND[GlueTask.MRPC][0]
    renamed = {
        "msr_paraphrase_train.txt": files["train.tsv"],
        "msr_paraphrase_test.txt": files["dev.tsv"],
    }
    training, test = read_glue(GlueTask.MRPC, write(tmp_path, renamed))
    assert training.path.name == "msr_paraphrase_train.txt"
    assert (len(training.texts), len(test.texts)) == (1, 1)
    write(tmp_path, files)
    assert read_glue(GlueTask.MRPC, tmp_path)[0].path.name == "train.tsv"


FAULTS = {
    "missing": (GlueTask.SST2, None, "has no file train.tsv: SST-2 is expected as"),
    "empty": (GlueTask.SST2, "", "train.tsv is empty"),
    "header alone": (GlueTask.QQP, QQP, "train.tsv has no sample"),
    "other header": (
        GlueTask.MNLI,
        "premise\thypothesis\tlabel\n",
        "line 1: no column sentence1, sentence2, gold_label in the header, which has "
        "premise, hypothesis, label",
    ),
    "three fields": (
        GlueTask.MRPC,
        f"{MRPC}\n1\t2\t3\ta\tb\n1\t2\ta\n",
        "line 3: 3 fields between tabs where 5 are due",
    ),
    "no tab": (
        GlueTask.SST2,
        "good\t1\nbad 0\n",
        "line 2: 1 fields between tabs where 2 are due",
    ),
    "label 2": (
        GlueTask.SST2,
        "sentence\tlabel\ngood\t2\n",
        "line 2: label '2' is none of 0, 1",
    ),
    "no label": (
        GlueTask.MNLI,
        MNLI + "\n" + "\t".join([*"01234567", "A", "B", "x", "-"]),
        "line 2: label '-' is none of entailment, neutral, contradiction",
    ),
    "eleven faulty lines": (
        GlueTask.QQP,
        QQP + "\nx" * 11,
        "line 12: 1 fields between tabs where 6 are due",
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
        read_glue(task, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "get it from https://gluebenchmark.com/tasks" in str(caught.value)


def test_bytes_that_are_no_text_are_reported_with_their_line(tmp_path: Path) -> None:
    """Latin-1 is the usual reason, so the way out is named."""
    write(tmp_path, SOUND[GlueTask.SST2][0])
    (tmp_path / "dev.tsv").write_bytes("good\t1\ncaf\xe9\t0\n".encode("latin1"))
    with pytest.raises(
        DataError, match=r"dev\.tsv, line 2: byte 0xe9 is not UTF-8: .*iconv -f latin1"
    ):
        read_glue(GlueTask.SST2, tmp_path)


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    """Marks alone would fill them."""
    with pytest.raises(DataError, match="7 tokens per sample are too few"):
        load_glue(GlueTask.SST2, tmp_path, num_tokens=7)


def test_the_real_mrpc_is_read() -> None:
    """As many pairs as GLUE has, two thirds of them paraphrases; none unknown."""
    folder = real("mrpc")
    samples, others = load_glue(
        GlueTask.MRPC,
        folder,
        num_tokens=128,
        vocabulary=folder / "bert-base-uncased-vocab.txt",
    )
    assert (samples.num_samples, others.num_samples) == (3668, 408)
    assert samples.sentences.labels.float().mean().item() == pytest.approx(
        0.674, abs=1e-3
    )
    inputs = samples.inputs(torch.arange(64), None)
    assert inputs["input_ids"].max() < 30_522
    assert (inputs["input_ids"] == samples.tokenizer.unknown).sum() <= 1


def test_the_real_sst2_is_read() -> None:
    """Files without a header, with quotation marks that belong to sentences."""
    training, evaluation = read_glue(GlueTask.SST2, real("sst2"))
    assert (len(training.texts), len(evaluation.texts)) == (6920, 872)
    assert training.labels.float().mean().item() == pytest.approx(0.52, abs=0.01)
