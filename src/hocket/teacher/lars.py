"""LARS: momentum SGD with a learning rate per matrix, relative to its norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

Closure = Callable[[], float]

_MATRIX_DIMS: Final = 2  # fewer dimensions: a bias, or a norm's


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates, for large batches.

        rate = trust * |w| / (|g| + weight_decay * |w|)
        v    = momentum * v + learning_rate * rate * (g + weight_decay * w)
        w    = w - v

    Biases and norms, which have one dimension, take the rate 1 and no weight decay, as
    BYOL and MoCo-v3 train them; matrices of zeros take the rate 1. A pipeline's stage
    has whole parameters, so that their norms do not depend on the cut.

    Args:
        parameters: the parameters, or groups of them.
        lr: the learning rate.
        momentum: the share of the last update that each step keeps.
        weight_decay: the share of the weights that is added to the gradient.
        trust: the largest step, as a share of a matrix's norm.
        decays_vectors: whether biases and norms have weight decay, too.

    Sources: You et al., arXiv:1708.03888, Algorithm 1; Grill et al., arXiv:2006.07733,
    section 3.3, for biases and norms. MoCo-v3's code divides by |g + weight_decay * w|.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        decays_vectors: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "decays_vectors": decays_vectors,
        }
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss again, if given.

        Returns:
            The closure's loss.
        """
        loss = closure_loss(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]
    ) -> None:
        decayed = gradient
        if parameter.dim() >= _MATRIX_DIMS or group["decays_vectors"]:
            decayed = gradient + group["weight_decay"] * parameter
        rate = group["lr"] * _rate(parameter, gradient, group)
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        velocity = state["momentum"]
        velocity.mul_(group["momentum"]).add_(decayed * rate)
        parameter.sub_(velocity)


def closure_loss(closure: Closure | None) -> float | None:
    """Call an optimizer's closure, if given, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _rate(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the share of the learning rate that a parameter takes, as a scalar."""
    one = torch.ones((), dtype=parameter.dtype, device=parameter.device)
    if parameter.dim() < _MATRIX_DIMS:
        return one
    size, slope = parameter.norm(), gradient.norm()
    rate = group["trust"] * size / (slope + group["weight_decay"] * size)
    return torch.where((size > 0) & (slope > 0), rate, one)
