"""Submodules in lists and tables, which the loop exchanges, adds, removes, reorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.script import OWN, Script, batches, case, chain, refused

# A list or a table is called by the model itself, which is cut apart in these ways.
FREEZE = {"freeze": refused("the model's own forward is cut apart")}
SHARPNESS = 1.0
OTHER_CALLS = FREEZE


class OfList(nn.Module):
    """Its forward calls what is in a list, then what is in a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 3)})
        self.acts = nn.ModuleList([nn.Tanh(), nn.Softplus()])
        self.table = nn.ModuleDict({"a": nn.SiLU(), "b": nn.ReLU()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear["a"](x)
        for act in self.acts:
            x = act(x)
        for act in self.table.values():
            x = act(x + 0.1)
        return self.linear["b"](x)


class Encoder(nn.Module):
    """Has no forward: others call its method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.act: nn.Module = nn.Tanh()
        self.rate = 0.5
        self.register_buffer("shift", torch.full((8,), 0.3))

    def encode(self, x: Tensor) -> Tensor:
        """What a forward would be."""
        x = self.act(self.linear(x)) * (self.rate * SHARPNESS)
        shift: Tensor | float = getattr(self, "shift", 0.0)
        return x + shift


class Encoded(nn.Module):
    """Calls another method of a submodule than its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder.encode(x))


class Indexed(nn.Module):
    """Calls what is in a Sequential one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return self.head(x)


def changed(net: nn.Module, change: Callable[[Any], object]) -> Script:
    """A script that changes a model once, keeping what was there."""
    kept: list[object] = []

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            kept.append(change(net))

    is_table = isinstance(net, OfList)
    return Script(
        net,
        batches(),
        before_step=before_step,
        cut="linear.b" if is_table else "" if type(net) is nn.Sequential else "head",
        layers="linear.*" if is_table else "*",
        frozen=("linear.a",) if is_table else (),
    )


@case("a module of a list replaced", FREEZE)
def item_replaced() -> Script:
    """A list has no forward: the module around it calls what is in it."""

    def change(net: Any) -> None:
        net.acts[0] = nn.Sigmoid()

    return changed(OfList(), change)


@case("a module added to a list", OTHER_CALLS)
def item_added() -> Script:
    """Without weights; `added_layer` has some."""
    return changed(OfList(), lambda net: net.acts.append(nn.Sigmoid()))


@case("the last module of a list removed, and kept by the script", OTHER_CALLS)
def item_removed() -> Script:
    """No hook of torch's is called, and the module lives on."""
    return changed(OfList(), lambda net: net.acts.pop(-1))


@case("a module of a table removed, and kept by the script", OTHER_CALLS)
def entry_removed() -> Script:
    """As `item_removed`."""
    return changed(OfList(), lambda net: net.table.pop("a"))


@case("a table of modules in another order", OTHER_CALLS)
def entries_reordered() -> Script:
    """The same modules by the same names, called in another order."""

    def change(net: Any) -> None:
        net.table["a"] = net.table.pop("a")

    return changed(OfList(), change)


@case("two modules of a list change places", FREEZE)
def items_swapped() -> Script:
    """Both are there as before, each by the other's name."""

    def change(net: Any) -> None:
        net.acts[0], net.acts[1] = net.acts[1], net.acts[0]

    return changed(OfList(), change)


@case("a module of a Sequential that is called one by one, replaced", FREEZE)
def indexed_replaced() -> Script:
    """The forward of that Sequential is not called."""

    def change(net: Any) -> None:
        net.layers[1] = nn.ReLU()

    return changed(Indexed(), change)


@case("a module of a Sequential removed, and kept by the script")
def child_removed() -> Script:
    """Those behind it get other names; none has weights."""
    net = chain(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.SiLU(), nn.Sigmoid()))
    return changed(net, lambda net: net[1].pop(0))


@case("a module inserted into a Sequential")
def child_inserted() -> Script:
    """As `child_removed`."""
    net = chain(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.SiLU()))
    return changed(net, lambda net: net[1].insert(1, nn.Sigmoid()))


@case("a number that a method reads which is not a forward", FREEZE)
def number_of_method() -> Script:
    """The module that has it is never called."""

    def change(net: Any) -> None:
        net.encoder.rate = 0.9

    return changed(Encoded(), change)


@case("a number of the script that a method reads which is not a forward", FREEZE)
def global_of_method() -> Script:
    """As `number_of_method`."""

    def before_step(step: int, net: Any) -> None:
        global SHARPNESS
        SHARPNESS = 1.0 if step < 2 else 0.4

    found = changed(Encoded(), lambda net: None)
    found.before_step = before_step
    return found


@case("a module that a method calls which is not a forward, replaced", FREEZE)
def module_of_method() -> Script:
    """As `number_of_method`."""

    def change(net: Any) -> None:
        net.encoder.act = nn.ReLU()

    return changed(Encoded(), change)


@case(
    "a buffer removed, where the forward asks whether it is there",
    {OWN: refused("encoder.shift was Tensor and is not set")},
)
def buffer_removed() -> Script:
    """No hook of torch's is called."""

    def change(net: Any) -> None:
        del net.encoder.shift

    return changed(Encoded(), change)
