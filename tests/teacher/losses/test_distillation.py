"""Distillation by microbatches is the formula over the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hocket
from hocket.errors import ConfigError, ModelError
from hocket.teacher.losses.distillation import Distillation
from tests.teacher.support.microbatches import (
    Outputs,
    assert_equal_with_gradients,
    joint,
)

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
temperatures = st.sampled_from([1.0, 2.0, 4.0])


def random_logits(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of student and teacher in float64, and classes."""
    rng = torch.Generator().manual_seed(sum(shape))
    student, teacher = torch.randn(2, *shape, generator=rng, dtype=torch.float64)
    labels = torch.randint(shape[-1], shape[:-1], generator=rng)
    return student.requires_grad_(), teacher, labels


def by_hand(
    student: Tensor, teacher: Tensor, labels: Tensor, t: float, weight: float
) -> Tensor:
    """Cross-entropy and T^2 KL over rows of logits, written out."""
    p, q = (x / t for x in (teacher, student))
    p, q = (
        p.exp() / p.exp().sum(1, keepdim=True),
        q.exp() / q.exp().sum(1, keepdim=True),
    )
    soft = (p * (p.log() - q.log())).sum(1).mean()
    return F.cross_entropy(student, labels) + weight * t**2 * soft


@given(sizes=sizes, t=temperatures)
def test_over_samples(sizes: list[int], t: float) -> None:
    """Weighted by samples, of uneven microbatches."""
    student, teacher, labels = random_logits(sum(sizes), 7)
    found = joint(Distillation(t, 0.3), student, labels, teacher, sizes)
    expected = by_hand(student, teacher, labels, t, 0.3)
    assert_equal_with_gradients(found, expected, [student])


@given(sizes=sizes, t=temperatures, kept=st.sampled_from([0.1, 0.5, 1.0]))
def test_over_tokens_that_count(sizes: list[int], t: float, kept: float) -> None:
    """`TokenMean` weights by them: both terms are exact."""
    student, teacher, labels = random_logits(sum(sizes), 6, 7)
    labels[torch.rand(labels.shape) >= kept] = -100
    labels[0, 0] = 3
    loss = Distillation(t, 0.3)
    mean = hocket.TokenMean(loss, count=loss.count)
    found = joint(mean, student, labels, teacher, sizes, count=mean.count_of)
    valid = labels != -100
    expected = by_hand(student[valid], teacher[valid], labels[valid], t, 0.3)
    assert_equal_with_gradients(found, expected, [student])


def test_the_soft_gradient_keeps_its_size() -> None:
    """Section 2.1 of arXiv:1503.02531: for large T it is that of (s - t)^2 / (2 K)."""
    student, teacher, labels = random_logits(5, 7)
    student, teacher = (x - x.mean(1, keepdim=True) for x in (student, teacher))
    found = joint(
        Distillation(1e4, 1.0, hard_weight=0.0), student, labels, teacher, [5]
    )
    matched = (student - teacher).square().sum(1).mean() / (2 * 7)
    torch.testing.assert_close(found, matched, rtol=1e-3, atol=0)


def test_names_its_losses() -> None:
    """What is trained is the sum of both, by their weights."""
    student, teacher, labels = random_logits(5, 7)
    own = {"big": Outputs.at(teacher, slice(0, 5))}
    loss = Distillation(2.0, 0.7, hard_weight=0.3, teacher="big")
    named = loss({"logits": student, "hidden": None}, labels, own)
    torch.testing.assert_close(named["loss"], 0.3 * named["hard"] + 0.7 * named["soft"])
    assert (named["hard"] - F.cross_entropy(student, labels)).abs() < 1e-12


@pytest.mark.parametrize(
    ("student", "teacher", "labels", "message"),
    [
        ((4, 10), (4, 100), (4,), r"\(4, 10\).*'teacher' are \(4, 100\).*same classes"),
        ((4, 10), (4, 10), (4, 10), r"\(4, 10\).*shape \(4,\)"),
        ((4, 3, 10), (4, 3, 10), (4,), r"\(4, 3, 10\).*shape \(4, 3\)"),
    ],
)
def test_shapes_that_do_not_match_are_refused(
    student: tuple[int, ...],
    teacher: tuple[int, ...],
    labels: tuple[int, ...],
    message: str,
) -> None:
    """With both shapes, and what to do."""
    own = {"teacher": Outputs.at(torch.zeros(teacher), slice(0, 4))}
    with pytest.raises(ModelError, match=message):
        Distillation()(torch.zeros(student), torch.zeros(labels).long(), own)


def test_outputs_without_logits_are_refused() -> None:
    """With whose they are."""
    own = {"teacher": Outputs.at({"hidden": torch.zeros(4, 3)}, slice(0, 4))}
    with pytest.raises(ModelError, match=r"output of teacher 'teacher' is a NoneType"):
        Distillation()(torch.zeros(4, 3), torch.zeros(4).long(), own)


def test_numbers_that_make_no_loss_are_refused() -> None:
    """With their values."""
    with pytest.raises(ConfigError, match=r"temperature=-1"):
        Distillation(-1.0)
    with pytest.raises(ConfigError, match=r"weight=-0.5"):
        Distillation(weight=-0.5)
    with pytest.raises(ConfigError, match=r"weight=0, hard_weight=0"):
        Distillation(weight=0, hard_weight=0)
