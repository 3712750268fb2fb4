"""Hooks that torch calls for all modules are called for those of a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from hocket.errors import ModelError
from tests.conformance.script import batches, chain, own_form
from tests.run.support.started import started


def _seen(net: nn.Module, *, is_early: bool, **options: Any) -> list[str]:
    """Train for a step; return the classes of modules for which a hook was called."""
    modules, seen = {*net.modules()}, list[str]()

    def note(module: nn.Module, given: Any, out: Any) -> None:
        if module in modules:
            seen.append(type(module).__name__)

    register = partial(register_module_forward_hook, note)
    handle = register() if is_early else None
    batch = batches()[0]
    try:
        with started(
            net,
            nn.functional.mse_loss,
            partial(torch.optim.SGD, lr=0.1),
            batch,
            **options,
        ) as pipeline:
            handle = handle or register()
            seen.clear()
            pipeline.step(batch)
    finally:
        if handle is not None:
            handle.remove()
    return seen


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("has_forward", [False, True])
def test_hooks_are_called_once_for_each_microbatch(
    has_forward: bool, is_early: bool, schedule: str
) -> None:
    """Of each module and of the model itself; they were lost in captured models."""
    net = chain().double()
    net = own_form(net) if has_forward else net
    found = _seen(net, is_early=is_early, schedule=schedule)
    root = type(net).__name__
    assert found == 2 * ["Linear", "Tanh", "Linear", "Tanh", "Linear", root]


@pytest.mark.parametrize("is_early", [False, True])
def test_hooks_are_refused_where_the_model_is_cut_apart(is_early: bool) -> None:
    """No stage calls the model itself."""
    with pytest.raises(ModelError, match="the model's own forward is cut apart"):
        _seen(chain().double(), is_early=is_early, schedule="wpipe", cut=["2"])
