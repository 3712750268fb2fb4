"""A teacher runs in the modes that a loop's would have, or the change is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.in_turns import in_turns

pytestmark = pytest.mark.timeout(240)

NUM_STEPS: Final = 5
DECAY: Final = 0.9
Change: TypeAlias = Callable[[int, nn.Module], None]


class Net(nn.Module):
    """Two batch norms, and code of its own around them: it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.norm_2 = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Samples by 3."""
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.norm_2(self.second(x)) + x)


def in_order() -> nn.Sequential:
    """The same parts, run as the modules that they are."""
    net = Net()
    return nn.Sequential(net.first, net.norm, net.second, net.norm_2, net.last)


def norms(net: nn.Module) -> list[Any]:
    """The batch norms of a net."""
    return [x for x in net.modules() if isinstance(x, nn.BatchNorm1d)]


def unchanged(step: int, teacher: nn.Module) -> None:
    """The loop leaves the teacher as it is."""


def another_momentum(step: int, teacher: nn.Module) -> None:
    """From step 2 on the module runs as it is."""
    if step == 2:
        norms(teacher)[0].momentum = 0.5


def evaluated_norms(step: int, teacher: nn.Module) -> None:
    """The statistics stay from step 2 on."""
    if step == 2:
        for norm in norms(teacher):
            norm.eval()


def one_norm_trains_later(step: int, teacher: nn.Module) -> None:
    """It is evaluated first."""
    norms(teacher)[1].train(step >= 2)


def a_layer_without_a_mode(step: int, teacher: nn.Module) -> None:
    """To train it makes no difference, and is not refused."""
    for module in teacher.modules():
        if isinstance(module, nn.Linear):
            module.train(step >= 2)


def evaluated(step: int, teacher: nn.Module) -> None:
    """The whole teacher, from step 2 on."""
    if step == 2:
        teacher.eval()


CHANGES: Final = (
    unchanged,
    another_momentum,
    evaluated_norms,
    one_norm_trains_later,
    a_layer_without_a_mode,
    evaluated,
)
# Whether the net is given in training mode, with its first norm in evaluation mode
# (None), or in evaluation mode; and the mode that is asked for.
GIVEN: Final = {
    "given in training mode": (True, None),
    "given in evaluation mode": (False, None),
    "put into training mode": (False, "train"),
    "put into evaluation mode": (True, "eval"),
    "one norm is evaluated": (None, "train"),
}


def make(
    kind: Callable[[], nn.Module], given: bool | None
) -> tuple[nn.Module, nn.Module]:
    """A student, and a teacher of other weights."""
    torch.manual_seed(0)
    student = kind().double()
    teacher = copy.deepcopy(student)
    for parameter in teacher.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    teacher.train(given is not False)
    norms(teacher)[0].train(given is True)
    return student, teacher


def loss(output: Tensor, targets: Tensor, teachers: Any) -> Tensor:
    """To the targets, and to the teacher's output."""
    taught = teachers["slow"].own
    mse = nn.functional.mse_loss
    return mse(output, targets) + mse(output, taught)


def batches() -> list[tuple[Tensor, Tensor]]:
    """A batch per step."""
    rng = torch.Generator().manual_seed(1)
    made = [torch.randn(8, 9, generator=rng).double() for _ in range(NUM_STEPS)]
    return [(x[:, :6], x[:, 6:]) for x in made]


def trained_by_loop(
    student: nn.Module, teacher: nn.Module, mode: str | None, change: Change
) -> dict[str, Tensor]:
    """The states of both after a plain loop, the teacher's under its name."""
    if mode == "eval" or (mode == "train" and not teacher.training):
        teacher.train(mode == "train")
    optimizer = torch.optim.SGD(student.parameters(), 0.05)
    for step, (inputs, targets) in enumerate(batches()):
        change(step, teacher)
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            with torch.no_grad():
                taught = teacher(x)
            mse = nn.functional.mse_loss
            output = student(x)
            ((mse(output, y) + mse(output, taught)) / 2).backward()
        optimizer.step()
        pairs = zip(teacher.parameters(), student.parameters(), strict=True)
        for slow, fast in pairs:
            slow.data.mul_(DECAY).add_(fast.data, alpha=1 - DECAY)
    found = {f"slow.{name}": x for name, x in teacher.state_dict().items()}
    return student.state_dict() | found


def pipeline_of(student: nn.Module, teacher: nn.Module, mode: Any) -> hocket.Pipeline:
    """Trains both, two microbatches a step."""
    return hocket.Pipeline(
        student,
        loss,
        optimizer=lambda weights: torch.optim.SGD(weights, 0.05),
        example=batches()[0],
        schedule="1f1b",
        num_microbatches=2,
        teachers={
            "slow": hocket.Teacher(teacher, update=hocket.Momentum(DECAY), mode=mode)
        },
    )


@pytest.mark.parametrize(
    ("kind", "given", "change"), in_turns([Net, in_order], GIVEN, CHANGES)
)
def test_a_teacher_has_the_modes_of_a_loop(
    kind: Callable[[], nn.Module], given: str, change: Change
) -> None:
    """Equal to a plain loop; to train what began in evaluation mode is refused.

    Past bugs: a captured teacher in evaluation mode trained a batch norm from the step
    on in which its momentum changed, and ignored its `.train()`; one that was given in
    evaluation mode was put into training mode.
    """
    is_training, mode = GIVEN[given]
    expected = trained_by_loop(*make(kind, is_training), mode, change)
    student, teacher = make(kind, is_training)
    evaluates = mode == "eval" or (mode is None and not is_training)
    with pipeline_of(student, teacher, mode) as pipeline:
        for step, batch in enumerate(batches()):
            change(step, teacher)
            if evaluates and change is one_norm_trains_later and step == 2:
                with pytest.raises(
                    hocket.ModelError, match=r"training was False.*mode="
                ):
                    pipeline.step(batch)
                return
            pipeline.step(batch)
        found = pipeline.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
