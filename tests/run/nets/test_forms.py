"""Numbers and texts among the inputs that differ from batch to batch are followed."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hocket.errors import HocketError, ModelError
from tests.run.support.forked import answers_of
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(240)

CAPTURING: Final = "capturing the model for"
WAYS: Final[dict[str, dict[str, Any]]] = {
    "1f1b": {"schedule": "1f1b"},
    "split backwards": {"schedule": "zb-h1"},
    "recomputed": {"schedule": "1f1b", "recompute": "all"},
    "old weights": {"schedule": "pipedream-2bw"},
    "replicas": {"schedule": "1f1b", "num_replicas": 2, "cut": None},
}


class Noised(nn.Module):
    """Takes the time of a diffusion step, from 0 to 1000, and a task."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
        self.to(dtype)

    def forward(self, x: Tensor, t: float = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        part = t / 1000
        x = torch.tanh(self.first(x)) * (1 - part)
        x = torch.tanh(self.second(x) + part**2)
        return self.heads[task](x)


class Takes(Noised):
    """A layer takes the number."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor, t: float = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        return self.scaled(super().forward(x, 1.0, task), t)


class Scaled(nn.Module):
    """Would compute something else with a tensor: a float is one of float32."""

    def forward(self, x: Tensor, t: Any) -> Tensor:
        """(samples, 3) -> (samples, 3)."""
        return x * torch.full((3,), t) * (2.0 if isinstance(t, Tensor) else 1.0)


class Fills(Noised):
    """Its own forward does the same."""

    def forward(self, x: Tensor, t: float = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        out: Tensor = super().forward(x, 1.0, task)
        return out * torch.full((3,), t) * torch.tensor(t)


class Rounds(Noised):
    """Operators that round in other ways with a tensor."""

    def forward(self, x: Tensor, t: float = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = self.first(x)
        x = x.lerp(x.cos(), t / 3) + (t + 1) / (x.abs() + 0.01)
        return self.heads[task](x)


class Tells(Noised):
    """Makes another constant of a tensor, also where only numbers are computed."""

    def forward(self, x: Tensor, t: Any = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        part = t * (2.0 if isinstance(t, Tensor) else 1.0)
        x = torch.tanh(self.second(torch.tanh(self.first(x)) + part))
        return self.heads[task](x * t * len(str(t)))


class Decides(Noised):
    """Leaves a layer out while the number is small."""

    def forward(self, x: Tensor, t: float = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = torch.tanh(self.first(x))
        if t > 0.25:
            x = self.second(x)
        return self.heads[task](x)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """A mean of squares."""
    return ((output - targets) ** 2).mean()


def adam(weights: Any) -> torch.optim.Optimizer:
    """Moments and a decay show weights that should have been left alone."""
    return torch.optim.AdamW(weights, 0.02, weight_decay=0.1)


Batch = tuple[tuple[Any, ...], Tensor]


def batches(*given: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> list[Batch]:
    """A batch of eight samples for each tuple of further arguments."""
    rng = torch.Generator().manual_seed(1)
    found = []
    for more in given:
        x, y = (torch.randn(8, n, generator=rng, dtype=dtype) for n in (6, 3))
        found.append(((x, *more), y))
    return found


def train_plain(net: nn.Module, data: Sequence[Batch], parts: int) -> list[float]:
    """The plain loop over as many microbatches."""
    step, losses = adam(net.parameters()), []
    for (x, *more), y in data:
        step.zero_grad()
        total = 0.0
        for one, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            part = loss(net(one, *more), target) / parts
            part.backward()
            total += part.item()
        step.step()
        losses.append(total)
    return losses


TIMES: Final = [(1000 / (i + 1), "ab"[i % 2]) for i in range(6)]


def entry_train(way: str) -> dict[str, Any]:
    """Train with another time and task in each batch; evaluate with others."""
    net = Noised()
    data = batches(*TIMES)
    options = {"num_microbatches": 2, "cut": ["second"], **WAYS[way]}
    with started(net, loss, adam, data[0], **options) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
        evaluated = pipeline.evaluate(batches((7.5, "b"), (0.0, "a"))).loss
        weights = pipeline.state_dict()
    return {
        "losses": losses,
        "evaluated": evaluated,
        "weights": {name: x.flatten().tolist() for name, x in weights.items()},
    }


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"old weights"}))
def test_two_workers_train_as_the_plain_loop(way: str, tmp_path: Path) -> None:
    """The number is a tensor from the second batch on; both tasks have a graph."""
    answers = answers_of(f"{__name__}:entry_train", way, folder=tmp_path)
    net = Noised()
    losses = train_plain(net, batches(*TIMES), 4 if way == "replicas" else 2)
    with torch.no_grad():
        means = [
            loss(net(*inputs), y).item()
            for inputs, y in batches((7.5, "b"), (0.0, "a"))
        ]
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-10)
        assert answer["evaluated"] == pytest.approx(sum(means) / 2, rel=1e-10)
        for name, x in net.state_dict().items():
            known = x.flatten().tolist()
            assert answer["weights"][name] == pytest.approx(known, rel=1e-10, abs=1e-12)


def test_workers_with_other_numbers_are_refused(tmp_path: Path) -> None:
    """They are part of the batch, which all workers read."""
    answers = answers_of(f"{__name__}:entry_differ", folder=tmp_path)
    assert any("have different batches" in answer for answer in answers), answers


def entry_differ() -> str:
    """The second worker has another number."""
    rank = int(os.environ["RANK"])
    data, net = batches((1.0, "a"), (2.0 + rank, "a")), Noised()
    options = {"num_microbatches": 2, "cut": ["second"]}
    try:
        with started(net, loss, adam, data[0], **options) as pipeline:
            for batch in data:
                pipeline.step(batch)
    except HocketError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [Noised, Takes, Fills, Rounds, Tells, Decides])
def test_one_worker_trains_as_the_plain_loop(
    kind: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """Where a tensor would change what is computed, each number has its own graph."""
    net = kind().to(dtype)
    plain = copy.deepcopy(net)
    data = batches(*((i / 7, "ab"[i % 2]) for i in range(4)), dtype=dtype)
    with started(net, loss, adam, data[0], num_microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
    assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)


class Counts(Noised):
    """Decides by whatever it is given."""

    def forward(self, x: Tensor, t: Any = None, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = torch.tanh(self.first(x))
        for _ in range(0 if t is None else int(t)):
            x = torch.tanh(self.second(x))
        return self.heads[task](x) * (2.0 if t is True else 1.0)


def test_whole_numbers_flags_and_none() -> None:
    """True is no 1; each has a graph of its own, and no more than eight are kept."""
    net = Counts()
    plain = copy.deepcopy(net)
    data = batches(*((t,) for t in (1, True, None, 3, 1, False, True)))
    with started(net, loss, adam, data[0], num_microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
        assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)
        more = batches(*((t,) for t in (4, 5, 6, 7)))
        for batch in more[:3]:
            pipeline.step(batch)
        why = r"args\[1\] is 7, and it is captured for 6, and 8 graphs"
        with pytest.raises(ModelError, match=why):
            pipeline.step(more[3])
        pipeline.step(data[0])


class Signs(Noised):
    """Reads the sign of a zero, and the class of a number."""

    def forward(self, x: Tensor, t: float = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        scale = 3.0 if isinstance(t, np.float64) else 2.0
        return self.heads[task](x * math.copysign(scale, t))


def test_zeros_of_two_signs_and_numbers_of_other_libraries() -> None:
    """Past bug: -0.0 ran with the graph for 0.0, and np.float64 with that of floats."""
    net = Signs()
    plain = copy.deepcopy(net)
    data = batches(*((t,) for t in (0.0, -0.0, 0.0, 0.5, np.float64(0.5), -0.5)))
    with started(net, loss, adam, data[0], num_microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
    assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)


class ByTask(Noised):
    """Only one task makes another constant of a tensor, with the same operators."""

    def forward(self, x: Tensor, t: Any = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = torch.tanh(self.second(torch.tanh(self.first(x)) * (1 - t)))
        is_other = task == "b" and isinstance(t, Tensor)
        return self.heads[task](x * (3.0 if is_other else 1.0))


@pytest.mark.parametrize("kind", [Noised, ByTask])
def test_another_task_while_a_number_is_a_tensor(kind: Callable[[], nn.Module]) -> None:
    """Past bug: its code was not asked whether a tensor does for the number."""
    net = kind()
    plain = copy.deepcopy(net)
    data = batches((0.1, "a"), (0.2, "a"), (0.3, "b"), (0.4, "b"), (0.5, "a"))
    with started(net, loss, adam, data[0], num_microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
    assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)


def test_a_number_and_a_task_that_change_at_each_step() -> None:
    """Past bug: each number had a graph, and the ninth was refused."""
    net = Noised()
    plain = copy.deepcopy(net)
    data = batches(*((i / 14, "ab"[i % 2]) for i in range(14)))
    with started(net, loss, adam, data[0], num_microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
    assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)


def test_batches_of_one_step_need_one_graph() -> None:
    """Past bug: the first of them ran with the graph for the last."""
    net = Noised()
    plain = copy.deepcopy(net)
    data = batches((1.0, "a"), (1.0, "b"), (2.0, "a"), (3.0, "a"))
    with started(net, loss, adam, data[0], accumulate=2) as pipeline:
        with pytest.raises(ModelError, match="batches of step 0 need different graphs"):
            pipeline.step(*data[:2])
        found = pipeline.step(*data[2:]).loss
    with torch.no_grad():
        means = [loss(plain(*inputs), y).item() for inputs, y in data[2:]]
    assert found == pytest.approx(sum(means) / 2, rel=1e-10)


class Long(nn.Module):
    """Decides by the length, and has a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
        self.double()

    def forward(self, x: Tensor, t: float, task: str) -> Tensor:
        """(samples, length, 4) -> (samples, 3)."""
        hidden = torch.tanh(self.first(x)) * (2.0 if x.shape[1] > 6 else 1.0)
        return self.heads[task](hidden.mean(1) * (1 - t))


def test_code_that_decides_by_lengths_and_tasks() -> None:
    """Past bug: the first length was refused once another one had its graph."""
    rng = torch.Generator().manual_seed(1)
    data: list[Batch] = []
    for length, *more in ((5, 0.1, "a"), (7, 0.2, "b"), (5, 0.2, "b"), (8, 0.3, "a")):
        x = torch.randn(8, int(length), 4, generator=rng, dtype=torch.float64)
        y = torch.randn(8, 3, generator=rng, dtype=torch.float64)
        data.append(((x, *more), y))
    net = Long()
    plain = copy.deepcopy(net)
    with started(net, loss, adam, data[0], num_microbatches=2) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
    assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)


