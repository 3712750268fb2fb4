"""ResNeXt counted by hand, against its paper and torchvision's numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.networks.resnext import resnext

# torchvision's: millions of weights, and 10^9 multiplications of one image.
KNOWN = {(50, 4): (25.029, 4.23), (101, 8): (88.791, 16.41)}


@pytest.mark.parametrize(("depth", "width"), list(KNOWN))
def test_weights_and_flops_are_the_known_ones(depth: int, width: int) -> None:
    """To the last digit that is shown."""
    layers = resnext(depth, group_width=width, num_classes=1000)
    millions, billions = KNOWN[depth, width]
    flops = sum(layer.ops().forward.total_flops(1) for layer in layers)

    assert sum(x.weights for x in layers) / 1e6 == pytest.approx(millions, abs=1e-3)
    assert flops / 2e9 == pytest.approx(billions, abs=0.02)


def test_a_layer_receives_what_the_one_before_makes() -> None:
    """From 224 x 224 pixels in 3 channels to 7 x 7 in 2048."""
    layers = resnext(50)
    received = [layer.received_floats for layer in layers]

    assert received[:2] == [3 * 224**2, 64 * 56**2]
    assert received[-1] == 2048 * 7**2
    assert {b / a for a, b in pairwise(received[2:])} == {1.0, 0.5}
