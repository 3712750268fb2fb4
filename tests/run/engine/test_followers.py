"""Nets that follow the student: on workers as in the emulator, as in loops by hand."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hocket
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, ModelError
from hocket.run.weights.momentum import BuffersName
from tests.run.support.follower_workers import (
    SGD,
    TWO_DEVICES,
    UPDATES,
    loss,
    make_batches,
    make_model,
)
from tests.run.support.forked import answers_of

PROGRAM = Schedule.parse(TWO_DEVICES).program
CUT = {"teacher": ["2"], "model": ["2"]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("num_workers", "orders"),
    [(1, ["student ahead"]), (2, ["two devices", "two replicas"])],
)
def test_workers_equal_the_emulator(
    num_workers: int, orders: list[str], tmp_path: Path
) -> None:
    """Weights and statistics of both nets, by every rule, the teacher in either mode.

    The teacher reads the statistics behind its step's forwards, also where forwards of
    the next step come before its update.
    """
    for answer in answers_of(
        "follower_workers:compare_with_emulator",
        orders,
        num_workers=num_workers,
        folder=tmp_path,
        whole_s=150.0,
    ):
        assert {case: far for case, far in answer.items() if far > 1e-10} == {}


def test_a_weight_that_two_stages_share_moves_once(tmp_path: Path) -> None:
    """A second move in the same step would bring it nearer than the momentum says."""
    (found,) = answers_of(
        "follower_workers:compare_tied", num_workers=1, folder=tmp_path
    )
    assert found <= 1e-10


@pytest.mark.timeout(120)
def test_a_skipped_update_skips_the_teachers(tmp_path: Path) -> None:
    """As in a loop with torch's scaler; the momentum's steps go on counting."""
    for answer in answers_of("follower_workers:train_in_float16", folder=tmp_path):
        assert answer["skipped"] == answer["expected"]
        assert 0 < sum(answer["skipped"]) < 6
        assert answer["teacher"] < 1e-5
        assert answer["model"] < 1e-5


def move(slow: nn.Module, fast: nn.Module, m: float, buffers: BuffersName) -> None:
    """Move one net behind another one; not at all by a momentum of 1."""
    for weight, other in zip(slow.parameters(), fast.parameters(), strict=True):
        weight.data.copy_(m * weight + (1.0 - m) * other)
    for a, b in zip(slow.buffers(), fast.buffers(), strict=True):
        if buffers == "averaged" and a.is_floating_point():
            a.copy_(m * a + (1.0 - m) * b)
        elif buffers != "own" and m < 1.0:
            a.copy_(b)


@pytest.mark.parametrize("name", sorted(UPDATES))
def test_the_emulator_moves_statistics_by_their_rule(name: str) -> None:
    """Against a loop by hand, with the teacher in training mode."""
    update, data = UPDATES[name](), make_batches()
    teacher, student = make_model(0).double(), make_model(1).double()
    slow, fast = copy.deepcopy(teacher), copy.deepcopy(student)
    hocket.emulate(
        PROGRAM,
        {"teacher": teacher, "model": student},
        {"model": loss},
        {"model": SGD, "teacher": update},
        data,
        cut_at=CUT,
    )
    optimizer = SGD(fast.parameters())
    for step, (x, y) in enumerate(data):
        for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss(fast(part), targets, slow(part).detach()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        move(slow, fast, update.at(step), update.buffers)
    for found, expected in ((teacher, slow), (student, fast)):
        state = expected.state_dict()
        for key, value in found.state_dict().items():
            torch.testing.assert_close(value, state[key], rtol=1e-10, atol=1e-12)


def test_buffers_that_follow_go_with_no_delay() -> None:
    """Only weights have old versions; the error says what to do."""
    text = TWO_DEVICES.replace("trainable=no", "delay=1 trainable=no")
    program = Schedule.parse(text).program
    with pytest.raises(ConfigError, match="teacher has buffers='copied' and stage 0"):
        _emulate(program, make_model(0))


def test_a_teacher_of_another_form_is_refused() -> None:
    """With both shapes; a broadcast would be silent."""
    teacher = make_model(0)
    teacher[0].weight = nn.Parameter(torch.zeros(1, 4))
    with pytest.raises(ModelError, match=r"0\.weight of \(1, 4\), .* have of \(4, 4\)"):
        _emulate(PROGRAM, teacher)


def _emulate(program: Program, teacher: nn.Module) -> None:
    hocket.emulate(
        program,
        {"teacher": teacher.double(), "model": make_model(1).double()},
        {"model": loss},
        {"model": SGD, "teacher": UPDATES["copied"]()},
        make_batches(1),
        cut_at=CUT,
    )