def test_a_number_that_changes_at_each_step_is_captured_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a tensor; the task is that of the example."""
    data, net = batches(*((i * 1.5, "a") for i in range(20))), Noised()
    with (
        caplog.at_level(logging.INFO, "hocket"),
        started(net, loss, adam, data[0], num_microbatches=2) as pipeline,
    ):
        for batch in data:
            pipeline.step(batch)
    assert sum(x.startswith(CAPTURING) for x in caplog.messages) == 1


class Divides(Noised):
    """By the number; Python refuses to divide by zero."""

    def forward(self, x: Tensor, t: float = 1.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        return self.heads[task](torch.tanh(self.first(x)) / (1 / t))


def test_a_division_by_zero_is_pythons() -> None:
    """With a tensor the quotient would be infinite, and what is divided by it zero."""
    net, data = Divides(), batches((0.5,), (0.25,), (0.0,), (0.25,))
    plain = copy.deepcopy(net)
    with started(net, loss, adam, data[0]) as pipeline:
        losses = [pipeline.step(batch).loss for batch in data[:2]]
        with pytest.raises(ModelError, match="division by zero"):
            pipeline.step(data[2])
        losses.append(pipeline.step(data[3]).loss)
    expected = train_plain(plain, [*data[:2], data[3]], 2)
    assert losses == pytest.approx(expected, rel=1e-10)


def raised(x: Tensor, t: Any) -> Tensor:
    """A function outside of the module, which looks at the number if it is one."""
    return x * 3.0 if isinstance(t, float) and t > 0.6 else x


class Looks(Noised):
    """Looks at the number only if that is no tensor, itself or by a function."""

    def __init__(self, *, by_itself: bool) -> None:
        super().__init__()
        self.by_itself = by_itself

    def forward(self, x: Tensor, t: Any = 0.0, task: str = "a") -> Tensor:
        """(samples, 6) -> (samples, 3)."""
        x = torch.tanh(self.first(x))
        if not self.by_itself:
            x = raised(x, t)
        elif torch.is_tensor(t) or t > 0.25:
            x = torch.tanh(self.second(x))
        return self.heads[task](x * t)


@pytest.mark.parametrize("by_itself", [True, False])
def test_code_that_asks_for_types_has_a_graph_for_each_number(by_itself: bool) -> None:
    """Past bug: with a tensor it took one branch, for all numbers."""
    net = Looks(by_itself=by_itself)
    plain, data = copy.deepcopy(net), batches((0.5,), (0.3,), (0.9,), (0.1,))
    with started(net, loss, adam, data[0]) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
    assert losses == pytest.approx(train_plain(plain, data, 2), rel=1e-10)
