"""What the forward finds outside of the module, and modules that are exchanged."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import types
import weakref
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.script import (
    PIPELINES,
    Script,
    batches,
    case,
    chain,
    refused,
)

SCALE = 1.0
NAMED: Final[dict[str, Any]] = {"act": torch.tanh}


class ReadsGlobal(nn.Module):
    """Its forward reads a number of this file, and a function in a dict."""

    def forward(self, x: Tensor) -> Tensor:
        return NAMED["act"](x) * SCALE


@case("a number of the script that the forward reads")
def global_number() -> Script:
    """`global SCALE; SCALE = ...` in the loop."""

    def before_step(step: int, net: Any) -> None:
        global SCALE
        SCALE = 1 + step / 2

    def after_step(step: int, net: Any) -> None:
        global SCALE
        SCALE = 1.0

    net = chain(nn.Linear(6, 8), ReadsGlobal(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step, after_step=after_step)


@case("a function in a table of the script, exchanged")
def global_function() -> Script:
    """Tanh, then a rectifier."""

    def before_step(step: int, net: Any) -> None:
        NAMED["act"] = torch.tanh if step < 2 else torch.relu

    def after_step(step: int, net: Any) -> None:
        NAMED["act"] = torch.tanh

    net = chain(nn.Linear(6, 8), ReadsGlobal(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step, after_step=after_step)


@case("a number in a closure of the forward")
def closure_number() -> Script:
    """A function made in the script is what a module calls."""
    scale = 1.0

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    def before_step(step: int, net: Any) -> None:
        nonlocal scale
        scale = 1 + step / 2

    net = chain(nn.Linear(6, 8), Closed(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case("an attribute of the module's class")
def class_attribute() -> Script:
    """Shared by all objects of it."""

    class Classed(nn.Module):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    def before_step(step: int, net: Any) -> None:
        Classed.gain = 1 + step / 2

    net = chain(nn.Linear(6, 8), Classed(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step)


@case(
    "an activation replaced by another",
    {"freeze": refused("the model's own forward is cut apart")},
)
def replaced_activation() -> Script:
    """`net[1] = nn.ReLU()` in the loop."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1] = nn.ReLU()

    return Script(chain(), batches(), before_step=before_step)


@case(
    "a layer with weights replaced by a new one",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "2 was Linear and is another Linear"
        )
    },
)
def replaced_layer() -> Script:
    """The optimizer of the plain loop does not have the new weights."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            torch.manual_seed(9)
            net[2] = nn.Linear(8, 8).double()

    return Script(chain(), batches(), before_step=before_step)


@case(
    "the forward of a layer replaced",
    {"freeze": refused("the model's own forward is cut apart")},
)
def replaced_forward() -> Script:
    """As monkey patches do."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1].forward = types.MethodType(lambda self, x: torch.relu(x), net[1])

    return Script(chain(), batches(), before_step=before_step)


class Passing(nn.Module):
    """Calls layers of a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@case(
    "a layer added to a list under way",
    {
        "own-1 own-2 teacher freeze wpipe 2bw": refused(
            "layers.2 was not set and is Linear"
        )
    },
)
def added_layer() -> Script:
    """As progressively grown nets have it; it is not in the optimizer."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            torch.manual_seed(9)
            net.layers.append(nn.Linear(8, 8).double())

    return Script(
        Passing(),
        batches(),
        before_step=before_step,
        cut="head",
        layers="layers.*",
        frozen=("layers.0",),
    )


@case("a forward that notes numbers in a list")
def notes_in_forward() -> Script:
    """As debugging prints do."""
    seen: dict[str, list[Any]] = {"means": []}

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                seen["means"].append(round(float(x.detach().mean()), 9))
            return x

    net = chain(nn.Linear(6, 8), Notes(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), seen=seen)


class Single(nn.Module):
    """A layer of float32, whatever type the model is moved to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inner.float()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x.float())).to(torch.float64)


@case("`torch.autocast` around some steps of the loop")
def autocast_around() -> Script:
    """One layer is in float32, and in bfloat16 for two steps."""
    contexts: list[Any] = []

    def before_step(step: int, net: Any) -> None:
        contexts.append(torch.autocast("cpu", torch.bfloat16, enabled=step >= 2))
        contexts[-1].__enter__()

    def after_step(step: int, net: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    return Script(
        chain(nn.Linear(6, 8), Single(), nn.Linear(8, 8)),
        batches(),
        before_step=before_step,
        after_step=after_step,
        teacher_alike=False,
    )


class ReadsEnvironment(nn.Module):
    """Its forward reads a variable of the process."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(os.environ.get("CASE_SCALE", "1"))


@case("a variable of the environment")
def environment() -> Script:
    """`os.environ[...] = ...` in the loop."""

    def before_step(step: int, net: Any) -> None:
        os.environ["CASE_SCALE"] = str(1 + step / 2)

    def after_step(step: int, net: Any) -> None:
        os.environ.pop("CASE_SCALE", None)

    net = chain(nn.Linear(6, 8), ReadsEnvironment(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), before_step=before_step, after_step=after_step)


@case("the forward of a class of torch's, replaced for two steps")
def patched_class() -> Script:
    """As libraries patch `nn.Linear`."""
    own: Any = nn.Linear.forward

    def halved(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias) / 2

    def before_step(step: int, net: Any) -> None:
        vars_of: Any = nn.Linear
        vars_of.forward = halved if step in (1, 2) else own

    return Script(chain(), batches(), before_step=before_step)


class Sine(nn.Tanh):
    """Another function of the same form."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


@case("the class of a layer exchanged")
def other_class() -> Script:
    """`net[1].__class__ = ...` in the loop."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1].__class__ = Sine

    return Script(chain(), batches(), before_step=before_step)


class ReadsFile(nn.Module):
    """Its forward opens a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def forward(self, x: Tensor) -> Tensor:
        with open(self.path, encoding="utf-8") as file:
            return x * float(file.read())


@case("a number in a file that the forward opens")
def number_in_file() -> Script:
    """Another one for each step."""
    folder = tempfile.mkdtemp()
    path = Path(folder) / "number.txt"

    def before_step(step: int, net: Any) -> None:
        path.write_text(str(1 + step / 2), encoding="utf-8")

    path.write_text("1", encoding="utf-8")
    net = chain(nn.Linear(6, 8), ReadsFile(path), nn.Linear(8, 8), nn.Tanh())
    weakref.finalize(net[1], shutil.rmtree, folder, ignore_errors=True)
    return Script(net, batches(), before_step=before_step)


class GoesOn(nn.Module):
    """Its forward takes the next number of an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([1.0, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


@case("an iterator that the forward goes on with", {PIPELINES: refused("an iterator")})
def iterator() -> Script:
    """Each call takes a number, also one to measure with."""
    net = chain(nn.Linear(6, 8), GoesOn(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), evaluates=False)
