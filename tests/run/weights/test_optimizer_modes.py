"""Optimizers with weights to train and others to evaluate, and counts in groups.

Schedule-free optimizers once gave `evaluate()` and `state_dict()` the training weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ConfigError
from hocket.run.weights.migration import CommonState, bundle_of, restore_updater
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.updater import Updater
from tests.conformance.script import batches, chain, mse
from tests.run.support.started import started


class Averaging(torch.optim.SGD):
    """Evaluates the mean of all weights so far, and counts its steps in the group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        for group in self.param_groups:
            group |= {"k": 0, "trains": False}

    def train(self) -> None:
        """Put the weights in place that are trained."""
        self._exchange(trains=True)

    def eval(self) -> None:
        """Put the means in place."""
        self._exchange(trains=False)

    def step(self, closure: Any = None) -> Any:
        """Step, and move the means."""
        for group in self.param_groups:
            assert group["trains"], "step() outside of train()"
            group["k"] += 1
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.detach(), 1 / group["k"])

    def _exchange(self, *, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] is not trains else ():
                if "mean" in self.state[p]:
                    own = p.detach().clone()
                    p.data.copy_(self.state[p]["mean"])
                    self.state[p]["mean"] = own
            group["trains"] = trains


def plain() -> tuple[nn.Module, Averaging]:
    """A plain loop, in training mode."""
    net = chain().double()
    optimizer = Averaging(net.parameters())
    optimizer.train()
    for x, y in batches():
        optimizer.zero_grad()
        mse(net(x), y).backward()
        optimizer.step()
    return net, optimizer


def make(parameters: Any) -> torch.optim.Optimizer:
    """As the user writes it: in no mode yet."""
    return Averaging(parameters)


def test_evaluation_and_state_have_the_weights_to_evaluate() -> None:
    """And training goes on with its own, bit for bit."""
    with hocket.Pipeline(
        chain().double(), mse, optimizer=make, example=batches()[0], num_microbatches=1
    ) as run:
        for batch in batches():
            run.step(batch)
            run.evaluate([batch])
        found, evaluated = run.state_dict(), run.evaluate(batches()[:1]).loss
    net, optimizer = plain()
    optimizer.eval()
    for name, expected in net.state_dict().items():
        assert torch.equal(found[name], expected)
    x, y = batches()[0]
    assert evaluated == pytest.approx(mse(net(x), y).item(), rel=1e-12)


def test_with_old_weights_they_are_refused() -> None:
    """Old versions are kept of the trained ones alone."""
    with pytest.raises(ConfigError, match="weights to train and others to evaluate"):
        started(
            chain().double(),
            mse,
            make,
            batches()[0],
            num_microbatches=4,
            schedule="pipedream-2bw",
        )


def trained_again(optimizer: Any) -> Updater:
    """Update one of two weights, and go on with both; the rate is halved by hand."""
    settings = TrainingConfig(optimizer=optimizer)
    named = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    before = Updater({"a": named["a"]}, settings)
    assert before.optimizer is not None
    before.optimizer.param_groups[0]["lr"] = 0.05
    named["a"].grad = torch.ones(2)
    before.update()
    bundles = {
        name: bundle_of(name, p, before if name == "a" else None)
        for name, p in named.items()
    }
    after = Updater(named, settings)
    restore_updater(after, bundles, CommonState.of([before]))
    return after


def test_a_layer_that_trains_again_in_a_group_that_counts_is_refused() -> None:
    """Its first update would be corrected as if its moments were old: far too long.

    AdamW counts for each parameter; rates are the group's.
    """
    with pytest.raises(ConfigError, match=r"b trains again.*'k' is 1, and 0"):
        trained_again(make)
    assert trained_again(partial(torch.optim.AdamW, lr=0.1)).rates() == [0.05]


def test_a_metric_that_reads_weights_is_right_on_one_worker() -> None:
    """On several it is refused: `test_loss_weights`."""
    net = chain().double()

    def metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"size": torch.stack([p.norm() for p in net.parameters()]).sum()}

    with hocket.Pipeline(
        net, mse, optimizer=make, example=batches()[0], num_microbatches=2
    ) as run:
        run.step(batches()[0])
        found = run.evaluate(batches()[:1], metrics).metrics["size"]
        expected = sum(x.norm().item() for x in run.state_dict().values())
    assert found == pytest.approx(expected, rel=1e-12)
