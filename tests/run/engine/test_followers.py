"""Nets that follow the student: on workers as in the emulator, as in loops by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, ModelError
from hocket.run.cluster.world import World, join_world
from hocket.run.engine.program_run import ProgramRun
from hocket.run.engine.programs import by_net
from hocket.run.weights.momentum import BuffersName, FollowerUpdate
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.rank_0_oracle import compared_on_rank_0

NUM_STEPS: Final = 5
WIDTH: Final = 4

# The teacher's forwards come first; its second stage is behind the student's update.
TWO_DEVICES: Final = """
net teacher microbatches=2
net model microbatches=2
stage 0 net=teacher device=0 trainable=no follows=2
stage 1 net=teacher device=1 trainable=no follows=3
stage 2 net=model device=0
stage 3 net=model device=1
flow 0>1
flow 2>3
flow 1>3

d0  0F0 0F1 2F0 2F1 2B0 2B1 2U 0U
d1  1F0 1F1 3F0 3B0 3F1 3B1 3U 1U
"""
TWO_REPLICAS: Final = """
replicas 2
net teacher microbatches=2
net model microbatches=2
stage 0 net=teacher device=0 trainable=no follows=1
stage 1 net=model device=0
flow 0>1

d0  0F0 0F1 1F0 1F1 1B0 1B1 1R 1U 0U
"""
# The student's first forward of a step comes before the teacher's update.
STUDENT_AHEAD: Final = """
steps 3
net teacher microbatches=1
net model microbatches=1
stage 0 net=teacher device=0 trainable=no follows=1,2
stage 1 net=model device=0
stage 2 net=model device=0
flow 0>2
flow 1>2
repeats 2

d0  1F0 0F0 2F0 2B0 1B0 |: 2U 1U 1F0@1 0U 0F0@1 2F0@1 2B0@1 1B0@1 2U@1 1U@1 1F0@2 0U@1\
 0F0@2 2F0@2 2B0@2 1B0@2 :| 2U@2 1U@2 0U@2
"""
ORDERS: Final = {
    "two devices": TWO_DEVICES,
    "two replicas": TWO_REPLICAS,
    "student ahead": STUDENT_AHEAD,
}
UPDATES: Final[dict[str, Callable[[], FollowerUpdate]]] = {
    "own": partial(hocket.Momentum, 0.9, final=1.0, num_steps=4),
    "copied": partial(hocket.Momentum, 0.9, buffers="copied"),
    "averaged": partial(hocket.Momentum, 0.9, buffers="averaged"),
    "every second": partial(hocket.CopyEvery, 2, buffers="copied"),
}
SGD: Final = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_model(seed: int) -> nn.Sequential:
    """Make two layers with a batch norm behind each; "2" begins the second half."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
    )


class TiedLayers(nn.Module):
    """Two layers with one weight, in stages of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return self.b(torch.tanh(self.a(x)))


TIED: Final = """
net teacher microbatches=1
net model microbatches=1
stage 0 net=teacher device=0 trainable=no follows=2
stage 1 net=teacher device=0 trainable=no follows=3
stage 2 net=model device=0
stage 3 net=model device=0
flow 0>1
flow 2>3
flow 1>3

d0  0F0 1F0 2F0 3F0 3B0 2B0 3U 1U 2U 0U
"""


def loss(output: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
    """Compare with the targets, and with the teacher's output."""
    return F.mse_loss(output, targets) + F.mse_loss(output, teacher)


