"""Runs forwards that record their graph, but save nothing for a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def discard_saved_tensors(*, keeps: bool = False) -> Iterator[None]:
    """Discard what autograd would save; there can be no backward then.

    Unlike in `torch.no_grad`, every operator runs as if there were one: some choose
    another kernel where no gradients are wanted, whose last bits differ.

    Args:
        keeps: whether nothing is discarded, as where there is a backward, or the
            forward runs one of its own.
    """
    if keeps:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        yield


def refuse(_nothing: None) -> Tensor:
    """Refuse a backward through a graph that saves nothing."""
    raise AssertionError("a backward through a forward of which nothing was kept")
