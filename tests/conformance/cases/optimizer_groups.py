"""Which parameters an optimizer has: all, some, those of the script; and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.script import (
    PIPELINES,
    Script,
    batches,
    case,
    chain,
    refused,
    sgd,
)


def _of_layers(net: Any, *places: int) -> Script:
    """Only some layers have an optimizer; the others want gradients, too."""
    net.double()  # before the script does: parameters stay the same objects
    chosen = {id(p) for place in places for p in net[place].parameters()}

    def optimizer(given: Any) -> torch.optim.Optimizer:
        return sgd([p for p in given if id(p) in chosen])

    return Script(net, batches(), optimizer=optimizer)


@case("an optimizer of the last layer alone")
def optimizer_of_head() -> Script:
    """The others want gradients, and are not trained."""
    return _of_layers(chain(), 4)


@case("an optimizer of the first layer alone")
def optimizer_of_first() -> Script:
    """The others want gradients, and are not trained."""
    return _of_layers(chain(), 0)


@case("an optimizer of all matrices that have six columns, or none")
def optimizer_by_shape() -> Script:
    """One stage has none of them."""

    def optimizer(given: Any) -> torch.optim.Optimizer:
        return sgd([p for p in given if p.shape[-1] == 6])

    return Script(chain(), batches(), optimizer=optimizer)


@case("an optimizer of all but the last two parameters")
def optimizer_of_slice() -> Script:
    """By their place in the list."""
    return Script(chain(), batches(), optimizer=lambda p: sgd(list(p)[:-2]))


@case("an optimizer of two groups, the second of which has the last layer alone")
def optimizer_of_two_groups() -> Script:
    """By their place in the list, with a rate for each."""

    def optimizer(given: Any) -> torch.optim.Optimizer:
        every: list[Any] = list(given)
        groups: list[dict[str, Any]] = [
            {"params": every[:2], "lr": 0.05},
            {"params": every[-2:], "lr": 0.2},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    return Script(chain(), batches(), optimizer=optimizer)


@case("an optimizer of all but the last layer, that makes its states at once")
def eager_states() -> Script:
    """Adagrad."""

    def optimizer(given: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(list(given)[:-2], lr=0.1)

    return Script(chain(), batches(), optimizer=optimizer)


_ADDED = "the optimizer has got parameters since its last step (shapes (8, 8), (8,))"


@case(
    "`add_param_group` of a layer that had no optimizer",
    {
        "own-1 own-2 seq-1 seq-2 compile teacher wpipe 2bw": refused(_ADDED),
        "freeze": refused("the optimizer had 2.weight before the cut"),
    },
)
def group_added() -> Script:
    """The plain loop's zero_grad() has kept its gradients of the steps before."""
    net, made = chain(), list[torch.optim.Optimizer]()
    net.double()
    added = [*net[2].parameters()]
    chosen = {id(p) for place in (0, 4) for p in net[place].parameters()}

    def optimizer(given: Any) -> torch.optim.Optimizer:
        every = [*given]
        made.append(sgd([p for p in every if id(p) in chosen]))
        return made[-1]

    def before_step(step: int, _: Any) -> None:
        if step == 2:
            for each in made:
                each.add_param_group({"params": added, "lr": 0.1})

    return Script(net, batches(), optimizer=optimizer, before_step=before_step)


_NO_GRADIENT = "SGD.step() finds no gradient: "


@case(
    "another optimizer of the loop's own, over a layer that `optimizer=` leaves out",
    {f"{PIPELINES} compile": refused(_NO_GRADIENT)},
)
def another_optimizer() -> Script:
    """It steps behind each step."""
    net = chain()
    script = _of_layers(net, 0, 2)
    another = sgd(net[4].parameters())
    return replace(script, after_step=lambda *_: another.step())


@case(
    "the same optimizer, which trains another model of the loop's, too",
    {f"{PIPELINES} compile": refused(_NO_GRADIENT)},
)
def another_optimizer_of_both() -> Script:
    """Its other gradients are there."""
    net, other = chain(), nn.Linear(2, 1).double()
    script = _of_layers(net, 0, 2)
    another = sgd([*net[4].parameters(), *other.parameters()])

    def after_step(step: int, net: Any) -> None:
        other.zero_grad()
        other.weight.square().mean().backward()
        another.step()

    return replace(script, after_step=after_step)


@case("another optimizer of the loop's own, of which the loop freezes all")
def another_optimizer_frozen() -> Script:
    """It finds no gradient in the plain loop either."""
    net = chain()
    script = _of_layers(net, 0, 2)
    another = sgd(net[4].requires_grad_(requires_grad=False).parameters())
    return replace(script, after_step=lambda *_: another.step())


@case("another optimizer of the loop's own, behind a backward of the loop's own")
def another_optimizer_with_backward() -> Script:
    """Of a penalty on the weights of one layer."""
    net = chain()
    script = _of_layers(net, 0, 2)
    last = net[4]
    another = sgd(last.parameters())

    def after_step(step: int, net: Any) -> None:
        another.zero_grad()
        last.weight.square().mean().backward()
        another.step()

    return replace(script, after_step=after_step)


@case("a group whose rate is 0 until its layer trains")
def group_with_rate() -> Script:
    """The way to add a layer under way."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(given: Any) -> torch.optim.Optimizer:
        every = list(given)
        groups: list[dict[str, Any]] = [
            {"params": every[2:]},
            {"params": every[:2], "lr": 0.0},
        ]
        made.append(torch.optim.SGD(groups, lr=0.1))
        return made[-1]

    def before_step(step: int, net: Any) -> None:
        for each in made:
            each.param_groups[1]["lr"] = 0.1 if step >= 2 else 0.0

    return Script(chain(), batches(), optimizer=optimizer, before_step=before_step)


@case("a group taken out of the optimizer under way")
def group_removed() -> Script:
    """Its parameters stay as they are."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(given: Any) -> torch.optim.Optimizer:
        every = list(given)
        groups = [{"params": every[2:]}, {"params": every[:2]}]
        made.append(torch.optim.SGD(groups, lr=0.1))
        return made[-1]

    def before_step(step: int, net: Any) -> None:
        for each in made if step == 2 else ():
            del each.param_groups[1]

    return Script(chain(), batches(), optimizer=optimizer, before_step=before_step)


@case("an optimizer of `net.parameters()` in place of those it is given")
def optimizer_of_net() -> Script:
    """Ignores its argument."""
    net = chain().double()
    return Script(net, batches(), optimizer=lambda _: sgd(net.parameters()))


@case(
    "an optimizer that has a tensor of the script, too, which a layer reads",
    {PIPELINES: refused("takes 1 tensors that are no parameters")},
)
def optimizer_of_outside() -> Script:
    """A scale outside of all modules."""
    scale = torch.ones(8, dtype=torch.float64, requires_grad=True)

    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    seen: dict[str, list[Any]] = {"scale": []}

    def after_step(step: int, net: Any) -> None:
        seen["scale"].append(round(float(scale.detach().sum()), 9))

    return Script(
        chain(nn.Linear(6, 8), Scales(), nn.Linear(8, 8), nn.Tanh()),
        batches(),
        optimizer=lambda p: sgd([*p, scale]),
        after_step=after_step,
        seen=seen,
        teacher_alike=False,
    )
