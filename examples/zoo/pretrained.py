"""Begins a model with weights from a folder; never from a pickle, nor the network."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hocket.errors import DataError


def begin_with(net: nn.Module, folder: str, head: str) -> nn.Module:
    """Load a folder's model.safetensors; the head's only if it has as many classes.

    Args:
        net: all of its other weights must be there.
        folder: as `hocket checkpoint export` or the hub of Hugging Face has one.
        head: how the names of the head's weights begin.

    Raises:
        DataError: the weights are missing, or another model's.
    """
    path = Path(folder, "model.safetensors")
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"model.pretrained: {path} cannot be read as safetensors ({error}): "
            "`hocket checkpoint export` writes one, and https://huggingface.co/timm "
            "has them"
        ) from error
    own = net.state_dict()
    is_other = any(
        name not in weights or weights[name].shape != own[name].shape
        for name in own
        if name.startswith(head)
    )
    for name in own if is_other else ():
        if name.startswith(head):
            weights[name] = own[name]
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(
            f"model.pretrained: the weights in {folder} do not fit the recipe's sizes: "
            f"{error}"
        ) from error
    return net
