"""A model whose layers sleep where others compute: an emulated device takes no core.

    x ─┬──────────────────▶ sleep ──▶ y = x        F
       └──▶ linear(x, w) ──▶ │
                             │ ◀── dy              I sleeps, and hands dy on
          hook of w ◀── dw ◀─┘                     W sleeps whenever dw is computed

To the runtime it is a model like any other: captured, cut, profiled, split into I and W
(the linear layer's weight gradient waits), its messages sent. Only the time that ops
take is given, and on two cores eight devices keep it.

What happened is noted here, inside of the ops, and not by the runtime. So that each
note has its microbatch, the batch carries the numbers: sample 0 of microbatch m is full
of m, and dy is such that `dw[0, 0]` is that m again.

Old weights are other leaves than the module's parameters, and know nothing of a hook:
a layer of a stage that reads them has none. It sleeps in I, for a whole B.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.core.op import Kind, Op
from tests.run.device.support.emulated import sleep_until

# What this process's layers have done, the stage of each op being the layer's number.
# Ops are functions of the process, and so is what they note.
DONE: Final[list[Op]] = []

_SCHEMA: Final = (
    "(Tensor x, Tensor product, int layer, float forward_s, float input_grad_s)"
    " -> Tensor"
)


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """How long the ops of one layer sleep, per microbatch.

    Args:
        forward_s: F.
        input_grad_s: I.
        weight_grad_s: W; where it is 0, there is no hook, and W is not noted.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float


class SleepingLayer(nn.Module):
    """Hands its input on after a while: x_TC -> x_TC (samples, channels).

    Args:
        number: in the model.
        seconds: of its ops.
        num_channels: with the samples, they make the bytes of a message.
    """

    def __init__(self, number: int, seconds: LayerSeconds, num_channels: int) -> None:
        super().__init__()
        self.number = number
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(num_channels, num_channels))
        if seconds.weight_grad_s > 0:
            self.weight.register_hook(self._weight_grad)

    def forward(self, x: Tensor) -> Tensor:
        """F and I are in one operator, which a capture takes as it is."""
        seconds = self.seconds
        y: Tensor = _sleeping(
            x,
            F.linear(x, self.weight),
            self.number,
            seconds.forward_s,
            seconds.input_grad_s,
        )
        return y

    def _weight_grad(self, dw: Tensor) -> None:
        """Called with the gradient of one microbatch: in B, or in W."""
        begin_s = time.perf_counter()
        _note(Kind.BACKWARD_WEIGHT, self.number, dw)
        sleep_until(begin_s + self.seconds.weight_grad_s)


class SleepingModel(nn.Module):
    """Layers that follow each other: `layers.0`, `layers.1`, ...

    Args:
        seconds: of each layer.
        num_channels: of what they hand on.
    """

    def __init__(self, seconds: Sequence[LayerSeconds], num_channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SleepingLayer(number, own, num_channels)
            for number, own in enumerate(seconds)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def numbered_batch(
    num_microbatches: int, num_samples: int, num_channels: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return inputs with their microbatch's number, and targets of zeros.

    Args:
        num_microbatches: of the batch.
        num_samples: in each.
        num_channels: of a sample.
        first: the number of the first microbatch.
    """
    numbers = torch.arange(float(first), float(first + num_microbatches))
    numbers = numbers.repeat_interleave(num_samples)
    x = numbers[:, None].expand(-1, num_channels).clone()
    return x, torch.zeros_like(x)


def mean_difference(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that takes no time."""
    return (output - targets).mean()


def as_done(ops: Iterable[Op], layers_per_stage: int) -> Iterator[Op]:
    """What a lane's layers do, in the order of its ops: a B is an I and a W of each.

    Args:
        ops: of a lane.
        layers_per_stage: of the model's cut.
    """
    for op in ops:
        first = op.stage * layers_per_stage
        layers = range(first, first + layers_per_stage)
        match op.kind:
            case Kind.FORWARD:
                kinds: tuple[Kind, ...] = (Kind.FORWARD,)
            case Kind.BACKWARD:
                kinds, layers = _HALVES, layers[::-1]
            case Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT:
                kinds, layers = (op.kind,), layers[::-1]
            case _:
                kinds = ()
        for layer in layers:
            yield from (Op(kind, layer, op.microbatch) for kind in kinds)


_HALVES: Final = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@torch.library.custom_op("hocket_bench::sleeping", mutates_args=(), schema=_SCHEMA)
def _sleeping(
    x: Tensor, product: Tensor, layer: int, forward_s: float, input_grad_s: float
) -> Tensor:
    begin_s = time.perf_counter()
    _note(Kind.FORWARD, layer, x)
    y = x.clone()
    sleep_until(begin_s + forward_s)
    return y


@_sleeping.register_fake
def _shape(
    x: Tensor, product: Tensor, layer: int, forward_s: float, input_grad_s: float
) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.layer, _, ctx.input_grad_s = inputs
    ctx.save_for_backward(x)


def _input_grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    begin_s = time.perf_counter()
    (x,) = ctx.saved_tensors
    _note(Kind.BACKWARD_INPUT, ctx.layer, x)
    d_product = torch.zeros_like(x)
    d_product[0, 0] = 1.0  # so that dw[0] is sample 0
    sleep_until(begin_s + ctx.input_grad_s)
    return dy, d_product, None, None, None


_sleeping.register_autograd(_input_grad, setup_context=_keep)


def _note(kind: Kind, layer: int, numbered: Tensor) -> None:
    DONE.append(Op(kind, layer, int(numbered[0, 0].item())))
