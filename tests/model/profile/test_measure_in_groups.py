"""Where a model does not fit on the device, some layers are measured at a time."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from hocket.model.capture.captured import Captured
from hocket.model.profile.measure import profile
from hocket.model.profile.profile import LayerProfile, Profile
from hocket.model.stages.stage import StageModule
from hocket.run.stage.split.by_layers import ByLayers
from tests.model.support.small_models import captured_case

CPU = torch.device("cpu")


class CountedSplitters:
    """Makes splitters, and keeps the most bytes of weights that a piece had.

    Args:
        most_bytes: a piece with more of them does not fit.
    """

    def __init__(self, most_bytes: int = 2**60) -> None:
        self.largest_bytes = 0
        self._most_bytes = most_bytes

    def __call__(self, module: StageModule) -> ByLayers:
        """Make the splitter of one piece."""
        num_bytes = bytes_of(module)
        if num_bytes > self._most_bytes:
            raise torch.OutOfMemoryError
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        return ByLayers(module)


def bytes_of(module: torch.nn.Module) -> int:
    """The bytes of its weights and buffers."""
    return sum(x.nbytes for x in module.state_dict().values())


def measured(
    name: str, splitters: CountedSplitters, most_bytes: int | None = None
) -> tuple[Captured, Profile]:
    """The profile of one of the small models."""
    case, captured = captured_case(name)
    leaves = pytree.tree_leaves((case.args, case.kwargs))
    return captured, profile(
        captured,
        leaves,
        device=CPU,
        make_splitter=splitters,
        most_bytes=most_bytes,
    )


def assert_same_bytes(parts: Profile, whole: Profile) -> None:
    """All that is no time; where a group ends, the gradient sent back is there before.

    So it may not count as what a backward allocates.
    """
    sent = [layer.received_grad_bytes for layer in whole.layers[1:]] + [0]
    for own, other, grad_bytes in zip(parts.layers, whole.layers, sent, strict=True):
        assert kept(own) == kept(other)
        for name in [x.name for x in fields(own) if x.name.endswith("_work_bytes")]:
            off_bytes = getattr(own, name) - getattr(other, name)
            assert abs(off_bytes) <= grad_bytes, (own.name, name)


def kept(layer: LayerProfile) -> dict[str, Any]:
    """The bytes that stay, and the name."""
    others = ("_s", "_spread", "_work_bytes")
    [own] = Profile((layer,), {}).to_json()["layers"]
    return {name: own[name] for name in own if not name.endswith(others)}


@pytest.mark.parametrize("name", ["resnet", "unet", "gpt2-sdpa"])
def test_bytes_are_those_of_the_whole_model(name: str) -> None:
    """Whatever crosses between the groups; and every layer has its times."""
    _, whole = measured(name, CountedSplitters())
    largest = CountedSplitters()
    captured, parts = measured(name, largest, most_bytes=1)

    assert largest.largest_bytes < bytes_of(captured.model)
    assert_same_bytes(parts, whole)
    assert all(layer.forward_s > 0 for layer in parts.layers)


def test_layers_that_do_not_fit_together_are_measured_apart() -> None:
    """Although their weights would: half as many are tried, until they fit."""
    _, whole = measured("dense", CountedSplitters())
    alone = CountedSplitters()
    measured("dense", alone, most_bytes=1)
    _, parts = measured("dense", CountedSplitters(alone.largest_bytes))

    assert_same_bytes(parts, whole)


def test_a_layer_that_does_not_fit_by_itself_is_an_error() -> None:
    """There is no smaller part of a model."""
    with pytest.raises(torch.OutOfMemoryError):
        measured("mlp", CountedSplitters(0))
