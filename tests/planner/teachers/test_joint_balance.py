"""Two nets are cut together: no other cuts have a faster slowest device."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import ShapeError
from hocket.planner.balance import Balancer, JointCut, joint_balance

seconds = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=6)


@settings(max_examples=200, deadline=None)
@given(student=seconds, teacher=seconds, num_stages=st.integers(1, 3))
def test_no_other_cuts_are_faster(
    student: list[float], teacher: list[float], num_stages: int
) -> None:
    """Of all cuts of both nets."""
    found = joint_balance(student, teacher, num_stages)
    every = (
        JointCut(*cuts)
        for cuts in product(
            combinations(range(1, len(student)), num_stages - 1),
            combinations_with_replacement(range(len(teacher) + 1), num_stages - 1),
        )
    )
    least_s = min(max(cut.device_s(student, teacher)) for cut in every)
    assert max(found.device_s(student, teacher)) == pytest.approx(least_s)


def test_a_teacher_makes_up_for_an_uneven_student() -> None:
    """A large last layer of the student, such as a head over a vocabulary."""
    student, teacher = [1.0] * 6 + [6.0], [1.0] * 12
    cut = joint_balance(student, teacher, 3)
    apart = JointCut(
        Balancer(student, [0.0] * 6).cut(3), Balancer(teacher, [0.0] * 11).cut(3)
    )
    assert max(cut.device_s(student, teacher)) == 8.0
    assert max(apart.device_s(student, teacher)) == 10.0


def test_equal_layers_are_cut_evenly() -> None:
    """Of cuts that are equally good, the one whose devices differ least."""
    assert joint_balance([1.0] * 8, [2.0] * 8, 4) == ((2, 4, 6), (2, 4, 6))


def test_refuses_more_stages_than_layers() -> None:
    """Each device has at least a layer of the student."""
    with pytest.raises(ShapeError, match="2 layers cannot be cut into 3 stages"):
        joint_balance([1.0] * 2, [1.0] * 4, 3)


def test_a_device_may_have_no_layer_of_the_teacher() -> None:
    """Where the student takes all of its time."""
    cut = joint_balance([4.0, 1.0, 1.0], [1.0] * 6, 3)
    assert cut.teacher == (0, 3)
    assert cut.device_s([4.0, 1.0, 1.0], [1.0] * 6) == (4.0, 4.0, 4.0)