def make_batches(num: int = NUM_STEPS, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Draw a batch per step."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(num, 2, size, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, y) for x, y in drawn]


def worst_difference(world: World, order: str, update: str, *, training: bool) -> float:
    """Run an order; return the largest difference of any number to the emulator.

    Args:
        world: the job.
        order: a name in `ORDERS`.
        update: a name in `UPDATES`.
        training: whether the teacher is in training mode.
    """
    schedule = Schedule.parse(ORDERS[order])
    program = schedule.program
    models = {"teacher": make_model(0).double(), "model": make_model(1).double()}
    models["teacher"].train(training)
    is_cut = {net: sum(x.net == net for x in program.stages) > 1 for net in models}
    given: dict[str, Any] = {
        "models": models,
        "losses": {"model": loss},
        "optimizers": {"model": SGD, "teacher": UPDATES[update]()},
        "cut_at": {net: ["2"] for net in models if is_cut[net]},
    }
    return _difference(world, schedule, given)


def _difference(world: World, schedule: Schedule, given: dict[str, Any]) -> float:
    alone, batches = copy.deepcopy(given), make_batches()
    with ProgramRun(schedule, **given, example=batches[0], world=world) as run:
        for _ in run.train(batches):
            pass
        states = run.state_dict()

    def difference() -> float:
        hocket.emulate(schedule.program, **alone, batches=batches)
        return max(_furthest(states[net], x) for net, x in alone["models"].items())

    return compared_on_rank_0(world, states, difference)


def compare_with_emulator(orders: list[str]) -> dict[str, float]:
    """Run orders with every update, the teacher in either mode."""
    with closing(join()) as world:
        return {
            f"{order}, {update}, training {training}": worst_difference(
                world, order, update, training=training
            )
            for order in orders
            for update in UPDATES
            for training in (False, True)
        }


def compare_tied() -> float:
    """Run nets whose two stages on one device share a weight."""
    torch.set_num_threads(1)
    names = ("teacher", "model")
    given: dict[str, Any] = {
        "models": {net: TiedLayers(i).double() for i, net in enumerate(names)},
        "losses": {"model": loss},
        "optimizers": {"model": SGD, "teacher": hocket.Momentum(0.5)},
        "cut_at": {net: ["b"] for net in names},
    }
    with closing(join_world()) as world:
        return _difference(world, Schedule.parse(TIED), given)


@contextmanager
def _float16() -> Iterator[None]:
    """Let programs be trained in float16."""
    make = by_net.configs_by_net

    def in_float16(*args: Any, **kwargs: Any) -> Any:
        found = make(*args, **kwargs)
        return {net: replace(x, precision="float16") for net, x in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_net, by_net.configs_by_net.__name__, in_float16)
        yield


def train_in_float16() -> dict[str, Any]:
    """Train with a loss scale that is too large for the first steps.

    Returns:
        The steps that were skipped; and the largest differences of the nets' states to
        a loop with torch's `GradScaler`.
    """
    torch.set_num_threads(1)
    schedule = Schedule.parse(TWO_DEVICES)
    batches = [(x.float(), y.float()) for x, y in make_batches(12)]
    teacher, student = make_model(0), make_model(1)
    slow, fast = copy.deepcopy(teacher), copy.deepcopy(student)
    momentum = hocket.Momentum(0.5, final=0.9, num_steps=12)
    with (
        closing(join_world()) as world,
        _float16(),
        ProgramRun(
            schedule,
            {"teacher": teacher, "model": student},
            {"model": loss},
            {"model": SGD, "teacher": momentum},
            batches[0],
            cut_at={"teacher": ["2"], "model": ["2"]},
            world=world,
        ) as run,
    ):
        skipped = [result.skipped for result in run.train(batches)]
        states = run.state_dict()
    optimizer, scaler = SGD(fast.parameters()), torch.amp.GradScaler("cpu")
    expected = []
    for step, (x, y) in enumerate(batches):
        for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.float16):
                with torch.no_grad():
                    read = slow(part)
                scaler.scale(loss(fast(part), targets, read) / 2).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append(scaler.get_scale() < before)
        if not expected[-1]:
            m = momentum.at(step)
            for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
                a.data.mul_(m).add_(b.data, alpha=1.0 - m)
    return {
        "skipped": skipped,
        "expected": expected,
        "teacher": _furthest(states["teacher"], slow),
        "model": _furthest(states["model"], fast),
    }


def _furthest(state: dict[str, Tensor], model: nn.Module) -> float:
    return max(
        float((state[name] - value).abs().max())
        for name, value in model.state_dict().items()
    )


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
        f"{__name__}:compare_with_emulator",
        orders,
        num_workers=num_workers,
        folder=tmp_path,
        whole_s=150.0,
    ):
        assert {case: far for case, far in answer.items() if far > 1e-10} == {}


def test_a_weight_that_two_stages_share_moves_once(tmp_path: Path) -> None:
    """A second move in the same step would bring it nearer than the momentum says."""
    (found,) = answers_of(f"{__name__}:compare_tied", num_workers=1, folder=tmp_path)
    assert found <= 1e-10


@pytest.mark.timeout(120)
def test_a_skipped_update_skips_the_teachers(tmp_path: Path) -> None:
    """As in a loop with torch's scaler; the momentum's steps go on counting."""
    for answer in answers_of(f"{__name__}:train_in_float16", folder=tmp_path):
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
