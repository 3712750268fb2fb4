"""Answers are read from the best span over all windows of a question."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.zoo.squad import Squad, answers, squad
from tests.examples.test_squad import CONTEXT, file_of, question, write


def samples_of(folder: Path, *said: str | None) -> Squad:
    """One question for each answer, in windows of a few pieces."""
    write(folder, file_of(CONTEXT, *(question(CONTEXT, x) for x in said)))
    return squad(str(folder), num_tokens=22, num_question_tokens=8, stride=4)[0]


def scores(samples: Squad) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of a model that knows the answers."""
    targets = samples.targets(torch.arange(samples.num_samples), None)
    first, last = torch.nn.functional.one_hot(targets, samples.num_tokens).unbind(1)
    return first.float(), last.float()


def test_a_model_that_knows_the_answers_says_them(tmp_path: Path) -> None:
    """As they are in the text, case and all; windows without them say nothing."""
    said = ("Gustave Eiffel's firm", "1889", "Paris")
    samples = samples_of(tmp_path, *said)
    assert samples.num_samples > len(said)
    assert answers(samples, *scores(samples)) == dict(enumerate(said))


def test_no_answer_only_where_some_question_has_none(tmp_path: Path) -> None:
    """The [CLS] competes with the spans in version 2.0 alone."""
    both = samples_of(tmp_path, "1889", None)
    assert answers(both, *scores(both)) == {0: "1889", 1: ""}
    one = samples_of(tmp_path, "1889")
    nothing = torch.zeros(one.num_samples, one.num_tokens)
    nothing[:, 0] = 9.0
    assert answers(one, nothing, nothing)[0] != ""


def test_a_span_begins_before_it_ends(tmp_path: Path) -> None:
    """And lies in the paragraph: not in the question, nor in the padding."""
    samples = samples_of(tmp_path, "1889")
    first = torch.rand(samples.num_samples, samples.num_tokens)
    first[:, :4] = 9.0
    text = answers(samples, first, first.flip(1))[0]
    assert text
    assert text in CONTEXT
