"""Weights and buffers that the loop itself changes between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.conformance.script import (
    Script,
    batches,
    case,
    chain,
    in_float32,
    refused,
    unsuited,
)


@case("weights clamped in place after each step")
def clamped() -> Script:
    """As the critic of a WGAN."""

    def after_step(step: int, net: Any) -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.2, 0.2)

    return Script(chain(), batches(), after_step=after_step)


@case("weights changed by `model.apply` under way")
def applied() -> Script:
    """Layers begin anew."""

    def restart(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net.apply(restart)

    return Script(chain(), batches(), before_step=before_step)


@case("weights loaded into the user's model under way")
def loaded() -> Script:
    """`load_state_dict` between two steps, as going back to the best weights does."""
    kept: dict[str, Tensor] = {}

    def before_step(step: int, net: Any) -> None:
        if step == 0:
            kept.update({name: x.clone() for name, x in net.state_dict().items()})
        if step == 2:
            net.load_state_dict(kept)

    return Script(chain(), batches(), before_step=before_step)


@case("`p.data` given another tensor")
def data_replaced() -> Script:
    """The parameter stays the same object."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].weight.data = net[2].weight.data * 0.5

    return Script(chain(), batches(), before_step=before_step)


@case(
    "a parameter replaced by a new one",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "2.weight was Parameter and is Parameter"
        )
    },
)
def parameter_replaced() -> Script:
    """The optimizer of the plain loop goes on with the old one."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].weight = nn.Parameter(torch.full((8, 8), 0.1, dtype=torch.float64))

    return Script(chain(), batches(), before_step=before_step)


class Buffered(nn.Module):
    """Multiplies by a buffer."""

    scale: Tensor

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@case("a buffer changed in place by the loop")
def buffer_in_place() -> Script:
    """A mask, or a step's number for the forward."""

    def before_step(step: int, net: Any) -> None:
        net[1].scale.fill_(1 + step / 2)

    net = chain(nn.Linear(6, 8), Buffered(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("a buffer replaced by the loop")
def buffer_replaced() -> Script:
    """`net.scale = tensor`."""

    def before_step(step: int, net: Any) -> None:
        net[1].scale = torch.full((8,), 1 + step / 2, dtype=torch.float64)

    net = chain(nn.Linear(6, 8), Buffered(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("a buffer that is not saved, changed by the loop")
def unsaved_buffer() -> Script:
    """`persistent=False`."""

    def before_step(step: int, net: Any) -> None:
        net[1].scale.fill_(1 + step / 2)

    net = chain(nn.Linear(6, 8), Buffered(persistent=False), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("statistics of a BatchNorm reset under way")
def statistics_reset() -> Script:
    """`reset_running_stats()`."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1].reset_running_stats()

    net = chain(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    return Script(net, batches(), before_step=before_step)


@case(
    "`model.to(float32)` under way, with batches alike",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused("torch.float64"),
        "compile": in_float32("the rate is a tensor: lr * grad is rounded first"),
    },
)
def to_float32() -> Script:
    """Training goes on in another type."""
    data: list[Any] = batches()
    data[2:] = [(x.float(), y.float()) for x, y in data[2:]]

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net.to(torch.float32)

    return Script(chain(), data, before_step=before_step, evaluates=False)


class OfItsType(nn.Module):
    """Computes in the type of its weights, and returns float64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.inner.weight.dtype)).double()


def _moved(move: Callable[[Any], object]) -> Script:
    def before_step(step: int, net: Any) -> None:
        if step == 2:
            move(net)

    net = chain(OfItsType(6), nn.Tanh(), OfItsType(8), nn.Tanh(), OfItsType(8))
    net = nn.Sequential(*net[:5])
    data = batches(out=8)
    return Script(net, data, before_step=before_step, evaluates=False)


_MOVED: Final = "was torch.float64 and is torch."


@case(
    "`.to(float32)` of a layer under way, that computes in the type of its weights",
    {
        "own-2 seq-2 freeze wpipe 2bw": refused(_MOVED),
        "compile": unsuited("float32 is rounded in another order"),
    },
)
def layer_to_float32() -> Script:
    """The others stay in float64."""
    return _moved(lambda net: net[2].to(torch.float32))


@case(
    "`.half()` of such a layer under way",
    {
        "own-2 seq-2 freeze wpipe 2bw": refused(_MOVED),
        "compile": unsuited("half precision is rounded in another order"),
    },
)
def layer_to_half() -> Script:
    """As nets are prepared for another device."""
    return _moved(lambda net: net[2].half())


@case("`.double()` of such a model under way, which has that type")
def model_to_double() -> Script:
    """Nothing changes."""
    return _moved(lambda net: net.double())


@case(
    "a bias set to None under way",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "2.bias was Parameter and is NoneType"
        )
    },
)
def bias_to_none() -> Script:
    """No hook of torch's tells of that."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].bias = None

    return Script(chain(), batches(), before_step=before_step)


@case("`model.to(...)` that changes nothing")
def to_the_same() -> Script:
    """The device and the type that it has."""

    def before_step(step: int, net: Any) -> None:
        net.to("cpu", torch.float64)

    return Script(chain(), batches(), before_step=before_step)


@case(
    "an average of the weights, kept by the loop",
    {"own-2 seq-2": unsuited("a worker has trained its own stages only")},
)
def averaged_by_hand() -> Script:
    """`AveragedModel` of torch, updated after each step."""
    seen: dict[str, list[Any]] = {"sums": []}
    net = chain().double()
    average = AveragedModel(net)

    def after_step(step: int, net: Any) -> None:
        average.update_parameters(net)
        sums = [float(p.detach().sum()) for p in average.parameters()]
        seen["sums"].append(round(sum(sums), 9))

    return Script(net, batches(), after_step=after_step, seen=seen)
