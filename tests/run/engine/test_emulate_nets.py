"""The oracle of programs of several nets, against loops written by hand in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.program import Net, Program, Stage
from hocket.errors import ConfigError, ModelError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
CUT = {"student": ["2"], "teacher": ["2"]}
TEACHER_FIRST = ((0, 1), (2, 3), (1, 3))


def chain_model(seed: int, width: int = 4) -> nn.Sequential:
    """Two linear layers with a batch norm, the cut before the second."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
    ).double()


class Dropped(nn.Module):
    """A linear layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return F.dropout(self.linear(x), 0.3, self.training)


def batches(num: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Inputs and classes."""
    rng = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 4, generator=rng, dtype=torch.float64),
            torch.randint(3, (size,), generator=rng),
        )
        for _ in range(num)
    ]


def distill(output: Tensor, targets: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """Cross entropy, and the distance from a teacher's output."""
    hard = F.cross_entropy(output, targets)
    soft = F.mse_loss(output, teacher.detach())
    return {"loss": hard + 0.5 * soft, "soft": soft}


def contrast(output: Tensor, targets: Tensor, other: Tensor) -> Tensor:
    """Each row of the output must find its own row of the other net's."""
    del targets
    return F.cross_entropy(output @ other.T, torch.arange(len(output)))


def two_nets(
    teacher: Callable[[int], Stage],
    num_microbatches: tuple[int, int],
    *,
    batch_loss: bool = False,
    num_replicas: int = 1,
) -> Program:
    """A teacher in stages 0 and 1, a student in stages 2 and 3, on two devices."""
    return Program(
        (
            Net("teacher", num_microbatches[0]),
            Net("student", num_microbatches[1], batch_loss=batch_loss),
        ),
        (teacher(0), teacher(1), Stage("student", 0), Stage("student", 1)),
        TEACHER_FIRST,
        num_replicas=num_replicas,
    )


def assert_close(found: nn.Module, expected: nn.Module) -> None:
    """All weights and buffers, to rounding."""
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, rtol=1e-10, atol=1e-12, msg=name
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
        {
            "encoder": parts[0],
            "head": head,
        },
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


@pytest.mark.parametrize("delays", [(0, 0), (1, 0)])
def test_frozen_layers_have_no_gradient_and_no_update(delays: Sequence[int]) -> None:
    """From step 2 on the first layer stays; from step 4 on the second, too."""
    torch.manual_seed(8)
    data, model = batches(6), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = model.double()
    alone, states = copy.deepcopy(model), []
    program = Program.chain(range(2), 2, delays=delays)
    for num_steps in range(1, 7):
        trained = copy.deepcopy(model)
        hocket.emulate(
            program,
            trained,
            F.cross_entropy,
            ADAMW,
            data[:num_steps],
            {2: "1", 4: "2"},
            cut_at=["2"],
            correction="error-feedback",
        )
        states.append(trained.state_dict())
    for name, first in (("0", 1), ("1", 3)):
        kept = [state[f"{name}.weight"] for state in states[first:]]
        assert all(torch.equal(x, kept[0]) for x in kept)
        assert not torch.equal(kept[0], states[first - 1][f"{name}.weight"])
    if delays != (0, 0):
        return
    optimizer = ADAMW(alone.parameters())
    for step, (x, y) in enumerate(data):
        alone[0].requires_grad_(step < 2)
        alone[1].requires_grad_(step < 4)
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(states[-1][name], value, rtol=1e-10, atol=1e-12)


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


def program_of(*flows: tuple[int, int]) -> Program:
    """A frozen teacher of two stages, a student of three."""
    stages = [Stage("teacher", 0, trainable=False)] * 2 + [Stage("student", 0)] * 3
    return Program(
        (Net("teacher", 1), Net("student", 1)),
        tuple(stages),
        ((0, 1), (2, 3), (3, 4), *flows),
    )


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ((0, 4), "leaves net teacher in the middle"),
        ((1, 3), "leads into the middle of net student"),
    ],
)
def test_flows_that_no_output_can_take_are_refused(
    flow: tuple[int, int], message: str
) -> None:
    """With what would do."""
    with pytest.raises(ModelError, match=message):
        hocket.emulate(
            program_of(flow), {}, {"student": distill}, {"student": SGD}, batches(1)
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
