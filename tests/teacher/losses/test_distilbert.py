"""DistilBERT's losses by microbatches are the authors' over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hocket
from hocket.errors import ConfigError, ModelError
from hocket.teacher.losses.distillation import DistilBERT
from tests.teacher.support.microbatches import (
    Outputs,
    assert_equal_with_gradients,
    joint,
)

NUM_TOKENS, VOCABULARY, WIDTH = 6, 11, 5


def random_texts(num_texts: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Outputs of student and teacher, and targets: texts of uneven lengths."""
    rng = torch.Generator().manual_seed(num_texts)

    def outputs() -> tuple[Tensor, Tensor]:
        shape = num_texts, NUM_TOKENS
        logits = torch.randn(*shape, VOCABULARY, generator=rng, dtype=torch.float64)
        hidden = torch.randn(*shape, WIDTH, generator=rng, dtype=torch.float64)
        return logits, hidden

    student, teacher = outputs(), outputs()
    lengths = torch.randint(2, NUM_TOKENS + 1, (num_texts, 1), generator=rng)
    mask = (torch.arange(NUM_TOKENS) < lengths).long()
    labels = torch.randint(VOCABULARY, mask.shape, generator=rng)
    masked = torch.rand(mask.shape, generator=rng) < 0.3
    masked[:, 0] = True
    labels[~masked | (mask == 0)] = -100
    for each in student:
        each.requires_grad_()
    return student, teacher, (labels, mask)


def the_authors(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
) -> Tensor:
    """5 ce + 2 mlm + cos, each the mean over what it counts, as in their code."""
    labels, mask = targets
    (s, t), (s_hidden, t_hidden) = (
        [x[mask.bool()] for x in pair] for pair in zip(student, teacher, strict=True)
    )
    ce = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean")
    mlm = F.cross_entropy(student[0].flatten(0, 1), labels.flatten())
    cos = F.cosine_embedding_loss(s_hidden, t_hidden, torch.ones(len(s_hidden)))
    return 5 * 4 * ce + 2 * mlm + cos


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_the_three_losses(sizes: list[int]) -> None:
    """With the share of tokens that is masked, of uneven microbatches and texts."""
    student, teacher, targets = random_texts(sum(sizes))
    labels, mask = targets
    share = float((labels != -100).sum() / mask.sum().double())
    loss = DistilBERT(mlm_share=share)
    mean = hocket.TokenMean(loss, count=loss.count)
    found = joint(mean, student, targets, teacher, sizes, count=mean.count_of)
    expected = the_authors(student, teacher, targets)
    assert_equal_with_gradients(found, expected, student)


def test_without_an_attention_mask_every_token_counts() -> None:
    """Texts that fill their windows need none."""
    student, teacher, (labels, _) = random_texts(3)
    own = {"teacher": Outputs.at(teacher, slice(0, 3))}
    loss = DistilBERT()
    everywhere = labels, torch.ones_like(labels)
    assert loss(student, labels, own) == loss(student, everywhere, own)
    assert loss.count(labels) == labels.numel()


def test_reads_what_transformers_returns() -> None:
    """A mapping with logits and all hidden states, of which the last ones count."""
    student, teacher, targets = random_texts(3)
    own = {"teacher": Outputs.at(teacher, slice(0, 3))}
    output = {"logits": student[0], "hidden_states": (torch.zeros(3), student[1])}
    assert DistilBERT()(output, targets, own) == DistilBERT()(student, targets, own)
    output["hidden_states"] = student[1]
    assert DistilBERT()(output, targets, own) == DistilBERT()(student, targets, own)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            (torch.zeros(3, 6, 11), torch.zeros(3, 6, 4)),
            r"hidden states are \(3, 6, 4\), .*'teacher' are \(3, 6, 5\).*one width",
        ),
        (
            (torch.zeros(3, 6, 9), torch.zeros(3, 6, 5)),
            r"logits are \(3, 6, 9\), .*\(3, 6, 11\).*one tokenizer",
        ),
        (
            {"logits": torch.zeros(3, 6, 11)},
            r"dict with logits: .*output_hidden_states",
        ),
        (torch.zeros(3, 6, 11), r"student's output is a Tensor: .*a pair or a mapping"),
    ],
)
def test_outputs_that_do_not_match_are_refused(output: Any, message: str) -> None:
    """With both shapes, or what is missing."""
    _, teacher, targets = random_texts(3)
    with pytest.raises(ModelError, match=message):
        DistilBERT()(output, targets, {"teacher": Outputs.at(teacher, slice(0, 3))})


def test_targets_that_do_not_match_are_refused() -> None:
    """With their shapes."""
    with pytest.raises(ModelError, match=r"tuple, \[\(3, 6\), \(3,\)\].*same shape"):
        DistilBERT().count((torch.zeros(3, 6), torch.zeros(3)))


def test_numbers_that_make_no_loss_are_refused() -> None:
    """With their values."""
    with pytest.raises(ConfigError, match=r"mlm_share=0"):
        DistilBERT(mlm_share=0.0)
    with pytest.raises(ConfigError, match=r"soft_weight=-5"):
        DistilBERT(soft_weight=-5)
