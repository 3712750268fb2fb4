"""A model's gradients from one whole backward, and from I and W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.model.stages.splitter import Remainder, Splitter
from hocket.model.stages.stage import StageModule
from hocket.run.stage.split.by_layers import ByLayers
from tests.run.support.split_by_graph import ByGraph

Gradients: TypeAlias = dict[str, Tensor | None]
How: TypeAlias = Literal["export", "sequential"]
Make: TypeAlias = Callable[[], nn.Module]

SPLITTERS: dict[str, Callable[[StageModule], Splitter]] = {
    "layers": ByLayers,
    "graph": ByGraph,
}


def stage_of(model: nn.Module, inputs: Sequence[Tensor], how: How) -> StageModule:
    """The whole model as one stage, as emitted code or as modules run as they are."""
    if how == "sequential":
        model = nn.Sequential(model)
    (stage,) = cut(capture(model.train(), tuple(inputs), capture=how), ())
    return stage


def whole(
    model: nn.Module, inputs: Sequence[Tensor], how: How, autocast: Any = None
) -> Gradients:
    """By one backward of the stage as it is."""
    stage = stage_of(model, inputs, how)
    leaves = leaves_of(inputs)
    with autocast or nullcontext():
        out = stage(*leaves)
    out.backward(grad_of(out))
    return found(stage, leaves)


def halves(
    model: nn.Module,
    inputs: Sequence[Tensor],
    how: How,
    autocast: Any = None,
    by: str = "layers",
    between: Callable[[StageModule, Remainder], object] = lambda stage, left: None,
) -> Gradients:
    """By I, which makes the inputs' gradients, and W.

    Args:
        model: of one tensor's output.
        inputs: those of floating-point numbers want a gradient, if they say so.
        how: the model is captured.
        autocast: to run the forward in.
        by: the name of the splitter.
        between: called between the two, with the stage and what is left.
    """
    stage = stage_of(model, inputs, how)
    splitter = SPLITTERS[by](stage)
    leaves = leaves_of(inputs)
    with autocast or nullcontext(), splitter.on():
        out = splitter.module(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    edge, grad = get_gradient_edge(out), grad_of(out)
    del out
    grads, left = splitter.input_gradients([edge], [grad], wanted)
    del edge, grad
    between(stage, left)
    left.finish()
    for leaf, value in zip(wanted, grads, strict=True):
        leaf.grad = value
    return found(stage, leaves)


def leaves_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """New leaves of the same values."""
    return [x.detach().requires_grad_(x.requires_grad) for x in inputs]


def grad_of(out: Tensor) -> Tensor:
    """An output's gradient, with a different number at each place."""
    rng = torch.Generator().manual_seed(4)
    drawn = torch.randn(out.shape, generator=rng, dtype=torch.float64)
    return drawn.to(out.dtype)


def found(stage: StageModule, leaves: Sequence[Tensor]) -> Gradients:
    """The gradients of parameters by name, and of inputs by number."""
    grads = {name: p.grad for name, p in stage.named_parameters()}
    return {**grads, **{f"input {i}": x.grad for i, x in enumerate(leaves)}}


def assert_same(actual: Gradients, expected: Gradients, tolerance: float = 0.0) -> None:
    """Equal to the last bit, or up to a part of the largest entry."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        other = actual[name]
        assert (other is None) == (value is None), name
        if value is None or other is None:
            continue
        assert other.dtype is value.dtype, name
        assert other.layout is value.layout, name
        a, b = other.to_dense(), value.to_dense()
        if tolerance:
            off = (a - b).abs().max() / b.abs().max().clamp_min(1e-12)
            assert off <= tolerance, f"{name} is off by {off:.1e}"
        else:
            assert torch.equal(a, b), name
