"""DINO's loss, centred by the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.errors import ConfigError
from hocket.teacher.losses.two_views import Dino
from tests.teacher.support.microbatches import assert_equal_with_gradients, joint

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(
    lambda x: sum(x) % 2 == 0
)


def random_batch(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs of student and teacher, in float64."""
    rng = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, num_rows, 6, generator=rng, dtype=torch.float64)
    return student.requires_grad_(), teacher


def dino(student: Tensor, teacher: Tensor, centre: Tensor) -> Tensor:
    """Algorithm 1 of arXiv:2104.14294, without its updates."""

    def entropy(t: Tensor, s: Tensor) -> Tensor:
        target = F.softmax((t - centre) / 0.04, dim=1)
        return -(target * F.log_softmax(s / 0.1, dim=1)).sum(1).mean()

    (s1, s2), (t1, t2) = student.chunk(2), teacher.chunk(2)
    return entropy(t1, s2) / 2 + entropy(t2, s1) / 2


@given(sizes=sizes, reverse=st.booleans())
def test_with_the_batchs_own_centre(sizes: list[int], reverse: bool) -> None:
    """By microbatches it is the loss of the whole batch, centred by all of its rows."""
    student, teacher = random_batch(sum(sizes))
    found = joint(Dino(), student, None, teacher, sizes, reverse=reverse)
    expected = dino(student, teacher, teacher.mean(0))
    assert_equal_with_gradients(found, expected, [student])


def test_numbers_that_make_no_loss_are_refused() -> None:
    """With their values."""
    with pytest.raises(ConfigError, match="flattened instead of sharpened"):
        Dino(0.04, 0.1)
    with pytest.raises(ConfigError, match=r"teacher_temperature=0"):
        Dino(0.1, 0)
