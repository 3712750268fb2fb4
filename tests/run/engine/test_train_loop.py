"""What users do in and around a training loop whose steps overlap changes no number.

Each equals `hocket.emulate` bit for bit: in one process a stage adds in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.errors import DataError, RunError
from tests.run.support.started import started

NUM_BATCHES: Final = 8
LEFT_AT: Final = 3  # the result at which a loop is left
SGD: Final = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The sums in the same order everywhere."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_model() -> nn.Sequential:
    """Two stages of two layers."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def batches(num_batches: int = NUM_BATCHES) -> list[Batch]:
    """Of six samples each."""
    rng = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=rng, dtype=torch.float64)
    return [(draw(6, 4), draw(6, 3)) for _ in range(num_batches)]


def make_pipeline(schedule: str = "wpipe", optimizer: Any = SGD) -> hocket.Pipeline:
    """On one device; WPipe has two stages there."""
    return started(
        make_model(),
        F.mse_loss,
        optimizer,
        batches(1)[0],
        schedule=schedule,
        cut=["2"] if schedule == "wpipe" else [],
    )


def emulated(data: list[Batch]) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses."""
    model = make_model()
    history = hocket.emulate(
        hocket.Program.chain(range(2), 2, delays=[1, 0]),
        model,
        F.mse_loss,
        SGD,
        data,
        cut_at=["2"],
    )
    return model.state_dict(), [losses["loss"] for losses in history]


def check(
    pipeline: hocket.Pipeline, data: list[Batch], found: dict[int, float]
) -> None:
    """What was trained, and the losses that were returned, by step."""
    weights, losses = emulated(data)
    for name, value in pipeline.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert found == {step: losses[step] for step in found}


@pytest.mark.parametrize("num_batches", [0, 1, 2, 3])
def test_a_loader_may_be_shorter_than_the_order(num_batches: int) -> None:
    """Of no batch, of one, and of just as many as are under way at a time."""
    data = batches(num_batches)
    with make_pipeline() as pipeline:
        found = {x.step: x.loss for x in pipeline.train(data)}
        assert list(found) == list(range(num_batches))
        if data:
            check(pipeline, data, found)


class _SpoonError(Exception):
    """Of the user's."""


def _breaks(train: Callable[[Any], Iterator[Any]], data: list[Batch]) -> None:
    for result in train(data):
        if result.step == LEFT_AT:
            break


def _raises(train: Callable[[Any], Iterator[Any]], data: list[Batch]) -> None:
    for result in train(data):
        if result.step == LEFT_AT:
            raise _SpoonError


def _loader_raises(train: Callable[[Any], Iterator[Any]], data: list[Batch]) -> None:
    def until() -> Iterator[Batch]:
        yield from data[: LEFT_AT + 1]
        raise _SpoonError

    list(train(until()))


def _bad_batch(train: Callable[[Any], Iterator[Any]], data: list[Batch]) -> None:
    x, y = data[0]
    list(train([*data[: LEFT_AT + 1], (x[:1], y[:1])]))


@pytest.mark.parametrize("leave", [_breaks, _raises, _loader_raises, _bad_batch])
def test_a_loop_that_was_left_can_go_on(
    leave: Callable[[Callable[[Any], Iterator[Any]], list[Batch]], None],
) -> None:
    """What was read is trained, and counted; another loop goes on behind it."""
    data = batches()
    with make_pipeline() as pipeline:
        with contextlib.suppress(_SpoonError, DataError):
            leave(pipeline.train, data)
        next_step = pipeline.num_steps
        assert LEFT_AT < next_step < NUM_BATCHES
        found = {x.step: x.loss for x in pipeline.train(data[next_step:])}
        assert list(found) == list(range(next_step, NUM_BATCHES))
        check(pipeline, data, found)


def test_a_pipeline_closed_within_a_loop_has_ended() -> None:
    """The next result raises it."""
    pipeline = make_pipeline()
    results = pipeline.train(batches())
    next(results)
    pipeline.close()
    with pytest.raises(RunError, match="has ended"):
        list(results)


def test_looking_at_the_weights_in_a_loop(tmp_path: Path) -> None:
    """To evaluate, save and read weights ends what is under way, and no more."""
    data = batches()
    found = {}
    with make_pipeline() as pipeline:
        for result in pipeline.train(data):
            found[result.step] = result.loss
            pipeline.evaluate(data[:1])
            if result.step == LEFT_AT:
                pipeline.save(tmp_path, data=pipeline.num_steps)
                pipeline.state_dict()
        assert list(found) == list(range(NUM_BATCHES))
        check(pipeline, data, found)
    with make_pipeline() as pipeline:
        next_step = pipeline.load(tmp_path)
        found = {x.step: x.loss for x in pipeline.train(data[next_step:])}
        check(pipeline, data, found)


@pytest.mark.parametrize("schedule", ["wpipe", "1f1b"])
def test_loops_and_steps_within_a_loop(schedule: str) -> None:
    """Everybody gets the results of their own steps, whichever come in between."""
    data = iter(batches())
    inner: dict[int, float] = {}
    found: dict[int, float] = {}
    with make_pipeline(schedule) as pipeline:
        for result in pipeline.train(data):
            found[result.step] = result.loss
            if result.step == 1:
                some = [next(data), next(data)]
                inner |= {x.step: x.loss for x in pipeline.train(some)}
                single = pipeline.step(next(data))
                inner[single.step] = single.loss
        assert len(inner) == 3
        assert sorted([*found, *inner]) == list(range(NUM_BATCHES))
        if schedule == "wpipe":
            check(pipeline, batches(), found | inner)


def test_a_learning_rate_changed_by_hand_counts_from_the_next_result_on() -> None:
    """With steps under way as without: an update knows of all results before it."""

    def trained(drain_every: int | None) -> dict[str, Tensor]:
        optimizers: list[torch.optim.Optimizer] = []

        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(SGD(parameters))
            return optimizers[-1]

        with make_pipeline(optimizer=make) as pipeline:
            for result in pipeline.train(batches(), drain_every=drain_every):
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = 0.1 / (2 + result.step)
            return pipeline.state_dict()

    ahead, drained = trained(None), trained(1)
    assert all(torch.equal(ahead[name], drained[name]) for name in drained)
