"""What a compiled step does with batches, rates and states."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.errors import ConfigError, WaitError
from hocket.run.outoforder.capture.captured_step import capture_step
from tests.run.outoforder.support.small_steps import (
    OPTIMIZERS,
    SPECIMENS,
    TOLERANCE,
    batches_of,
    difference,
    loss,
    model_of,
    train_compiled,
    train_eagerly,
)

SPECIMEN = SPECIMENS["convolutional"]


def test_other_sizes_get_a_graph_each() -> None:
    """An epoch with a smaller last batch."""
    batches = batches_of(SPECIMEN, 6)
    for i in (2, 5):
        inputs, targets = batches[i]
        batches[i] = inputs[:3], targets[:3]
    model, make = model_of(SPECIMEN), OPTIMIZERS["AdamW"]
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        assert train_compiled(step, batches) == pytest.approx(expected, rel=TOLERANCE)
    assert difference(model, trained) <= TOLERANCE


def test_rates_are_read_at_each_step() -> None:
    """A scheduler changes them in between."""
    batches, make = batches_of(SPECIMEN, 6), OPTIMIZERS["SGD"]
    model, ours = model_of(SPECIMEN), model_of(SPECIMEN)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    torch.manual_seed(2)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    with hocket.compile_step(ours, loss, make, example=batches[0]) as step:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
        torch.manual_seed(2)
        for batch in batches:
            step(batch)
            scheduler.step()
    assert difference(ours, model) <= TOLERANCE


def test_threads_take_turns() -> None:
    """Two threads train on one batch: as many steps as one thread would."""
    batches, make = batches_of(SPECIMENS["perceptron"], 1) * 8, OPTIMIZERS["AdamW"]
    model = model_of(SPECIMENS["perceptron"])
    expected, trained = train_eagerly(model, make, batches)
    with (
        hocket.compile_step(model, loss, make, example=batches[0]) as step,
        ThreadPoolExecutor(2) as threads,
    ):
        results = [*threads.map(step, batches)]
    assert difference(model, trained) <= TOLERANCE
    losses = sorted((result.step, result.loss) for result in results)
    assert [number for number, _ in losses] == [*range(8)]
    assert [x for _, x in losses] == pytest.approx(expected, rel=TOLERANCE)


def test_units_of_one_form_share_the_graph_of_their_update() -> None:
    """Tracing the optimizer for each of many equal layers takes longest of all."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 4))
    groups = [{"params": model[:2].parameters(), "lr": 1e-3}]
    groups.append({"params": model[2:].parameters(), "lr": 1e-2})
    batch = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    captured = capture_step(model, loss, torch.optim.AdamW(groups), batch)
    graphs = [id(update.module) for update in captured.updates.values()]
    assert len(graphs) == 7
    assert len(set(graphs)) == 3
    assert graphs[0] == graphs[1] != graphs[2]


def test_goes_on_from_a_checkpoint() -> None:
    """The optimizer's states come from a state dict that torch can load, too."""
    batches, make = batches_of(SPECIMENS["perceptron"], 8), OPTIMIZERS["AdamW"]
    model = model_of(SPECIMENS["perceptron"])
    _, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        for batch in batches[:4]:
            step(batch)
        states = copy.deepcopy((model.state_dict(), step.optimizer.state_dict()))
        for batch in batches[4:6]:
            step(batch)
        model.load_state_dict(states[0])
        step.optimizer.load_state_dict(states[1])
        for batch in batches[4:]:
            step(batch)
    assert difference(model, trained) <= TOLERANCE


def test_compiling_trains_nothing() -> None:
    """Measuring orders restores weights, buffers and the random state."""
    model, example = model_of(SPECIMEN), batches_of(SPECIMEN, 1)[0]
    before, random = copy.deepcopy(model), torch.get_rng_state()
    with hocket.compile_step(model, loss, OPTIMIZERS["SGD"], example=example):
        assert difference(model, before) == 0.0
        assert torch.equal(torch.get_rng_state(), random)


