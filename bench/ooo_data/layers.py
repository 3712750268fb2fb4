"""ResNet-50's layers, which sleep where others compute, so that two cores are idle.

    x ─┬──────────────────▶ sleep ──▶ y = x        F
       └──▶ linear(x, w) ──▶ │
                             │ ◀── dy              I sleeps, and hands dy on
          hook of w ◀── dw ◀─┘                     W sleeps whenever dw is computed

Seconds are in the proportions of the FLOPs, bytes of weights in those of the weights.
To the runtime and to torch it is a model like any other (as in bench/emulated).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.networks.single_convolutions import resnet_convolutions
from tests.run.device.support.emulated import sleep_until

NUM_CHANNELS: Final = 64
_BYTES: Final = 4
_SCHEMA: Final = "(Tensor x, Tensor product, float forward_s, float input_grad_s)"


class SleepingLayer(nn.Module):
    """Hands its input on after a while: x_TC -> x_TC (samples, channels).

    Args:
        seconds: of each of F, I and W.
        is_first: whether no layer wants the gradient of its input.
        num_bytes: of its weights, about.
    """

    def __init__(self, seconds: float, num_bytes: float, *, is_first: bool) -> None:
        super().__init__()
        self.forward_s, self.input_grad_s = seconds, 0.0 if is_first else seconds
        self.weight_grad_s = seconds
        num_rows = max(1, round(num_bytes / (_BYTES * NUM_CHANNELS)))
        self.weight = nn.Parameter(torch.zeros(num_rows, NUM_CHANNELS))
        self.weight.register_hook(self._weight_grad)

    def forward(self, x: Tensor) -> Tensor:
        """F and I are in one operator, which a capture takes as it is."""
        product = F.linear(x, self.weight)
        y: Tensor = _sleeping(x, product, self.forward_s, self.input_grad_s)
        return y

    def _weight_grad(self, _dw: Tensor) -> None:
        """Called with each gradient: in B, or in W."""
        sleep_until(time.perf_counter() + self.weight_grad_s)


def sleeping_resnet(compute_s: float, num_bytes: float) -> nn.Sequential:
    """ResNet-50, layer by layer.

    Args:
        compute_s: of forward and backward together.
        num_bytes: of all weights.
    """
    layers = resnet_convolutions(50)
    products = [layer.products[0] for layer in layers]
    flops = [x.rows * x.inner * x.columns for x in products]
    weights = [layer.weights for layer in layers]
    return nn.Sequential(
        *_layers(
            [compute_s / 3 * x / sum(flops) for x in flops],
            [num_bytes * x / sum(weights) for x in weights],
        )
    )


def _layers(seconds: Sequence[float], sizes: Sequence[float]) -> list[SleepingLayer]:
    return [
        SleepingLayer(own_s, num_bytes, is_first=not number)
        for number, (own_s, num_bytes) in enumerate(zip(seconds, sizes, strict=True))
    ]


@torch.library.custom_op(
    "hocket_bench::sleeping_on", mutates_args=(), schema=f"{_SCHEMA} -> Tensor"
)
def _sleeping(
    x: Tensor, product: Tensor, forward_s: float, input_grad_s: float
) -> Tensor:
    end_s = time.perf_counter() + forward_s
    y = x.clone()
    sleep_until(end_s)
    return y


@_sleeping.register_fake
def _shape(x: Tensor, product: Tensor, forward_s: float, input_grad_s: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, product, _, ctx.input_grad_s = inputs
    ctx.shape = product.shape


def _input_grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    end_s = time.perf_counter() + ctx.input_grad_s
    d_product = dy.new_zeros(ctx.shape)
    sleep_until(end_s)
    return dy, d_product, None, None


_sleeping.register_autograd(_input_grad, setup_context=_keep)
