"""Makes torchvision's ResNeXt of any depth; weights are compatible with torchvision's.

Batch normalization takes its means over a microbatch, not over the whole batch.

Source: Xie et al., arXiv:1611.05431; the depths beyond 152 are WPipe's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hocket.errors import DataError, MissingPackageError
from hocket.recipes.config.model_settings import ResnextSettings
from hocket.recipes.config.resnext_depths import resnext_blocks

_FILE: Final = "model.safetensors"
_HEAD: Final = "fc."
_COUNTS: Final = "num_batches_tracked"  # not used by batch norms with a momentum


def make_resnext(settings: ResnextSettings, num_classes: int) -> nn.Module:
    """Make a model from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: its depth and widths.
        num_classes: K.

    Raises:
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: torchvision is not installed.
    """
    try:
        from torchvision.models.resnet import Bottleneck, ResNet
    except ImportError as error:
        raise MissingPackageError(
            "ResNeXt comes with torchvision, which is not installed or does not load "
            f"({error}): pip install 'hocket[vision]'"
        ) from error
    model: nn.Module = ResNet(
        Bottleneck,
        list(resnext_blocks(settings.depth)),
        num_classes=num_classes,
        groups=settings.num_groups,
        width_per_group=settings.group_width,
    )
    if settings.pretrained is not None:
        _load_pretrained(model, Path(settings.pretrained))
    return model


def _load_pretrained(model: nn.Module, folder: Path) -> None:
    """Load weights from a folder; never from a pickle, nor from the network.

    Raises:
        DataError: there are no weights, or their sizes differ.
    """
    if not (folder / _FILE).is_file():
        raise DataError(
            f"model.pretrained: {folder} has no {_FILE}: download that file of a "
            "ResNeXt under torchvision's names "
            "(https://huggingface.co/timm/resnext50_32x4d.tv_in1k) there"
        )
    try:
        weights = load_file(folder / _FILE)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"model.pretrained: {folder / _FILE} cannot be read: {error}"
        ) from error
    own = model.state_dict()
    faults = _faults(own, weights)
    if faults:
        raise DataError(
            f"model.pretrained: the weights in {folder} do not fit a ResNeXt of the "
            f"recipe's sizes: {'; '.join(faults[:3])}"
        )
    is_head_alike = all(
        name in weights and weights[name].shape == value.shape
        for name, value in own.items()
        if name.startswith(_HEAD)
    )
    kept = {
        name: value
        for name, value in weights.items()
        if is_head_alike or not name.startswith(_HEAD)
    }
    model.load_state_dict(kept, strict=False)


def _faults(own: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
    """Describe mismatches, but for the head, which is new for other classes."""
    faults = [f"no {name!r} in the model" for name in sorted({*weights} - {*own})]
    for name, value in own.items():
        if name.startswith(_HEAD) or name.endswith(_COUNTS):
            continue
        if name not in weights:
            faults.append(f"no {name!r} in the file")
        elif weights[name].shape != value.shape:
            shapes = tuple(weights[name].shape), tuple(value.shape)
            faults.append(f"{name} is {shapes[0]}, not {shapes[1]}")
    return faults