def test_modes_and_named_losses() -> None:
    """A dict of losses trains one of them; eval mode gets a graph of its own."""

    def losses(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        right = (output.argmax(1) == targets).double().mean()
        return {"loss": loss(output, targets), "accuracy": right}

    model, batches = model_of(SPECIMEN), batches_of(SPECIMEN, 3)
    make = OPTIMIZERS["SGD"]
    with hocket.compile_step(model, losses, make, example=batches[0]) as step:
        for batch in batches:
            result = step(batch)
        assert set(result.losses) == {"loss", "accuracy"}
        assert result.step == 2
        assert result.num_samples == 4
        model.eval()
        before = model.state_dict()["1.running_mean"].clone()
        step(batches[0])
        assert torch.equal(model.state_dict()["1.running_mean"], before)


def test_one_graph_for_a_device_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is captured once, and reads each batch from the same tensors."""
    from tests.run.outoforder.support.inline_device import InlineDevice

    monkeypatch.setattr(
        "hocket.run.outoforder.compile_step.open_device",
        lambda device, num_lanes, **more: InlineDevice(num_lanes),
    )
    batches, make = batches_of(SPECIMEN, 5), OPTIMIZERS["AdamW"]
    model = model_of(SPECIMEN)
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        assert train_compiled(step, batches) == pytest.approx(expected, rel=TOLERANCE)
    assert difference(model, trained) <= TOLERANCE


@pytest.mark.parametrize("has_graphs", [False, True])
def test_weight_gradients_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch, *, has_graphs: bool
) -> None:
    """Equals eager where each update has its own step's rate; other sizes in between.

    The order across steps is played although it is not the fastest here.
    """
    from tests.run.outoforder.support.inline_device import InlineDevice

    if has_graphs:
        monkeypatch.setattr(
            "hocket.run.outoforder.compile_step.open_device",
            lambda device, num_lanes, **more: InlineDevice(num_lanes),
        )
    monkeypatch.setattr(
        "hocket.run.outoforder.order.choose._rank",
        lambda tried: tried.name != "across steps",
    )
    batches, make = batches_of(SPECIMEN, 20), OPTIMIZERS["AdamW"]
    inputs, targets = batches[7]
    batches[7] = inputs[:3], targets[:3]
    ours, model = model_of(SPECIMEN), model_of(SPECIMEN)
    optimizer, expected = make(model.parameters()), []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    torch.manual_seed(2)
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        scheduler.step()
        expected.append(value.item())
    with hocket.compile_step(
        ours, loss, make, example=batches[0], across_steps=True
    ) as step:
        assert step.candidates[0].name == "across steps"
        assert step.schedule.body
        hocket.check(step.schedule)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.8)
        torch.manual_seed(2)
        losses = []
        for i, batch in enumerate(batches):
            losses.append(step(batch).loss)
            scheduler.step()
            if i == 12:
                step.synchronize()
        assert step.predicted.peak_bytes(0) == step.candidates[0].peak_bytes
        assert difference(ours, model) > TOLERANCE  # the last updates wait
        step.synchronize()
        assert difference(ours, model) <= TOLERANCE
    assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_predicts_and_lists_orders() -> None:
    """The serial order is always among them, and each one passes `check`."""
    model, example = model_of(SPECIMEN), batches_of(SPECIMEN, 1)[0]
    with hocket.compile_step(model, loss, OPTIMIZERS["SGD"], example=example) as step:
        assert "serial" in {one.name for one in step.candidates}
        for one in step.candidates:
            hocket.check(one.schedule)
            assert one.predicted.peak_bytes(0) <= one.peak_bytes
        assert step.predicted is step.candidates[0].predicted
        assert step.schedule is step.candidates[0].schedule


def test_one_lane_is_the_serial_order() -> None:
    """Asked for, it is the only order; three lanes are refused."""
    model, example = model_of(SPECIMEN), batches_of(SPECIMEN, 1)[0]
    make = OPTIMIZERS["SGD"]
    with hocket.compile_step(model, loss, make, example=example, num_lanes=1) as step:
        assert [one.name for one in step.candidates] == ["serial"]
    with pytest.raises(ConfigError, match="num_lanes=3"):
        hocket.compile_step(model, loss, make, example=example, num_lanes=3)


def test_a_weight_that_is_trained_from_now_on() -> None:
    """It gets its states in an eager step, and is compiled from then on."""
    specimen, make = SPECIMENS["perceptron"], OPTIMIZERS["AdamW"]
    model, batches = model_of(specimen), batches_of(specimen, 8)
    eager = copy.deepcopy(model)
    optimizer = make(eager.parameters())
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        for i, (inputs, targets) in enumerate(batches):
            if i == 4:
                model.get_submodule("frozen").requires_grad_(requires_grad=True)
                eager.get_submodule("frozen").requires_grad_(requires_grad=True)
            optimizer.zero_grad()
            loss(eager(inputs), targets).backward()
            optimizer.step()
            step((inputs, targets))
    assert difference(model, eager) <= TOLERANCE


def test_gradients_are_gone() -> None:
    """Their norm is an error, and never a wrong number."""
    model, batches = model_of(SPECIMEN), batches_of(SPECIMEN, 2)
    with hocket.compile_step(
        model, loss, OPTIMIZERS["SGD"], example=batches[0]
    ) as step:
        result = [step(batch) for batch in batches][-1]
        with pytest.raises(WaitError, match="frees each one"):
            print(result.grad_norm)
        assert all(p.grad is None for p in model.parameters())


class Recomputing(nn.Module):
    """Its layers' outputs are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Keep the input alone."""
        made: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return made


def test_recomputed_layers_are_exact() -> None:
    """What is computed again is there before weight gradients and inputs' read it."""
    torch.manual_seed(0)
    model = Recomputing().double()
    ours = copy.deepcopy(model)
    batches = batches_of(SPECIMENS["perceptron"], 6)
    expected, trained = train_eagerly(model, OPTIMIZERS["AdamW"], batches)
    with hocket.compile_step(
        ours, loss, OPTIMIZERS["AdamW"], example=batches[0], sanitize=True
    ) as step:
        assert train_compiled(step, batches) == pytest.approx(expected, rel=TOLERANCE)
    assert difference(ours, trained) <= TOLERANCE
