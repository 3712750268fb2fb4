"""The oracle of programs of several nets, against loops written by hand in torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.core.program import Net, Program, Stage
from hocket.errors import ConfigError, ModelError
from tests.run.support.emulated_nets import (
    ADAMW,
    CUT,
    SGD,
    assert_close,
    batches,
    chain_model,
    contrast,
    distill,
    two_nets,
)


def test_a_frozen_teacher_is_read_by_the_loss() -> None:
    """Each microbatch's last forward reads the teacher's output of the same rows."""
    data, teacher, student = batches(5), chain_model(0).eval(), chain_model(1)
    before, alone = copy.deepcopy(teacher.state_dict()), copy.deepcopy(student)
    program = two_nets(lambda d: Stage("teacher", d, trainable=False), (2, 2))
    history = hocket.emulate(
        program,
        {"teacher": teacher, "student": student},
        {"student": distill},
        {"student": ADAMW},
        data,
        cut_at=CUT,
    )

    optimizer, losses = ADAMW(alone.parameters()), []
    for x, y in data:
        sums = {"loss": 0.0, "soft": 0.0}
        for rows in (slice(0, 4), slice(4, 8)):
            named = distill(alone(x[rows]), y[rows], teacher(x[rows]))
            (named["loss"] / 2).backward()
            sums = {key: total + named[key].item() / 2 for key, total in sums.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums)
    assert [step["student"] for step in history] == [pytest.approx(x) for x in losses]
    assert_close(student, alone)
    assert all(torch.equal(x, before[n]) for n, x in teacher.state_dict().items())


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_momentum_teacher_follows_after_the_students_update(
    delay: int, num_replicas: int
) -> None:
    """Batch t reads the teacher after `max(0, t - delay)` updates; a loss per replica.

    The teacher has one microbatch and the student two: their outputs meet in a loss
    over the whole batch of a replica.
    """
    data, teacher, student = batches(6), chain_model(0), chain_model(1)
    slow, fast = copy.deepcopy(teacher), copy.deepcopy(student)

    def stage(device: int) -> Stage:
        follows = (2 + device,)
        return Stage("teacher", device, trainable=False, delay=delay, follows=follows)

    def momentum(step: int) -> float:
        return 0.5 + 0.05 * step

    program = two_nets(stage, (1, 2), batch_loss=True, num_replicas=num_replicas)
    hocket.emulate(
        program,
        {"teacher": teacher, "student": student},
        {"student": contrast},
        {"student": SGD, "teacher": hocket.Momentum(momentum)},
        data,
        cut_at=CUT,
    )

    optimizer, versions = SGD(fast.parameters()), [copy.deepcopy(slow.state_dict())]
    for step, (x, _) in enumerate(data):
        reader = copy.deepcopy(slow)
        reader.load_state_dict(versions[max(0, step - delay)])
        for rows in x.chunk(num_replicas):
            outputs = torch.cat([fast(part) for part in rows.chunk(2)])
            loss = contrast(outputs, rows, reader(rows).detach())
            (loss / num_replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
        m = momentum(step)
        for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
            a.data.mul_(m).add_(b.data, alpha=1 - m)
        versions.append(copy.deepcopy(slow.state_dict()))
    for a, b in zip(teacher.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(student.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_two_towers_are_both_trained_by_one_loss() -> None:
    """The gradient of a loss over the whole batch reaches the net that it reads."""
    data, models = batches(5), {"text": chain_model(2), "image": chain_model(3)}
    alone = copy.deepcopy(models)
    program = Program(
        (Net("text", 2), Net("image", 4, batch_loss=True)),
        (Stage("text", 0), Stage("image", 1)),
        ((0, 1),),
    )
    hocket.emulate(
        program, models, {"image": contrast}, {"text": SGD, "image": SGD}, data
    )

    optimizers = [SGD(model.parameters()) for model in alone.values()]
    for x, y in data:
        outputs = {
            name: torch.cat([alone[name](part) for part in x.chunk(count)])
            for name, count in (("text", 2), ("image", 4))
        }
        contrast(outputs["image"], y, outputs["text"]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, model in alone.items():
        assert_close(models[name], model)


@pytest.mark.parametrize("delays", [(0, 0, 0), (1, 1, 0)])
def test_nets_in_sequence_are_one_model(delays: Sequence[int]) -> None:
    """An encoder and a head, whose loss trains both, are as three stages of one net."""
    data, whole = batches(6), nn.Sequential(chain_model(4), nn.Tanh(), chain_head())
    parts: Any = copy.deepcopy(whole)
    head = nn.Sequential(parts[1], parts[2][0], parts[2][1])
    stages = ("encoder", "head", "head")
    program = Program(
        (Net("encoder", 2), Net("head", 2)),
        tuple(Stage(net, i, delay=delays[i]) for i, net in enumerate(stages)),
        ((0, 1), (1, 2)),
    )
    found = hocket.emulate(
        program,
        {"encoder": parts[0], "head": head},
        {"head": F.cross_entropy},
        {"encoder": SGD, "head": SGD},
        [{"encoder": (x, y), "head": ((), y)} for x, y in data],
        cut_at={"head": ["2"]},
        clip_norm=0.5,
    )

    chain = Program.chain(range(3), 2, delays=delays)
    expected = hocket.emulate(
        chain, whole, F.cross_entropy, SGD, data, cut_at=["2", "2.1"], clip_norm=0.5
    )
    assert [step["head"]["loss"] for step in found] == pytest.approx(
        [step["loss"] for step in expected], rel=1e-10
    )
    assert_close(parts, whole)


def chain_head() -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()


def program_of(*flows: tuple[int, int]) -> Program:
    """A frozen teacher of two stages, a student of three."""
    stages = [Stage("teacher", 0, trainable=False)] * 2 + [Stage("student", 0)] * 3
    return Program(
        (Net("teacher", 1), Net("student", 1)),
        tuple(stages),
        ((0, 1), (2, 3), (3, 4), *flows),
    )


@pytest.mark.parametrize(
    ("flow", "losses", "cut_at", "message"),
    [
        # Flows that no output can take, with what would do.
        ((0, 4), {"student": distill}, None, "leaves net teacher in the middle"),
        ((1, 3), {"student": distill}, None, "leads into the middle of net student"),
        # The loss is missing, and not that the flow is wrong.
        ((1, 4), {}, {}, "net student is trained and has no loss"),
        # No cut is dropped silently.
        (
            (1, 4),
            {"student": distill},
            {"studnet": ["2"]},
            "cut_at names studnet; the nets are",
        ),
        ((1, 4), {"student": distill}, ["2"], "cut_at must be a mapping by net"),
    ],
)
def test_what_does_not_fit_the_program_is_refused(
    flow: tuple[int, int], losses: dict[str, Any], cut_at: Any, message: str
) -> None:
    """Before anything runs."""
    kind = ModelError if cut_at is None else ConfigError
    cuts = {} if cut_at is None else {"cut_at": cut_at}
    models = {"teacher": chain_model(0), "student": chain_model(1)}
    with pytest.raises(kind, match=message):
        hocket.emulate(
            program_of(flow), models, losses, {"student": SGD}, batches(1), **cuts
        )


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ({"student": SGD, "teacher": SGD}, "net teacher is neither trained nor"),
        ({}, "net student is trained: give optimizers"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(
    optimizers: dict[str, Any], message: str
) -> None:
    """Each trained net has one, and no other."""
    program = two_nets(lambda d: Stage("teacher", d, trainable=False), (2, 2))
    models = {"teacher": chain_model(0), "student": chain_model(1)}
    with pytest.raises(ConfigError, match=message):
        hocket.emulate(
            program, models, {"student": distill}, optimizers, batches(1), cut_at=CUT
        )
