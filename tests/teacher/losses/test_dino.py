"""DINO's loss, and a centre that only `advance` moves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.errors import ConfigError, ModelError
from hocket.teacher.losses.dino import Dino, MovingCentre
from tests.teacher.support.microbatches import (
    Outputs,
    assert_equal_with_gradients,
    joint,
)

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


@given(sizes=sizes, reverse=st.booleans())
def test_a_moving_centre_is_the_papers(sizes: list[int], reverse: bool) -> None:
    """Batch k is centred by the batches before it; once each, whatever their parts."""
    loss = Dino(centre=MovingCentre(0.9))
    centre = torch.zeros(6, dtype=torch.float64)
    for seed in range(3):
        student, teacher = random_batch(sum(sizes), seed)
        found = joint(loss, student, None, teacher, sizes, reverse=reverse)
        expected = dino(student, teacher, centre)
        assert_equal_with_gradients(found, expected, [student])
        loss.advance({"teacher": Outputs(teacher, slice(0, 1))})
        centre = 0.9 * centre + 0.1 * teacher.mean(0)
    assert centre.any()


def test_calling_the_loss_moves_nothing() -> None:
    """Neither trial of random outputs nor an evaluation changes what is trained."""
    loss, untried = (Dino(centre=MovingCentre()) for _ in range(2))
    student, teacher = random_batch(4)
    joint(loss, torch.rand(4, 6, requires_grad=True), None, torch.rand(4, 6), [4])
    with torch.no_grad():
        joint(loss, student, None, teacher, [2, 2])
    assert loss.state_dict() == {}
    for each in loss, untried:
        each.advance({"teacher": Outputs(teacher, slice(0, 4))})
    assert torch.equal(loss.state_dict()["centre"], untried.state_dict()["centre"])


def test_its_state_goes_on() -> None:
    """A restored centre goes on bit for bit, and is a copy."""
    first, second = (Dino(centre=MovingCentre()) for _ in range(2))
    batches = [random_batch(4, seed)[1] for seed in range(2)]
    first.advance({"teacher": Outputs(batches[0], slice(0, 4))})
    second.load_state_dict(first.state_dict())
    for each in first, second:
        each.advance({"teacher": Outputs(batches[1], slice(0, 4))})
    assert torch.equal(first.state_dict()["centre"], second.state_dict()["centre"])
    second.load_state_dict({})
    assert second.state_dict() == {}


def test_without_a_centre_there_is_no_state() -> None:
    """`advance` does nothing, and a saved centre is not dropped silently."""
    loss = Dino()
    loss.advance({"teacher": Outputs(random_batch(4)[1], slice(0, 4))})
    assert loss.state_dict() == {}
    with pytest.raises(ConfigError, match=r"Dino\(centre=MovingCentre\(\)\)"):
        loss.load_state_dict({"centre": torch.zeros(6)})


def test_a_centre_of_another_width_is_refused() -> None:
    """Such as one of a checkpoint with another head."""
    loss = Dino(centre=MovingCentre())
    loss.load_state_dict({"centre": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"\(3,\).*\(4, 6\)"):
        joint(loss, *random_batch(4)[:1], None, random_batch(4)[1], [4])


def test_numbers_that_make_no_loss_are_refused() -> None:
    """With their values."""
    with pytest.raises(ConfigError, match="flattened instead of sharpened"):
        Dino(0.04, 0.1)
    with pytest.raises(ConfigError, match=r"teacher_temperature=0"):
        Dino(0.1, 0)
    with pytest.raises(ConfigError, match=r"MovingCentre\(momentum=1.0\)"):
        MovingCentre(1.0)
