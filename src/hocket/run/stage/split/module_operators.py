"""torch's modules that are one operator on their weight: no need to watch them.

What such a module calls is known, so it need not be watched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Operator: TypeAlias = Callable[..., Tensor]
# Reads from a module what its operator takes besides input, weight and bias.
More: TypeAlias = Callable[[nn.Module], tuple[Any, ...]]

_CONVOLUTIONS: Final[Mapping[Any, Operator]] = {
    nn.Conv1d: torch.conv1d,
    nn.Conv2d: torch.conv2d,
    nn.Conv3d: torch.conv3d,
}


_SHAPE: Final[More] = attrgetter("stride", "padding", "dilation", "groups")


def operator_of(module: nn.Module) -> tuple[Operator, More] | None:
    """Return a module's operator and the reader of its options; None if unknown.

    Args:
        module: any module. One with its own forward, or changed otherwise, is unknown.
    """
    if "forward" in vars(module):
        return None
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return F.linear, _nothing
    for kind, operator in _CONVOLUTIONS.items():
        if isinstance(module, kind) and forward is kind.forward:
            return _convolution(module, kind, operator)
    return None


def _convolution(
    module: Any, kind: Any, operator: Operator
) -> tuple[Operator, More] | None:
    """Return a convolution's operator; only for zero padding."""
    is_own = type(module)._conv_forward is not kind._conv_forward
    return None if is_own or module.padding_mode != "zeros" else (operator, _SHAPE)


def _nothing(_: nn.Module) -> tuple[Any, ...]:
    return ()


def has_own_kernel(module: nn.Module) -> bool:
    """Return whether its weights are read by a fused kernel only."""
    if not isinstance(module, nn.RNNBase):
        return False
    own = {id(p) for p in module.parameters(recurse=False)}
    return own == {id(p) for layer in module.all_weights for p in layer}
