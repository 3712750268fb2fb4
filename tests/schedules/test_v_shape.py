"""Stages in a V, and moves that get their microbatches in turn."""

from __future__ import annotations

import pytest

from hocket.core.op import Kind
from hocket.schedules import Shape
from hocket.schedules.v_shape import numbered, stages_of, v_chain


@pytest.mark.parametrize("p", [1, 2, 5])
def test_each_device_has_one_stage_each_way(p: int) -> None:
    """The first and the last stage share a device, and so on to the turn."""
    shape = Shape(p, 1, 2)
    program = v_chain("any", shape)
    assert program.stages_on == tuple(stages_of(shape, device) for device in range(p))


def test_moves_are_numbered_in_turn() -> None:
    """Moves are numbered by stage and kind; B counts as both I and W."""
    f, b = (Kind.FORWARD, 0), (Kind.BACKWARD, 0)
    i, w = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_WEIGHT, 0)
    moves = [f, f, b, i, f, w, (Kind.FORWARD, 1)]
    three = "0F0 0F1 0B0 0I1 0F2 0W1 1F0"
    assert " ".join(map(str, numbered(moves, 3))) == three
    assert " ".join(map(str, numbered(moves, 1))) == "0F0 0B0 1F0"
