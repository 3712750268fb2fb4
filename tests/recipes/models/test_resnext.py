"""ResNeXt by depth: torchvision's, with weights that come from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from bench.networks.resnext import resnext
from hocket.errors import DataError
from hocket.recipes.config.model_settings import ResnextSettings
from hocket.recipes.config.resnext_depths import resnext_blocks
from hocket.recipes.models.make import make_torchvision_net

pytest.importorskip("torchvision", reason="extra `vision`")


def small(num_classes: int = 3, pretrained: Path | None = None) -> nn.Module:
    """As small as one can be."""
    settings = ResnextSettings(
        kind="resnext",
        depth=14,
        num_groups=2,
        group_width=4,
        pretrained=None if pretrained is None else str(pretrained),
    )
    return make_torchvision_net(settings, num_classes)


def count(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def test_scores_images_of_any_size() -> None:
    """One score per class."""
    model = small()
    for side in (32, 64):
        assert model(torch.randn(2, 3, side, side)).shape == (2, 3)


@pytest.mark.parametrize(("depth", "width"), [(50, 4), (101, 8), (200, 4)])
def test_is_what_the_planner_counts(depth: int, width: int) -> None:
    """Weight for weight, so that a plan by name is of the same network."""
    with torch.device("meta"):
        settings = ResnextSettings(kind="resnext", depth=depth, group_width=width)
        model = make_torchvision_net(settings, 102)
    layers = resnext(depth, group_width=width)
    assert count(model) == sum(layer.weights for layer in layers)
    assert len(layers) == sum(resnext_blocks(depth)) + 2


def test_unknown_depths_are_refused() -> None:
    """With those that there are."""
    with pytest.raises(ValidationError, match="there are 14, 26, 50, 101, 152, and"):
        ResnextSettings(kind="resnext", depth=34)


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
    with pytest.raises(DataError, match=r"has no model\.safetensors: download"):
        small(3, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="cannot be read"):
        small(3, tmp_path)
    weights = small().state_dict()
    weights["conv1.weight"] = weights["conv1.weight"][:32].clone()
    weights["more"] = torch.zeros(1)
    save_file(weights, path)
    with pytest.raises(DataError, match=r"no 'more' in the model; conv1\.weight is"):
        small(3, tmp_path)
