"""What a loop changes in its models between steps, the run of a program follows."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import nn

import hocket
from tests.sharing.waves.test_changed_models import (
    Change,
    Net,
    batches,
    evaluated,
    hooked,
    rate,
    sgd,
    temperature,
)

FORMS: Final = {
    "captured": lambda net: net,
    "in a Sequential": nn.Sequential,
}


def make_run(net: nn.Module) -> hocket.ProgramRun:
    """One net, one device, two microbatches."""
    order = hocket.make_schedule("1f1b", num_devices=1, num_microbatches=2, num_steps=1)
    return hocket.ProgramRun(order, net, nn.functional.mse_loss, sgd, batches()[0])


@pytest.mark.parametrize("change", [temperature, rate, evaluated, hooked])
@pytest.mark.parametrize("form", FORMS)
def test_changes_are_followed(form: str, change: Change) -> None:
    """Past bug: a captured net went on as it was when the run was made."""
    net, own = Plain().double(), Plain().double()
    own.load_state_dict(net.state_dict())
    optimizer = sgd(net.parameters())
    with make_run(FORMS[form](own)) as run:
        for step, (inputs, targets) in enumerate(batches()):
            change(step, net)
            optimizer.zero_grad()
            total = 0.0
            for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                loss = nn.functional.mse_loss(net(x), y) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            change(step, own)
            assert run.step((inputs, targets)).loss == pytest.approx(total, rel=1e-10)


def test_a_change_that_steps_under_way_would_see_is_refused() -> None:
    """They overlap in an order without flushes."""
    net = Plain().double()
    order = hocket.make_schedule(
        "pipedream-2bw", num_devices=1, num_microbatches=2, num_steps=4
    )
    with hocket.ProgramRun(
        order, net, nn.functional.mse_loss, sgd, batches()[0]
    ) as run:
        results = run.train(batches())
        next(results)
        net.temperature = 3.0
        with pytest.raises(hocket.ModelError, match=r"temperature.*under way"):
            next(results)


class Places(nn.Module):
    """A table of positions, and a factor among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.last = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: Any, factor: float = 1.0) -> Any:
        """(samples, length, 4) -> (samples, 3)."""
        return self.last(x + self.places(torch.arange(x.shape[1]))).mean(1) * factor


def places_batch(length: int, factor: float = 1.0) -> tuple[Any, Any]:
    """Eight samples."""
    torch.manual_seed(length)
    return (torch.randn(8, length, 4), factor), torch.randn(8, 3)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (places_batch(1), "only the number of samples may change"),
        (places_batch(5, 2.0), r"args\[1\] is 2.0"),
    ],
)
def test_a_batch_of_another_form_is_refused(batch: Any, what: str) -> None:
    """Past bug: a graph of five places went on with one, and with the first factor."""
    order = hocket.make_schedule("1f1b", num_devices=1, num_microbatches=2, num_steps=2)
    first, loss = places_batch(5), nn.functional.mse_loss
    with pytest.raises(hocket.ModelError, match=what):
        hocket.emulate(order.program, Places(), loss, sgd, [first, batch])
    order = hocket.make_schedule("1f1b", num_devices=1, num_microbatches=2, num_steps=1)
    with hocket.ProgramRun(order, Places(), loss, sgd, first) as run:
        run.step(first)
        with pytest.raises(hocket.ModelError, match=what):
            run.step(batch)


class Plain(Net):
    """The same without a count of its calls, which a stage could not keep."""

    def forward(self, x: Any) -> Any:
        """Samples by 3."""
        x = self.drop(torch.tanh(self.norm(self.first(x)) / self.temperature))
        return self.last(x)
