"""The example's own gradient stays as it is while a pipeline is made.

Found when the gradient of an input was read after the first step, as for saliency: it
held what the backwards had added that measure stages on the example.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import hocket
from tests.conformance.script import batches, chain, sgd


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
    with hocket.Pipeline(
        net,
        mse_loss,
        optimizer=sgd,
        example=(x, y),
        num_microbatches=2,
        run_dir=tmp_path,
    ) as pipeline:
        assert x.grad is None
        pipeline.step((x, y))
    assert x.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=1e-12)
