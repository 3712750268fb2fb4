"""The example stays as it is while a pipeline is made, and so does its gradient.

Found when the gradient of an input was read after the first step, as for saliency: it
held what the backwards had added that measure stages on the example. A loss that adds 1
to its targets in place had added 190 by then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hocket
from hocket.errors import ModelError
from tests.conformance.script import batches, chain, sgd
from tests.run.support.started import started


def test_making_a_pipeline_adds_nothing_to_the_gradient_of_its_example(
    tmp_path: Path,
) -> None:
    """Behind the first step it is that of the step alone."""
    torch.set_num_threads(1)
    net, (x, y) = chain().double(), batches()[0]
    expected = x.clone().requires_grad_()
    mse_loss(net(expected), y).backward()
    net.zero_grad()
    x.requires_grad_()
    with started(net, mse_loss, sgd, (x, y), run_dir=tmp_path) as pipeline:
        assert x.grad is None
        pipeline.step((x, y))
    assert x.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=1e-12)


def adds(output: Tensor, targets: Tensor) -> Tensor:
    """Changes its targets in place."""
    targets += 1.0
    return mse_loss(output, targets)


def adds_by_number(output: Tensor, targets: Tensor) -> Tensor:
    """The same; reads a number, so that it cannot be traced."""
    return adds(output, targets) * (2.0 if float(targets.sum()) > 1e9 else 1.0)


def pipelined(net: nn.Module, batch: Any) -> Callable[[Any], Any]:
    """Makes a pipeline."""
    settings = {"optimizer": sgd, "example": batch, "num_microbatches": 1}
    return hocket.Pipeline(net, adds, **settings).step


def compiled(net: nn.Module, batch: Any) -> Callable[[Any], Any]:
    """Makes a step of one device."""
    return hocket.compile_step(net, adds_by_number, sgd, example=batch, num_lanes=1)


@pytest.mark.filterwarnings("ignore:this step runs as it is")
@pytest.mark.parametrize("make", [pipelined, compiled])
def test_what_a_loss_changes_is_the_steps_alone(
    make: Callable[..., Any], free_dir: Path
) -> None:
    """Losses are those of the plain loop, which trains on one batch twice."""
    torch.set_num_threads(1)
    net, batch = chain().double(), batches()[0]
    (x, y), losses = (each.clone() for each in batch), []
    plain = chain().double()
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        losses.append(adds(plain(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    step = make(net, batch)
    found = [float(step(batch).loss) for _ in range(2)]
    assert found == pytest.approx([each.item() for each in losses], rel=1e-12)
    assert torch.equal(batch[1], y)


def test_a_plan_leaves_its_batch_alone() -> None:
    """It measures the loss, too."""
    batch = batches()[0]
    before = batch[1].clone()
    hocket.plan(chain().double(), batch, adds, num_devices=1)
    assert torch.equal(batch[1], before)


def test_a_loss_of_the_whole_batch_must_change_a_copy(free_dir: Path) -> None:
    """What it gets is joined: the batch would stay, where the loop's changes."""
    batch = batches()[0]
    with (
        started(
            chain().double(), hocket.WholeBatch(adds), sgd, batch, schedule="gpipe"
        ) as pipeline,
        pytest.raises(ModelError, match=r"in step 0, the loss changes .* in place"),
    ):
        pipeline.step(batch)


def test_an_array_of_targets_stays(free_dir: Path) -> None:
    """Torch may share its memory."""

    def adds_to_array(output: Tensor, targets: Any) -> Tensor:
        targets += 1.0
        return mse_loss(output, torch.as_tensor(targets))

    x, y = batches()[0]
    array = y.numpy().copy()
    with started(chain().double(), adds_to_array, sgd, (x, array), num_microbatches=1):
        assert torch.equal(torch.from_numpy(array), y)
