"""Models of unusual forms: what a forward may do, and kinds of modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.script import (
    ALL,
    Script,
    batches,
    case,
    chain,
    in_float32,
    mse,
    refused,
)


class Skips(nn.Module):
    """The last layer reads the outputs of two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        return self.c(first + second)


@case("a skip connection across the cut")
def skip() -> Script:
    """Two tensors of one message."""
    return Script(Skips(), batches(), cut="c")


class Energy(nn.Module):
    """Returns an energy and its gradient by the input, as nets for molecules do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.b(torch.tanh(self.a(x)))
            [forces] = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, forces


def _forces(output: Any, targets: Tensor) -> Tensor:
    return output[0].square().mean() + (output[1][:, :3] - targets).square().mean()


@case(
    "forces by `autograd.grad` in the root's forward",
    {
        "own-1 own-2 teacher freeze wpipe 2bw": refused(
            "its forward runs a backward of its own"
        )
    },
)
def forces_in_root() -> Script:
    """With `create_graph=True`."""
    return Script(Energy(), batches(), loss=_forces, cut="b")


@case("forces by `autograd.grad` in the forward of a layer")
def forces_in_layer() -> Script:
    """The energy is the last of several layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Energy())
    return Script(net, batches(), loss=_forces, cut="1")


@case(
    "lazy layers",
    {ALL: refused("0.weight has no shape yet")},
)
def lazy_layers() -> Script:
    """Their weights are made at the first forward."""
    torch.manual_seed(0)
    return Script(
        nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)), batches()
    )


@case(
    "a scripted model",
    {
        "own-1 own-2 compile teacher freeze wpipe 2bw": refused(
            "model is a scripted module"
        )
    },
)
def scripted() -> Script:
    """`torch.jit.script`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        net = torch.jit.script(chain())
    return Script(net, batches(), cut="2")


class Reads(nn.Module):
    """Two layers of an LSTM, and a head for the last word."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _texts() -> list[Any]:
    rng = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 5, 4, generator=rng, dtype=torch.float64), y)
        for _, y in batches()
    ]


@case("an LSTM of two layers")
def lstm() -> Script:
    """Without dropout."""
    return Script(Reads(0.0), _texts(), cut="head")


@case("an LSTM with dropout of rate 1 between its layers")
def lstm_dropout() -> Script:
    """Nothing reaches the second layer, whatever is drawn."""
    return Script(Reads(1.0), _texts(), cut="head")


@case("a transformer's encoder layer")
def encoder_layer() -> Script:
    """Without dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(4, 8), layer, nn.Flatten(), nn.Linear(40, 3))
    return Script(net, _texts(), cut="2")


class Chooses(nn.Module):
    """Goes another way where its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().mean()) > 0.45:
            return self.large(x)
        return self.small(x)


@case("a layer whose way depends on its input")
def data_dependent() -> Script:
    """Some microbatches give one of two layers no gradient."""
    return Script(chain(nn.Linear(6, 8), nn.Tanh(), Chooses(), nn.Tanh()), batches())


class Recomputes(nn.Module):
    """Checkpoints a layer by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: torch.tanh(self.inner(x)), x, use_reentrant=False)


@case(
    "`torch.utils.checkpoint` in a layer",
    {
        "wpipe 2bw": refused("1.inner runs again"),
    },
)
def checkpointed() -> Script:
    """Its forward runs again in the backward."""
    return Script(chain(nn.Linear(6, 8), Recomputes(), nn.Linear(8, 8)), batches())


class Straight(torch.autograd.Function):
    """Rounds; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounds(nn.Module):
    """Calls an autograd function of one's own."""

    def forward(self, x: Tensor) -> Any:
        return Straight.apply(x)  # type: ignore[no-untyped-call]


@case("an `autograd.Function` of one's own")
def own_function() -> Script:
    """A straight-through estimator."""
    return Script(chain(nn.Linear(6, 8), Rounds(), nn.Linear(8, 8)), batches())


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.shared, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(self.a(x)))
        return self.b(torch.tanh(self.shared(x)))


@case("a layer that the forward calls twice")
def called_twice() -> Script:
    """Its gradients add up."""
    return Script(Twice(), batches(), cut="b")


@case("operations in place", {"freeze": refused("is no place to cut at")})
def in_place() -> Script:
    """Activations that overwrite their input."""
    layers = (nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    return Script(chain(*layers, nn.ELU(inplace=True)), batches())


class Detaches(nn.Module):
    """A part without gradient beside one with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(x)) + fixed)


@case("`torch.no_grad` in forward: parameters that get no gradient")
def no_grad_part() -> Script:
    """One layer never trains."""
    return Script(Detaches(), batches(), cut="c", frozen=("a",))


class Half(nn.Module):
    """Computes a layer in bfloat16, by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.relu(self.inner(x.float())).to(torch.float64)


@case(
    "`torch.autocast` in a layer",
    {"compile": in_float32("the rate is a tensor: lr * grad is rounded first")},
)
def autocast() -> Script:
    """In bfloat16, and back."""

    class Single(Half):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self.inner.float()
            return self

    return Script(chain(nn.Linear(6, 8), Single(), nn.Linear(8, 8)), batches())


class Complex(nn.Module):
    """Hands on complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Real(nn.Module):
    """Their sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


@case("complex numbers across the cut")
def complex_across() -> Script:
    """A Fourier transform before it."""
    net = chain(nn.Linear(6, 8), Complex(), Real(), nn.Tanh())
    return Script(net, batches(), cut="2")


@case("a layer with `.compile()` of torch, eager backend")
def compiled_layer() -> Script:
    """Its call is torch's compiled one."""
    net = chain()
    net[1].compile(backend="eager")
    return Script(net, batches())


class Several(nn.Module):
    """A dict of layers, of which an argument names one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](torch.tanh(self.first(x)))


@case(
    "a head that an argument of the batch names",
    {"freeze": refused("is no place to cut at")},
)
def named_head() -> Script:
    """Tasks in turn; the other head gets no gradient."""
    data = [((x, "ab"[i % 2]), y) for i, (x, y) in enumerate(batches())]
    return Script(Several(), data, cut="heads.a", loss=mse)


class Transposed(nn.Module):
    """Computes with the weight of another layer, which is no child of it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.others[0].weight.t())


@case(
    "a layer that reads a weight of another one, behind the cut",
    {"freeze": refused("is used by")},
)
def hidden_reference() -> Script:
    """It has a reference to it in a list, so that it is registered once."""
    net = chain()
    net.insert(4, Transposed(net[2]))
    return Script(net, batches(), cut="4")


@case(
    "a layer wrapped by `torch.compile`, eager backend",
    {"freeze": refused("is no place to cut at")},
)
def wrapped_layer() -> Script:
    """Another module around it, with its own name."""
    inner: Any = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager")
    return Script(chain(nn.Linear(6, 8), inner, nn.Linear(8, 8), nn.Tanh()), batches())
