"""The oracle of replicas and of copies of stages, against loops by hand and one net."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.program import Net, Program, Stage
from tests.run.support.emulated_nets import (
    ADAMW,
    SGD,
    assert_close,
    batches,
    chain_model,
    contrast,
)


class Dropped(nn.Module):
    """A linear layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return F.dropout(self.linear(x), 0.3, self.training)


def test_replicas_have_statistics_of_their_own_and_one_gradient() -> None:
    """Weights by samples over all replicas; the model's statistics are the first's."""
    data, model = batches(5, size=7), chain_model(6)
    alone: Any = copy.deepcopy(model)
    program = Program.chain(range(2), 1, num_replicas=2)
    hocket.emulate(program, model, F.cross_entropy, SGD, data, cut_at=["2"])

    optimizer, second = SGD(alone.parameters()), copy.deepcopy(alone[1])
    for x, y in data:
        for begin, end, norm in ((0, 4, alone[1]), (4, 7, second)):
            out = alone[2](
                F.batch_norm(
                    alone[0](x[begin:end]),
                    norm.running_mean,
                    norm.running_var,
                    alone[1].weight,
                    alone[1].bias,
                    training=True,
                )
            )
            (F.cross_entropy(out, y[begin:end]) * (end - begin) / 7).backward()
        alone[1].num_batches_tracked += 1
        optimizer.step()
        optimizer.zero_grad()
    assert_close(model, alone)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_loss_over_all_replicas_is_the_loss_of_the_batch(num_replicas: int) -> None:
    """However many replicas share the batch: the same rows, the same loss."""
    data, student = batches(4), nn.Linear(4, 3).double()
    teacher, alone = nn.Linear(4, 3).double(), copy.deepcopy(student)
    program = Program(
        (
            Net("teacher", 1),
            Net("student", 2, batch_loss=True, loss_over_replicas=True),
        ),
        (Stage("teacher", 0, trainable=False), Stage("student", 0)),
        ((0, 1),),
        num_replicas=num_replicas,
    )
    found = hocket.emulate(
        program,
        {"teacher": teacher, "student": student},
        {"student": contrast},
        {"student": SGD},
        data,
    )

    optimizer = SGD(alone.parameters())
    for step, (x, y) in enumerate(data):
        loss = contrast(alone(x), y, teacher(x).detach())
        assert found[step]["student"]["loss"] == pytest.approx(loss.item(), rel=1e-12)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(student, alone)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_copies_of_a_net_train_one_model(num_replicas: int) -> None:
    """Chimera's two directions are one net with the microbatches of both."""
    data = batches(4)
    model = nn.Sequential(*(Dropped() for _ in range(3))).double()
    alone = copy.deepcopy(model)
    order = hocket.make_schedule(
        "chimera", num_devices=2, num_microbatches=4, stages_per_device=2
    )
    program = replace(order.program, num_replicas=num_replicas)
    assert program.copies
    hocket.emulate(program, model, F.cross_entropy, ADAMW, data, cut_at=["1"])

    whole = Program.chain(range(2), 4, num_replicas=num_replicas)
    whole = replace(
        whole,
        nets=(replace(whole.nets[0], name="down"),),
        stages=tuple(replace(stage, net="down") for stage in whole.stages),
    )
    hocket.emulate(whole, alone, F.cross_entropy, ADAMW, data, cut_at=["1"])
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


def test_each_copy_has_statistics_of_its_own() -> None:
    """The model keeps those of the first copy, which saw the first microbatches."""
    ((x, y), *_), model = batches(1), chain_model(9)
    alone = copy.deepcopy(model)
    order = hocket.make_schedule(
        "chimera", num_devices=2, num_microbatches=2, stages_per_device=2
    )
    hocket.emulate(order.program, model, F.cross_entropy, SGD, [(x, y)], cut_at=["2"])
    alone(x[:4])
    for name, value in alone[1].named_buffers():
        assert torch.equal(dict(model[1].named_buffers())[name], value)
