"""Checkpoints that begin in a forward with old weights are refused where they begin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hocket.errors import CaptureError, ModelError
from hocket.model.capture.capture import capture
from hocket.model.capture.no_checkpointing import NoCheckpointing

WHERE = "stage 3 reads weights that are 1 update old"
BOTH = pytest.mark.parametrize("use_reentrant", [True, False])


def run(use_reentrant: bool, layer: nn.Module, x: Tensor) -> Tensor:
    """The layer in a checkpoint."""
    out: Tensor = checkpoint(layer, x, use_reentrant=use_reentrant)
    return out


def segments(use_reentrant: bool, layer: nn.Module, x: Tensor) -> Tensor:
    """The layer twice, in checkpoints."""
    both = [layer, layer]
    out: Tensor = checkpoint_sequential(both, 2, x, use_reentrant=use_reentrant)
    return out


def inputs() -> tuple[nn.Linear, Tensor]:
    """A layer, and what it is called with."""
    torch.manual_seed(0)
    return nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)


@BOTH
@pytest.mark.parametrize("function", [run, segments])
def test_is_refused_with_its_place(function: Any, use_reentrant: bool) -> None:
    """Both kinds, by whichever of torch's functions; then all is as before."""
    layer, x = inputs()
    with (
        pytest.raises(ModelError, match=f"{WHERE}: recomputation belongs") as raised,
        NoCheckpointing(WHERE),
    ):
        function(use_reentrant, layer, x)
    assert 'recompute="all"' in str(raised.value)
    assert f"at {__file__}" in str(raised.value)
    assert "use_reentrant=use_reentrant" in str(raised.value)

    function(use_reentrant, layer, x).sum().backward()
    assert layer.weight.grad is not None


@BOTH
def test_other_forwards_may(use_reentrant: bool) -> None:
    """Those of other threads, those around it, and any without gradients to come."""
    layer, x = inputs()
    expected = layer(x)
    with ThreadPoolExecutor(1) as pool, NoCheckpointing(WHERE):
        found = pool.submit(run, use_reentrant, layer, x).result()
        with NoCheckpointing(""):
            again = run(use_reentrant, layer, x)
        with pytest.raises(ModelError):
            run(use_reentrant, layer, x)
    for out in (found, again):
        assert torch.equal(out, expected)
        layer.zero_grad()
        out.sum().backward()
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, x.sum(0).expand(4, 4))


def test_what_an_error_ends_is_over() -> None:
    """A forward that fails for another reason leaves nothing forbidden."""
    layer, x = inputs()
    with pytest.raises(ZeroDivisionError), NoCheckpointing(WHERE):
        raise ZeroDivisionError
    run(True, layer, x)


@BOTH
def test_a_captured_graph_would_lose_it(use_reentrant: bool) -> None:
    """It would keep all activations: the warning says so, and what discards them."""
    layer, _ = inputs()

    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return run(use_reentrant, self.layer, x)

    with pytest.raises(
        CaptureError, match=r"it calls torch\.utils\.checkpoint"
    ) as raised:
        capture(Recomputes(), (torch.randn(3, 4),))
    assert 'recompute="all"' in str(raised.value)
    assert "checkpoint(layer, x" in str(raised.value)
    assert len(capture(nn.Sequential(layer, Recomputes()), (torch.randn(3, 4),)).layers)


def test_subclasses_are_themselves() -> None:
    """A user's checkpoint that builds on torch's keeps its own forward."""

    class Tripled(torch.utils.checkpoint.CheckpointFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = torch.utils.checkpoint.CheckpointFunction.forward(ctx, *args)
            return 3 * out

    layer, x = inputs()
    with NoCheckpointing(WHERE):
        pass
    tripled = partial(Tripled.apply, layer, True)
    assert torch.equal(tripled(x), 3 * layer(x))
    with pytest.raises(ModelError), NoCheckpointing(WHERE):
        tripled(x)
