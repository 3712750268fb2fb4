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


def made(net: nn.Module, **options: Any) -> hocket.Pipeline:
    """Trains it in two microbatches, by 1F1B if nothing else is said."""
    return hocket.Pipeline(
        net,
        nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=late_batches()[0],
        num_microbatches=2,
        **{"schedule": "1f1b", **options},
    )


def losses_of(schedule: str) -> list[float]:
    """The losses of a run over all batches."""
    with made(late_net(), schedule=schedule) as pipeline:
        return [result.loss for result in pipeline.train(late_batches())]


def backwards(net: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The backwards of a plain step in two microbatches; its loss."""
    total = 0.0
    for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
        part = nn.functional.mse_loss(net(x), y) / 2
        part.backward()
        total += part.item()
    return total


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
        found.append(backwards(net, batch))
        for p, x in zip(net.parameters(), new, strict=True):
            p.data.copy_(x)
        sgd.step()
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
        mean = self.rows.mean(0) if self.mean is None else self.mean
        return x - mean


def growing_net() -> nn.Sequential:
    """Whose second half grows."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), Growing(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def grown(options: dict[str, Any]) -> dict[str, Any]:
    """The state after a run, and the loss of an evaluation."""
    batches = late_batches()
    with made(growing_net(), **options) as pipeline:
        for batch in batches:
            pipeline.step(batch)
        state = pipeline.state_dict()
        found = {name: x.flatten().tolist() for name, x in state.items()}
        return {"state": found, "loss": pipeline.evaluate(batches[:1]).loss}


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_state_has_what_forwards_made(
    num_workers: int, recompute: str, tmp_path: Path
) -> None:
    """A new buffer was not there, and a grown one ended the process of a worker.

    Where stages recompute, one that was set to None ended the run.
    """
    net, batches = growing_net(), late_batches()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    for batch in batches:
        sgd.zero_grad()
        backwards(net, batch)
        sgd.step()
    expected = net.state_dict()
    inputs, targets = batches[0]
    loss = nn.functional.mse_loss(net.eval()(inputs), targets).item()
    answers = answers_of(
        f"{__name__}:grown",
        {"recompute": recompute},
        num_workers=num_workers,
        folder=tmp_path,
    )
    for found in answers:
        assert found["loss"] == pytest.approx(loss, rel=1e-10)
        assert found["state"].keys() == expected.keys()
        for name, values in expected.items():
            near = pytest.approx(values.flatten().tolist(), rel=1e-10)
            assert found["state"][name] == near


def test_replicas_evaluate_with_what_the_first_one_made(tmp_path: Path) -> None:
    """Of a buffer that is new, too: each had its own, 0.2 % off without a word."""
    entry, options = f"{__name__}:grown", {"num_replicas": 2}
    for found in answers_of(entry, options, folder=tmp_path):
        net = growing_net().eval()
        own = net[3]
        assert isinstance(own, Growing)
        own.rows, own.mean, own.first = torch.zeros(17, 8), torch.zeros(8), None
        net = net.double()
        state = {
            name: torch.tensor(x, dtype=torch.float64)
            for name, x in found["state"].items()
        }
        for name, tensor in net.state_dict().items():
            tensor.copy_(state[name].view(tensor.shape))
        inputs, targets = late_batches()[0]
        loss = nn.functional.mse_loss(net(inputs), targets).item()
        assert found["loss"] == pytest.approx(loss, rel=1e-10)
