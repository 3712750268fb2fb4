"""Autograd's engine gives the same gradients by either way of calling it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hocket.run.stage import backward as engine
from hocket.run.stage.backward import run_backward


@pytest.mark.parametrize("edges", [False, True])
def test_without_its_private_entry(
    monkeypatch: pytest.MonkeyPatch, edges: bool
) -> None:
    """From tensors and from edges of the graph; gradients that are there are kept."""
    direct = gradients(edges=edges)
    assert engine._engine is not None
    monkeypatch.setattr(engine, "_engine", None)
    public = gradients(edges=edges)

    assert all(torch.equal(a, b) for a, b in zip(direct, public, strict=True))
    assert direct[0].abs().sum() > 0


def gradients(*, edges: bool) -> list[Tensor]:
    """Of two leaves, by two backwards from two outputs."""
    torch.manual_seed(1)
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    for _ in range(2):
        first = leaves[0] * leaves[1]
        outputs = [first.tanh(), first.sum(0)]
        grads = [torch.randn_like(x) for x in outputs]
        if edges:
            run_backward([get_gradient_edge(x) for x in outputs], grads)
        else:
            run_backward(outputs, grads)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
