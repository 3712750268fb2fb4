"""Ops print and parse, and texts that are no ops are refused with a reason."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given

from hocket.core.op import (
    ASYNCHRONOUS,
    BACKWARDS,
    MESSAGES,
    ONCE_PER_STEP,
    RECEIVES,
    SENDS,
    Kind,
    Op,
)
from hocket.errors import ParseError
from tests.strategies import ops


@given(op=ops())
def test_prints_and_parses(op: Op) -> None:
    """Every op, of every kind, comes back as it was."""
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("2F0", Op(Kind.FORWARD, 2, 0)),
        ("0B3", Op(Kind.BACKWARD, 0, 3)),
        ("10I12", Op(Kind.BACKWARD_INPUT, 10, 12)),
        ("1W0@2", Op(Kind.BACKWARD_WEIGHT, 1, 0, step=2)),
        ("3L", Op(Kind.LOSS, 3)),
        ("3R@1", Op(Kind.REDUCE, 3, step=1)),
        ("0U", Op(Kind.UPDATE, 0)),
        ("0SEND_F1>1", Op(Kind.SEND_FORWARD, 0, 1, peer=1)),
        ("1RECV_F1<0", Op(Kind.RECEIVE_FORWARD, 1, 1, peer=0)),
        ("1SEND_B0>0@4", Op(Kind.SEND_BACKWARD, 1, 0, step=4, peer=0)),
        ("0RECV_B0<1@4", Op(Kind.RECEIVE_BACKWARD, 0, 0, step=4, peer=1)),
    ],
)
def test_is_written_as_the_documents_say(text: str, op: Op) -> None:
    """The letters are PyTorch's; a step of 0 is not written."""
    assert str(op) == text
    assert Op.parse(text) == op


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not an op"),
        ("F0", "is not an op"),
        ("0X0", "with a kind among F B I W L G R U"),
        ("0F", "F needs a microbatch number"),
        ("0U3", "U takes no microbatch number"),
        ("0SEND_F1", "messages name the other stage"),
        ("0SEND_F1<1", "messages name the other stage"),
        ("0RECV_F1>1", "messages name the other stage"),
        ("0F0>1", "other ops do not"),
        ("0F0@", "is not an op"),
        ("0F-1", "is not an op"),
        ("0f0", "is not an op"),
        ("0F0 1F0", "is not an op"),
        ("٣F0", "is not an op"),  # int() would read these digits, str() not print them
        ("1000000000F0", "is not an op"),
    ],
)
def test_refuses_what_is_no_op(text: str, reason: str) -> None:
    """The message quotes the text and says what is wrong with it."""
    with pytest.raises(ParseError) as caught:
        Op.parse(text)
    assert reason in str(caught.value)
    assert repr(text) in str(caught.value)


def test_kinds_fall_into_classes() -> None:
    """Each kind has a microbatch or is done once per step; messages go two ways."""
    assert SENDS | RECEIVES == MESSAGES
    assert not SENDS & RECEIVES
    assert not ONCE_PER_STEP & (MESSAGES | BACKWARDS)
    assert MESSAGES < ASYNCHRONOUS


def test_travels_between_processes() -> None:
    """Kinds hash by identity, which must survive the trip."""
    op = Op(Kind.UPDATE, 3, step=1)
    copy = pickle.loads(pickle.dumps(op))
    assert copy == op
    assert {copy: "found"}[op] == "found"
