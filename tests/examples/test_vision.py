"""Models for images: published sizes, pretrained weights, every parameter in use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bench.networks.resnext import resnext
from examples.zoo.nasnet import NasNet
from examples.zoo.small_resnet import ResNet
from hocket.errors import DataError, RecipeError

vision: Any = pytest.importorskip("examples.zoo.vision")


def images(num_classes: int = 10, side: int = 32) -> Any:
    """What models ask of their data."""
    return SimpleNamespace(num_classes=num_classes, side=side, num_channels=3)


def count(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def small(num_classes: int = 3, pretrained: Path | None = None) -> nn.Module:
    """As small a ResNeXt as one can be."""
    path = None if pretrained is None else str(pretrained)
    net: nn.Module = vision.resnext(images(num_classes), 14, 2, 4, path)
    return net


@pytest.mark.parametrize(("depth", "width"), [(50, 4), (101, 8), (200, 4)])
def test_resnext_is_what_the_planner_counts(depth: int, width: int) -> None:
    """Weight for weight, so that a plan by name is of the same network."""
    with torch.device("meta"):
        model = vision.resnext(images(102), depth, group_width=width)
    layers = resnext(depth, group_width=width)
    assert count(model) == sum(layer.weights for layer in layers)
    assert len(layers) == sum(vision.resnext_blocks(depth)) + 2


@pytest.mark.parametrize(("depth", "times"), [(200, 4), (302, 6), (500, 10), (800, 16)])
def test_the_deep_ones_are_multiples_of_the_fifty(depth: int, times: int) -> None:
    """As the published scripts make them."""
    assert vision.resnext_blocks(depth) == [times * n for n in (3, 4, 6, 3)]


def test_no_other_size_is_made_up() -> None:
    """Nor another name; those that there are are listed."""
    with pytest.raises(RecipeError, match="no ResNeXt has depth 60: there are 14, 26,"):
        vision.resnext(images(), 60)
    with pytest.raises(RecipeError, match=r"depth 34: there are \[121, 169, 201\]"):
        vision.densenet(images(), 34)
    with pytest.raises(RecipeError, match=r"'resnet100' is unknown: .*resnet101"):
        vision.classifier(images(), "resnet100")
    with pytest.raises(RecipeError, match=r"patch_size 5 does not .* of 32 pixels"):
        vit(patch_size=5)


def test_begins_with_weights_from_a_folder(tmp_path: Path) -> None:
    """With their head where it has as many classes, with a new one otherwise."""
    torch.manual_seed(0)
    saved = small()
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(1)
    same, other = small(3, tmp_path), small(5, tmp_path)
    for name, value in saved.state_dict().items():
        assert torch.equal(same.state_dict()[name], value), name
        if not name.startswith("fc."):
            assert torch.equal(other.state_dict()[name], value), name
    assert other.state_dict()["fc.weight"].shape == (5, 2048)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Missing ones, damaged ones, and those of another width."""
    with pytest.raises(
        DataError, match=r"model\.safetensors cannot be read.*hocket ch"
    ):
        small(3, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        small(3, tmp_path)
    weights = small().state_dict()
    weights["conv1.weight"] = weights["conv1.weight"][:32].clone()
    weights["more"] = torch.zeros(1)
    save_file(weights, path)
    with pytest.raises(DataError, match=r"(?s)do not fit .*\"more\".*conv1\.weight"):
        small(3, tmp_path)


def vit(**sizes: Any) -> nn.Module:
    """timm's, small."""
    made: Any = pytest.importorskip("examples.zoo.vit", reason="extra `recipes`")
    fixed = {"patch_size": 8, "width": 24, "num_blocks": 2, "num_heads": 2}
    net: nn.Module = made.vit(images(), **{**fixed, "mlp_width": 100, **sizes})
    return net


def test_a_vision_transformer_has_the_sizes_that_are_said(tmp_path: Path) -> None:
    """Its weights go into one of other classes, as those of timm do."""
    net: Any = vit()
    assert net.blocks[0].mlp.fc1.weight.shape == (100, 24)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    again = vit(pretrained=str(tmp_path))
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(
        torch.equal(again.state_dict()[k], x) for k, x in net.state_dict().items()
    )
    with torch.device("meta"):
        base = vit(
            patch_size=16, width=768, num_blocks=12, num_heads=12, mlp_width=3072
        )
    blocks = 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert count(base) == blocks + (3 * 16**2 + 1) * 768 + (4 + 2) * 768 + 769 * 10


@pytest.mark.parametrize(("num_blocks", "thousands"), [(3, 270), (9, 850)])
def test_small_resnets_are_the_papers(num_blocks: int, thousands: int) -> None:
    """0.27 and 0.85 million parameters (table 6), and a percent for the projections."""
    num_parameters = count(ResNet(images(), num_blocks=num_blocks))
    assert thousands * 1000 <= num_parameters <= 1.03 * thousands * 1000


def test_nasnet_mobile_is_the_published_one() -> None:
    """As many weights as the authors' own."""
    assert count(NasNet(images(1000))) == 5_289_978


@pytest.mark.parametrize(
    "model",
    [
        lambda: ResNet(images(), 4, 1),
        lambda: small(10),
        lambda: vision.ffnn(images(), 8, 3),
        vit,
    ],
)
def test_every_parameter_takes_part(model: Any) -> None:
    """The output has its shape, and each parameter's gradient is not zero."""
    torch.manual_seed(0)
    net = model()
    output = net(torch.randn(5, 3, 32, 32))
    output.square().sum().backward()
    assert output.shape == (5, 10)
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
