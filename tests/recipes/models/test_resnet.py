"""The residual network: the paper's sizes, and no parameter left out."""

from __future__ import annotations

import pytest
import torch

from hocket.recipes.models.resnet import ResNet


def make_resnet(num_blocks: int = 3, width: int = 16) -> ResNet:
    """For CIFAR-10."""
    torch.manual_seed(0)
    return ResNet(num_channels=3, num_classes=10, width=width, num_blocks=num_blocks)


@pytest.mark.parametrize(("num_blocks", "thousands"), [(3, 270), (9, 850)])
def test_resnets_are_the_papers(num_blocks: int, thousands: int) -> None:
    """0.27 and 0.85 million parameters (table 6), and a percent for the projections."""
    count = sum(p.numel() for p in make_resnet(num_blocks).parameters())
    assert thousands * 1000 <= count <= 1.03 * thousands * 1000


def test_every_parameter_of_a_resnet_takes_part() -> None:
    """Its output has its shape, and each parameter's gradient is not zero."""
    model = make_resnet(1, width=4)
    output = model(torch.randn(5, 3, 32, 32))
    output.square().sum().backward()
    assert output.shape == (5, 10)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
