"""Evaluates spans of words by what they say: SQuAD's exact match and F1.

question ─┬─ window 0   start and end scores ─┐
└─ window 1   start and end scores ─┴─▶ the best span ─▶ its words
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hocket.recipes.data.squad import Squad, window_begin
from hocket.run.data.loss import TOTAL, LossFunction, named_losses
from hocket.run.data.metrics import EvaluationResult
from hocket.run.data.sample_loader import EvaluationLoader
from hocket.run.data.samples import FirstSamples, Samples

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)

if TYPE_CHECKING:
    from hocket.run.pipeline import Pipeline

MOST_PIECES: Final = 30  # of an answer, as in BERT's own script


@dataclass(frozen=True, slots=True)
class SpanEvaluation:
    """Measures the answers to all questions of which there is a window.

    Args:
        samples: the windows.
        loss: the loss of training.
        batch_size: windows per batch.
        num_loaders: processes that read ahead.
    """

    samples: Samples
    loss: LossFunction
    batch_size: int
    num_loaders: int

    def __call__(self, pipeline: Pipeline, *, use_ema: bool) -> EvaluationResult:
        """Evaluate; every worker must call this."""
        samples = self.samples
        loader = EvaluationLoader(
            samples, self.batch_size, num_workers=self.num_loaders
        )
        return self.of_outputs(pipeline.outputs(loader, use_ema=use_ema))

    def of_outputs(self, scores: Any) -> EvaluationResult:
        """Evaluate the model's outputs for all windows.

        Args:
            scores: `start_logits` and `end_logits`, on the CPU.
        """
        samples = self.samples
        targets = samples.targets(torch.arange(samples.num_samples), None)
        losses = {
            name: float(value)
            for name, value in named_losses(self.loss(scores, targets)).items()
        }
        squad = samples.samples if isinstance(samples, FirstSamples) else samples
        assert isinstance(squad, Squad), "the recipe is valid"
        found = answers(squad, scores["start_logits"], scores["end_logits"])
        pairs = [(text, squad.asked[number].answers) for number, text in found.items()]
        metrics = {
            "f1": fmean(f1(*pair) for pair in pairs),
            "exact_match": fmean(exact_match(*pair) for pair in pairs),
        }
        return EvaluationResult(losses[TOTAL], losses, metrics, samples.num_samples)


def answers(squad: Squad, start_NT: Tensor, end_NT: Tensor) -> dict[int, str]:
    """Return the words of the best span for each question, over its windows.

    Where some questions of the file have no answer, none is given if the score of the
    [CLS] is above that of every span, in every window.

    Shapes: N windows, the first ones of `squad`; T pieces of each.

    Args:
        squad: the questions and windows.
        start_NT: the scores of a span's first piece.
        end_NT: the scores of its last piece.
    """
    none_may_be_right = not all(asked.answers for asked in squad.asked)
    best: dict[int, tuple[float, str]] = {}
    no_answer: dict[int, float] = {}
    for (number, begin), start_T, end_T in zip(
        squad.windows.tolist(), start_NT, end_NT, strict=False
    ):
        asked = squad.asked[number]
        none = float(start_T[0] + end_T[0])
        no_answer[number] = min(no_answer.get(number, inf), none)
        best.setdefault(number, (-inf, ""))
        place = window_begin(asked)
        num_pieces = min(squad.room(asked), len(asked.context) - begin)
        here = slice(place, place + num_pieces)
        score, first, last = _best_span(start_T[here], end_T[here])
        if score > best[number][0]:
            best[number] = score, asked.said(begin + first, begin + last)
    return {
        number: "" if none_may_be_right and no_answer[number] > score else text
        for number, (score, text) in best.items()
    }


def _best_span(start_P: Tensor, end_P: Tensor) -> tuple[float, int, int]:
    """Return the score of the best span of P pieces, its first and its last piece."""
    if not len(start_P):  # a paragraph without words
        return -inf, 0, 0
    score_PP = start_P[:, None] + end_P
    is_span_PP = (
        torch.ones_like(score_PP, dtype=torch.bool).triu().tril(MOST_PIECES - 1)
    )
    place = int(score_PP.masked_fill(~is_span_PP, -inf).argmax())
    first, last = divmod(place, len(end_P))
    return float(score_PP[first, last]), first, last


#     found      "The Eiffel Tower,"  ──▶ "eiffel tower"     lower case, no punctuation,
#     answer     "Eiffel tower"       ──▶ "eiffel tower"     no articles, single spaces
#
# Of several right answers, the one that scores best counts.
#
# Source: the official evaluate-v1.1.py, and evaluate-v2.0.py for questions that have no
# answer, to which the right answer is none.
def normalized(text: str) -> str:
    """Return an answer as it is compared.

    >>> normalized("The  Eiffel Tower, an icon!")
    'eiffel tower icon'
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(found: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones, else 0."""
    return float(any(normalized(found) == each for each in _right(answers)))


def f1(found: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, the best of all.

    >>> round(f1("built by Gustave Eiffel", ["Gustave Eiffel's firm"]), 3)
    0.286
    """
    return max(_f1(normalized(found).split(), each.split()) for each in _right(answers))


def _right(answers: Sequence[str]) -> list[str]:
    """Return the right answers, normalized; none is right where there are none."""
    return [each for each in map(normalized, answers) if each] or [""]


def _f1(found: list[str], right: list[str]) -> float:
    if not found or not right:
        return float(found == right)
    num_same = sum((Counter(found) & Counter(right)).values())
    return 2 * num_same / (len(found) + len(right))
