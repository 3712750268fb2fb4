"""Models for images, by torchvision.

    [model]
    kind = "function"
    function = "examples.zoo.vision:resnext"
    depth = 50

Each takes its number of classes from the data.
Batch normalization takes its means over a microbatch, not over the whole batch.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torchvision import models
from torchvision.ops import MLP

from examples.zoo.pretrained import begin_with
from examples.zoo.resnext_depths import resnext_blocks
from hocket.errors import RecipeError
from hocket.nearest import nearest

_DENSENET: Final = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


def resnext(
    data: Any,
    depth: int = 50,
    num_groups: int = 32,
    group_width: int = 4,
    pretrained: str | None = None,
) -> nn.Module:
    """torchvision's ResNeXt; one group of 64 channels makes it the ResNet.

    Args:
        data: has `num_classes`.
        depth: layers with weights; beyond 152 with a multiple of ResNeXt-50's blocks,
            as WPipe's ResNeXt-200, 302, 500 and 800 were made.
        num_groups: groups of the convolution in the middle of each block.
        group_width: channels of each group; 32 groups of 4 are "32x4d".
        pretrained: a folder with torchvision's weights to begin with.

    Raises:
        DataError: the weights are missing, or another model's.
        RecipeError: there is none of this depth.

    Source: Xie et al., arXiv:1611.05431; Yang et al., ICLR'22.
    """
    net = models.ResNet(
        models.resnet.Bottleneck,
        resnext_blocks(depth),
        num_classes=data.num_classes,
        groups=num_groups,
        width_per_group=group_width,
    )
    return net if pretrained is None else begin_with(net, pretrained, "fc.")


def densenet(data: Any, depth: int = 121, growth_rate: int = 32) -> nn.Module:
    """torchvision's DenseNet, whose stem has twice the growth's channels.

    Args:
        data: has `num_classes`.
        depth: 121, 169 or 201.
        growth_rate: channels that each layer adds.

    Raises:
        RecipeError: there is none of this depth.

    Source: Huang et al., arXiv:1608.06993.
    """
    if depth not in _DENSENET:
        raise RecipeError(f"model.depth {depth}: there are {[*_DENSENET]}")
    return models.DenseNet(
        growth_rate=growth_rate,
        block_config=_DENSENET[depth],
        num_init_features=2 * growth_rate,
        num_classes=data.num_classes,
    )


def mobilenet_v3(data: Any, width_multiplier: float = 1.0) -> nn.Module:
    """torchvision's MobileNetV3-Large (Howard et al., arXiv:1905.02244)."""
    return models.mobilenet_v3_large(
        num_classes=data.num_classes, width_mult=width_multiplier
    )


def classifier(data: Any, name: str) -> nn.Module:
    """Any of torchvision's classifiers, with random weights.

    Args:
        data: has `num_classes`.
        name: as `torchvision.models.list_models` has it: resnet101, mobilenet_v2, ...

    Raises:
        RecipeError: there is no such name.
    """
    names = models.list_models(module=models)
    if name not in names:
        near = nearest(name, names)
        raise RecipeError(f"model.name {name!r} is unknown: {near}")
    net: nn.Module = models.get_model(name, num_classes=data.num_classes)
    return net


def ffnn(data: Any, width: int = 4096, num_layers: int = 16) -> nn.Module:
    """Wide layers with a ReLU behind each, as out-of-order backprop's FFNN-16."""
    num_inputs = data.num_channels * data.side**2
    return nn.Sequential(
        nn.Flatten(),
        MLP(num_inputs, [*[width] * num_layers, data.num_classes], inplace=False),
    )
