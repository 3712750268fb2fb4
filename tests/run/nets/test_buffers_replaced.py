"""What forwards replace in a model is no change of the loop, whatever is under way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.run.support.forked import answers_of
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(120)


class RunningMean(nn.Module):
    """Replaces its buffer in each forward, as many norms do that people write."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """The input without its running mean."""
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def loss(output: Tensor, targets: Tensor, teachers: Any = None) -> Tensor:
    """The targets' squared error, and the teacher's."""
    error = nn.functional.mse_loss(output, targets)
    if teachers is None:
        return error
    return error + nn.functional.mse_loss(output, teachers["t"].own)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_teacher_that_is_ahead_does_not_make_it_the_loops(accumulate: int) -> None:
    """The batches of one step were refused: forwards had run, and none had ended."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), RunningMean(8), nn.Linear(8, 2)).double()
    teacher = nn.Linear(4, 2).double()
    plain = copy.deepcopy(net)
    batches = [
        (torch.randn(6, 4).double(), torch.randn(6, 2).double()) for _ in range(8)
    ]
    with started(
        net,
        loss,
        lambda p: torch.optim.SGD(p, 0.1),
        batches[0],
        teachers={"t": hocket.Teacher(teacher, look_ahead=1)},
        accumulate=accumulate,
        schedule="1f1b",
        num_microbatches=2,
    ) as pipeline:
        found = [result.loss for result in pipeline.train(batches)]
        mean = pipeline.state_dict()["1.mean"]

    sgd, expected = torch.optim.SGD(plain.parameters(), 0.1), list[float]()
    for begin in range(0, len(batches), accumulate):
        sgd.zero_grad()
        total = 0.0
        for x, y in batches[begin : begin + accumulate]:
            for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                output = plain(inputs)
                part = nn.functional.mse_loss(output, targets)
                part = part + nn.functional.mse_loss(output, teacher(inputs).detach())
                (part / (2 * accumulate)).backward()
                total += part.item() / (2 * accumulate)
        sgd.step()
        expected.append(total)
    assert found == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(mean, plain[1].mean, rtol=1e-10, atol=0.0)


BEGINS: Final = 8  # forwards after which it begins to change


class Late(nn.Module):
    """Replaces a buffer, and sets an attribute, from some forward on.

    As codebooks do that are looked through now and then, and statistics that are kept
    once a model has warmed up.
    """

    mean: Tensor
    num: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("num", torch.zeros((), dtype=torch.long))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The input without its mean, times a number that grows."""
        if self.training:
            self.num += 1
            if self.num > BEGINS:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                self.factor = self.factor * 1.01
        return (x - self.mean) * self.factor


def late_net() -> nn.Sequential:
    """Whose second half replaces its buffer."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), Late(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def late_batches() -> list[tuple[Tensor, Tensor]]:
    """Of 6 samples, for 8 steps."""
    rng = torch.Generator().manual_seed(1)
    made = [torch.randn(6, 6, generator=rng).double() for _ in range(8)]
    return [(x[:, :4], x[:, 4:]) for x in made]


def losses_of(schedule: str) -> list[float]:
    """The losses of a run over all batches, in two microbatches each."""
    batches = late_batches()
    with hocket.Pipeline(
        late_net(),
        nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=batches[0],
        num_microbatches=2,
        schedule=schedule,
    ) as pipeline:
        return [result.loss for result in pipeline.train(batches)]


def plain_losses(delay: int) -> list[float]:
    """Those of a loop whose step reads the weights of `delay` updates before."""
    net, found = late_net(), list[float]()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    old: list[list[Tensor]] = []
    for batch in late_batches():
        new = [p.detach().clone() for p in net.parameters()]
        old.append(new)
        sgd.zero_grad()
        for p, x in zip(
            net.parameters(), old[max(0, len(old) - 1 - delay)], strict=True
        ):
            p.data.copy_(x)
        total = 0.0
        for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
            loss_of_part = nn.functional.mse_loss(net(x), y) / 2
            loss_of_part.backward()
            total += loss_of_part.item()
        for p, x in zip(net.parameters(), new, strict=True):
            p.data.copy_(x)
        sgd.step()
        found.append(total)
    return found


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("pipedream-2bw", 1)])
def test_a_forward_that_begins_to_change_later(schedule: str, delay: int) -> None:
    """Runs ended at that step: what it changed was taken for the loop's."""
    found = losses_of(schedule)
    assert found == pytest.approx(plain_losses(delay), rel=1e-10)


def train_late() -> list[float]:
    """On two workers; the first one's copy of the module never runs."""
    return losses_of("1f1b")


def test_a_forward_on_one_worker_alone_begins_to_change(tmp_path: Path) -> None:
    """The other worker has not run it, and was refused as if the loop had parted."""
    for found in answers_of(f"{__name__}:train_late", folder=tmp_path):
        assert found == pytest.approx(plain_losses(0), rel=1e-10)


class Growing(nn.Module):
    """Its buffer grows; one comes where none was, and one goes."""

    rows: Tensor
    mean: Tensor | None
    first: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("rows", torch.zeros(1, 8))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        """The input without the mean of all rows so far."""
        if self.training:
            self.rows = torch.cat([self.rows, x.detach().mean(0, keepdim=True)])
            if len(self.rows) > BEGINS:
                self.mean, self.first = self.rows.mean(0), None
        return x - self.rows.mean(0)


def growing_net() -> nn.Sequential:
    """Whose second half grows."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), Growing(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def grown_state() -> dict[str, list[float]]:
    """The state after a run, of every worker."""
    batches = late_batches()
    with hocket.Pipeline(
        growing_net(),
        nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=batches[0],
        num_microbatches=2,
        schedule="1f1b",
    ) as pipeline:
        for batch in batches:
            pipeline.step(batch)
        state = pipeline.state_dict()
    return {name: x.flatten().tolist() for name, x in state.items()}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_state_has_what_forwards_made(num_workers: int, tmp_path: Path) -> None:
    """A new buffer was not there, and a grown one ended the process of a worker."""
    net = growing_net()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    for batch in late_batches():
        sgd.zero_grad()
        for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
            (nn.functional.mse_loss(net(x), y) / 2).backward()
        sgd.step()
    entry = f"{__name__}:grown_state"
    for found in answers_of(entry, num_workers=num_workers, folder=tmp_path):
        assert found.keys() == net.state_dict().keys()
        for name, expected in net.state_dict().items():
            assert found[name] == pytest.approx(expected.flatten().tolist(), rel=1e-10)
