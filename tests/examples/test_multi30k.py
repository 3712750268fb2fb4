"""A translator's recipe: what it reads, what it may see, and that its loss falls."""

from __future__ import annotations

from math import isclose, log
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from examples.multi30k.parallel_text import BEGIN, END, PAD, UNKNOWN, make_data
from examples.multi30k.translator import Translator, loss, metrics
from hocket.cli.main import app
from tests.recipes.support.real_data import real
from tests.run.support.forked_command import hocket_forked

RECIPE = Path(__file__).parents[2] / "examples" / "multi30k" / "multi30k-lstm.toml"
TEXTS = {
    "train.en": "a man sleeps .\na man sleeps .\nman a a a a a\n",
    "train.de": "ein mann schläft .\nein mann schläft .\nmann ein\n",
    "val.en": "a dog sleeps .\n",
    "val.de": "ein hund schläft .\n",
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with some sentences in two languages."""
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def make_translator(num_layers: int = 2) -> Translator:
    """A small one, without dropout."""
    torch.manual_seed(0)
    return Translator(num_words=13, width=8, num_layers=num_layers, dropout=0.0)


def sentences() -> tuple[Tensor, Tensor]:
    """Two sources and the beginnings of two translations, the first of each shorter."""
    source = torch.tensor([[4, 5, 3, PAD, PAD], [4, 6, 7, 8, 3]])
    return source, torch.tensor([[2, 5, 6, PAD], [2, 7, 8, 9]])


def test_sentences_are_marked_cut_and_padded(texts: Path) -> None:
    """The target is the decoder's input one word later; rare words are unknown."""
    training, validation = make_data(str(texts), max_words=100, num_tokens=5)
    source, given = training.inputs(torch.arange(3), None)
    target = training.targets(torch.arange(3), None)

    a, man, dot, sleeps = 4, 5, 6, 7  # by frequency, then by spelling
    assert source.tolist() == [
        [a, man, sleeps, dot, END],
        [a, man, sleeps, dot, END],
        [man, a, a, a, END],
    ]
    assert given[2].tolist() == [BEGIN, 5, 4, PAD, PAD]
    assert target[2].tolist() == [5, 4, END, PAD, PAD]
    assert torch.equal(given[0, 1:], target[0, :-1])
    assert validation.inputs(torch.tensor([0]), None)[0][0, 1] == UNKNOWN
    assert training.fingerprint != validation.fingerprint


def test_the_real_multi30k_is_read() -> None:
    """29,000 pairs; fewer than three English words in a hundred are rare."""
    training, validation = make_data(str(real("multi30k")), 10_000)
    assert (training.num_samples, validation.num_samples) == (29_000, 1_014)
    source, _ = validation.inputs(torch.arange(1_014), None)
    assert (source == UNKNOWN).sum() / (source > END).sum() < 0.03


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_every_parameter_takes_part(num_layers: int) -> None:
    """However many layers there are, each gradient is not zero."""
    model = make_translator(num_layers)
    output = model(*sentences())
    output.square().sum().backward()
    assert output.shape == (2, 4, 13)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_translation_never_looks_ahead() -> None:
    """Another word changes the scores at its place and after it, none before."""
    model = make_translator()
    source, target = sentences()
    changed = target.clone()
    changed[1, 2] = 10
    before, after = model(source, target), model(source, changed)
    assert torch.equal(before[1, :2], after[1, :2])
    assert not torch.equal(before[1, 2], after[1, 2])
    assert not torch.equal(before[1, 3], after[1, 3])


def test_a_sentence_is_translated_alike_in_any_batch() -> None:
    """A row does not depend on the others: batches may be cut anywhere."""
    model = make_translator()
    source, target = sentences()
    together = model(source, target)
    alone = torch.cat([model(source[i : i + 1], target[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(together, alone)


def test_guessing_costs_the_logarithm_and_padding_nothing() -> None:
    """The logarithm of the number of words, for each word that is none of padding."""
    words = torch.tensor([[1, 2, 3, 4], [4, 3, PAD, PAD], [2, PAD, PAD, PAD]])
    score = torch.zeros(3, 4, 5)
    assert isclose(float(loss(score, words)), 7 / 3 * log(5), rel_tol=1e-6)
    nats = metrics(score, words)["nats_per_word"]
    assert isclose(float(nats), log(5), rel_tol=1e-6)
    right = torch.nn.functional.one_hot(words, 5).float()
    assert float(metrics(right, words)["accuracy"]) == 1.0


def test_gnmt_shares_a_device(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WMT16's recipe, small, on files that are named as MLPerf's are.

    With its early stopping, evaluations and checkpoints, as `hocket train` runs it.
    """
    (texts / "wmt16").mkdir()
    for part, name in (("train", "train.tok.clean"), ("val", "newstest2014.tok")):
        for language in ("en", "de"):
            text = (texts / f"{part}.{language}").read_text(encoding="utf-8")
            file = texts / "wmt16" / f"{name}.bpe.32000.{language}"
            file.write_text(8 * text, encoding="utf-8")
    monkeypatch.chdir(texts)
    size = ("num_words=20", "width=8", "num_layers=4", "dropout=0.1")
    command = ["share", str(RECIPE.with_name("wmt16-gnmt.toml")), "--device", "cpu"]
    command += ["--mode", "turns", "--max-steps", "4"]
    command += ["--set", "training.batch_size=8"]
    command += [word for key in size for word in ("--set", f"model.{key}")]
    done = CliRunner().invoke(app, [*command, "--run-dir", "run"])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    assert "wmt16-gnmt: last loss" in done.output
    run = texts / "run" / "wmt16-gnmt"
    assert '"nats_per_word"' in (run / "metrics.jsonl").read_text(encoding="utf-8")
    assert list((run / "checkpoints").iterdir())


@pytest.mark.long
def test_the_recipe_trains_on_two_workers(texts: Path) -> None:
    """From wherever it is called, on a folder that `--set` names."""
    settings = (
        *(f"data.folder={texts}", "data.max_words=20", "data.num_tokens=6"),
        *("model.num_words=20", "model.width=8", "model.dropout=0.1"),
        "training.num_epochs=2",
        "training.batch_size=3",
        "pipeline.num_microbatches=2",
        "run.profile_folder=profiles",
    )
    arguments = [word for setting in settings for word in ("--set", setting)]
    done = hocket_forked(
        *("train", str(RECIPE), "--run-dir", "run", *arguments),
        cwd=texts,
        timeout_s=100.0,
    )
    assert done.returncode == 0, done.stderr
    assert "nats_per_word" in done.stdout
    assert (texts / "run" / "report.html").exists()
