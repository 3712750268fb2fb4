"""BYOL and MoCo-v3 by microbatches are the papers' losses of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.errors import ConfigError, ModelError
from hocket.teacher.losses.two_views import Byol, Dino, MocoV3
from tests.teacher.support.microbatches import (
    Outputs,
    assert_equal_with_gradients,
    joint,
)

# Uneven; some microbatches have rows of both views.
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(
    lambda x: sum(x) % 2 == 0
)


def random_outputs(num_rows: int, width: int = 5) -> tuple[Tensor, Tensor]:
    """Outputs of student and teacher, in float64."""
    torch.manual_seed(num_rows)
    student = torch.randn(num_rows, width, dtype=torch.float64, requires_grad=True)
    return student, torch.randn(num_rows, width, dtype=torch.float64)


def byol(student: Tensor, teacher: Tensor) -> Tensor:
    """Equation 2 of arXiv:2006.07733, for both orders of the views."""

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)

    (q1, q2), (z1, z2) = student.chunk(2), teacher.chunk(2)
    terms = [(unit(q) - unit(z)).square().sum(1) for q, z in ((q1, z2), (q2, z1))]
    return terms[0].mean() + terms[1].mean()


def moco(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    """Algorithm 1 of arXiv:2104.02057."""

    def ctr(q: Tensor, k: Tensor) -> Tensor:
        logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T
        return 2 * t * F.cross_entropy(logits / t, torch.arange(len(q)))

    (q1, q2), (k1, k2) = student.chunk(2), teacher.chunk(2)
    return ctr(q1, k2) + ctr(q2, k1)


@given(sizes=sizes, reverse=st.booleans())
def test_byol_is_the_papers(sizes: list[int], reverse: bool) -> None:
    """Weighted by samples, whatever the sizes and the order of microbatches."""
    student, teacher = random_outputs(sum(sizes))
    found = joint(Byol(), student, None, teacher, sizes, reverse=reverse)
    assert_equal_with_gradients(found, byol(student, teacher), [student])


@given(sizes=sizes, reverse=st.booleans(), t=st.sampled_from([0.07, 0.2, 1.0]))
def test_moco_contrasts_the_keys_of_the_whole_batch(
    sizes: list[int], reverse: bool, t: float
) -> None:
    """Weighted by samples, whatever the sizes and the order of microbatches."""
    student, teacher = random_outputs(sum(sizes))
    found = joint(MocoV3(t), student, None, teacher, sizes, reverse=reverse)
    assert_equal_with_gradients(found, moco(student, teacher, t), [student])


def test_moco_differs_if_keys_are_those_of_the_microbatch() -> None:
    """So the test above would notice keys that are left out."""
    student, teacher = random_outputs(8)
    parts = [moco(student[i::2], teacher[i::2], 0.2) for i in range(2)]
    whole = moco(student, teacher, 0.2)
    assert (sum(parts) / 2 - whole).abs() > 0.01


@pytest.mark.parametrize("loss", [Byol(), MocoV3()])
def test_every_row_has_its_own_part_of_the_loss(loss: Byol | MocoV3) -> None:
    """A sample's gradient in the whole batch is that of its microbatch of one."""
    student, teacher = random_outputs(6)
    whole = joint(loss, student, None, teacher, [6])
    (expected,) = torch.autograd.grad(whole, student)
    for row in range(6):
        own = Outputs.at(teacher, slice(row, row + 1))
        alone = loss(student[row : row + 1], None, {"teacher": own}) / 6
        (found,) = torch.autograd.grad(alone, student)
        torch.testing.assert_close(found[row], expected[row], rtol=1e-12, atol=1e-15)
        assert expected[row].any()


@pytest.mark.parametrize("loss", [Byol(), MocoV3(), Dino()])
def test_rows_may_come_in_any_order(loss: Byol | MocoV3 | Dino) -> None:
    """As in the trial of a loss, which gives it some rows, reversed and twice."""
    student, teacher = random_outputs(6)
    row = torch.tensor([5, 2, 2, 0])
    found = loss(student[row], None, {"teacher": Outputs(teacher, row)})
    each = [
        loss(student[[i]], None, {"teacher": Outputs(teacher, torch.tensor([i]))})
        for i in row.tolist()
    ]
    assert_equal_with_gradients(found, torch.stack(each).mean(), [student])


@pytest.mark.parametrize("loss", [Byol(), MocoV3()])
def test_half_precision_is_computed_in_float32(loss: Byol | MocoV3) -> None:
    """Outputs of a stage under autocast give a float32 loss near the exact one."""
    student, teacher = random_outputs(8)
    exact = joint(loss, student, None, teacher, [8])
    found = joint(loss, student.bfloat16(), None, teacher.bfloat16(), [8])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("student", "teacher", "rows", "message"),
    [
        ((2, 5), (8, 4), slice(0, 2), r"\(2, 5\).*'teacher'.*\(8, 4\).*predictor"),
        ((3, 5), (8, 5), slice(0, 2), r"\(3, 5\).*\(8, 5\).*has 2 rows"),
        ((2, 5), (7, 5), slice(0, 2), r"\(7, 5\).*even number of rows"),
        ((2, 3, 5), (8, 5), slice(0, 2), r"\(2, 3, 5\).*\(8, 5\).*\(samples, width\)"),
    ],
)
def test_outputs_that_do_not_match_are_refused(
    student: tuple[int, ...], teacher: tuple[int, ...], rows: slice, message: str
) -> None:
    """With both shapes, and what to do."""
    found = {"teacher": Outputs.at(torch.randn(teacher), rows)}
    with pytest.raises(ModelError, match=message):
        Byol()(torch.randn(student), None, found)


def test_another_output_than_a_tensor_is_refused() -> None:
    """A dict of features is not guessed at."""
    own = Outputs.at(torch.randn(4, 3), slice(0, 4))
    with pytest.raises(ModelError, match="student's output is a dict: Byol reads one"):
        Byol()({"z": torch.randn(4, 3)}, None, {"teacher": own})


def test_a_teacher_of_another_name_is_refused() -> None:
    """With the names that there are."""
    own = Outputs.at(torch.randn(4, 3), slice(0, 4))
    with pytest.raises(ConfigError, match=r"'teacher'.*teachers are 'target'"):
        MocoV3()(torch.randn(4, 3), None, {"target": own})


def test_a_temperature_of_zero_is_refused() -> None:
    """It divides."""
    with pytest.raises(ConfigError, match=r"MocoV3\(temperature=0.0\)"):
        MocoV3(0.0)
