"""What modules keep: buffers, extra state, parametrizations, tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.conformance.script import Script, batches, case, chain, refused


class Follows(nn.Module):
    """Changes a buffer in its forward: a moving mean of its inputs."""

    mean: Tensor

    def __init__(self, *, persistent: bool = True, replaces: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=persistent)
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            moved = torch.lerp(self.mean, x.detach().mean(0), 0.5)
            if self.replaces:
                self.mean = moved
            else:
                self.mean.copy_(moved)
        return x - self.mean


def _with(module: nn.Module, cut: str = "2") -> Script:
    net = chain(nn.Linear(6, 8), module, nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), cut=cut)


@case("a buffer changed in forward", {"freeze": refused("is no place to cut at")})
def buffer_in_forward() -> Script:
    """In place."""
    return _with(Follows(), cut="1")


@case("a buffer replaced in forward", {"freeze": refused("is no place to cut at")})
def buffer_replaced_in_forward() -> Script:
    """By an assignment."""
    return _with(Follows(replaces=True), cut="1")


@case(
    "a buffer that is not saved, changed in forward",
    {"freeze": refused("is no place to cut at")},
)
def unsaved_in_forward() -> Script:
    """`persistent=False`."""
    return _with(Follows(persistent=False), cut="1")


class Lazy(nn.Module):
    """Makes a buffer at its first forward."""

    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(8.0, dtype=x.dtype) / 8)
        return x * self.table


@case("a buffer made at the first forward")
def lazy_buffer() -> Script:
    """As tables of positions are."""
    return _with(Lazy())


class FirstMean(nn.Module):
    """Subtracts the mean of its first batch for ever."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        return x - self.mean


@case(
    "a buffer made of the first batch",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "makes the buffer 1.mean from its batch"
        )
    },
)
def first_mean() -> Script:
    """The example need not be the first microbatch."""
    return _with(FirstMean())


class Cached(nn.Module):
    """Keeps what it has computed, by the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if size not in self.tables:
            self.tables[size] = torch.arange(size, dtype=x.dtype) / size
        return x * self.tables[size]


@case("a dict of tables, filled at the first forward")
def cached_tables() -> Script:
    """An attribute, no buffer."""
    return _with(Cached())


class Remembers(nn.Module):
    """Adds its last output, without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.last is not None:
            x = x + 0.5 * self.last
        self.last = x.detach().mean(0)
        return x


@case(
    "a tensor kept from one forward to the next",
    {"wpipe 2bw": refused("1.last")},
)
def kept_tensor() -> Script:
    """Detached, as recurrent nets do with truncated backpropagation."""

    def before_step(step: int, net: Any) -> None:
        if step == 0:
            net[1].last = None

    script = _with(Remembers())
    script.before_step = before_step
    return script


class KeepsGraph(nn.Module):
    """Keeps its last output with its graph, and reads it in the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept, self.last = self.last, x
        return x if kept is None else x + 0.0 * kept.detach().mean(0)


@case(
    "an activation kept on the module, with its graph",
    {
        "own-2 wpipe": refused("as it is: each forward changes 1.last"),
        "freeze": refused("is no place to cut at"),
    },
)
def kept_activation() -> Script:
    """Read without its graph."""
    return _with(KeepsGraph())


class Extra(nn.Module):
    """Saves a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def forward(self, x: Tensor) -> Tensor:
        return x * self.count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@case("`get_extra_state`")
def extra_state() -> Script:
    """A dict, beside the tensors of `state_dict()`."""
    return _with(Extra())


class Typed(nn.Module):
    """Multiplies by a buffer of some type."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(x.dtype)
        return x * (scale[0] if scale.dim() > 1 else scale) / 8


@case("a buffer of int16")
def int16_buffer() -> Script:
    """Which gloo does not carry."""
    return _with(Typed(torch.arange(8, dtype=torch.int16)))


@case("a buffer of uint16")
def uint16_buffer() -> Script:
    """Which gloo does not carry."""
    return _with(Typed(torch.arange(8).to(torch.uint16)))


class Float8(nn.Module):
    """Keeps a buffer of float8, whatever type the model is moved to."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = torch.ones(8).to(torch.float8_e4m3fn)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype)


@case("a buffer of float8")
def float8_buffer() -> Script:
    """Which gloo does not carry."""
    return _with(Float8())


@case("an expanded buffer")
def expanded_buffer() -> Script:
    """Several places of it are one memory."""
    return _with(Typed(torch.arange(8.0, dtype=torch.float64).expand(4, 8)))


@case("a buffer that is a view of another tensor")
def view_buffer() -> Script:
    """Every second place of it."""
    return _with(Typed(torch.arange(16.0, dtype=torch.float64)[::2]))


@case("a buffer of complex numbers")
def complex_buffer() -> Script:
    """Its real part is read."""

    class Phases(nn.Module):
        phase: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("phase", torch.full((8,), 1 + 1j))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.phase).real

    net = chain(nn.Linear(6, 8), Phases(), nn.Linear(8, 8), nn.Tanh())
    script = Script(net, batches())
    net[1].phase = torch.full((8,), 1 + 1j, dtype=torch.complex128)
    return script


@case("spectral norm: buffers that change in each forward")
def spectral_norm() -> Script:
    """A parametrization."""
    net = chain()
    torch.manual_seed(0)
    parametrizations.spectral_norm(net[2])
    return Script(net, batches())


@case(
    "the old `nn.utils.spectral_norm`, by a hook",
)
def old_spectral_norm() -> Script:
    """A forward pre-hook sets the weight."""
    net = chain()
    torch.manual_seed(0)
    nn.utils.spectral_norm(net[2])
    return Script(net, batches())


@case("weight norm")
def weight_norm() -> Script:
    """A parametrization of two tensors."""
    net = chain()
    parametrizations.weight_norm(net[2])
    return Script(net, batches())


@case("an orthogonal weight")
def orthogonal() -> Script:
    """A parametrization with a buffer."""
    net = chain()
    torch.manual_seed(0)
    parametrizations.orthogonal(net[2])
    return Script(net, batches())


class Symmetric(nn.Module):
    """Of a matrix, its symmetric part times a number."""

    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x + x.T) * self.gain / 2


@case("a parametrization whose number the loop changes")
def changing_parametrization() -> Script:
    """An attribute of the parametrization."""

    def before_step(step: int, net: Any) -> None:
        net[2].parametrizations.weight[0].gain = 1 + step / 2

    net = chain()
    parametrize.register_parametrization(net[2], "weight", Symmetric())
    return Script(net, batches(), before_step=before_step)


@case(
    "a pruned layer",
)
def pruned() -> Script:
    """A mask in a buffer, and a forward pre-hook."""
    net = chain()
    torch.manual_seed(0)
    prune.l1_unstructured(net[2], "weight", amount=0.5)
    return Script(net, batches())


@case(
    "a layer pruned under way",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "2.weight was Parameter and is not set"
        )
    },
)
def pruned_under_way() -> Script:
    """The parameter gets another name; it stays the optimizer's."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            prune.l1_unstructured(net[2], "weight", amount=0.5)

    return Script(chain(), batches(), before_step=before_step)


@case("a state dict hook that adds a number")
def state_dict_hook() -> Script:
    """`register_state_dict_post_hook` of a layer."""

    def add(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "version"] = torch.tensor(2)

    net = chain()
    net[2].register_state_dict_post_hook(add)
    return Script(net, batches())


@case(
    "tied weights across the cut", {"freeze": refused("1.weight is used by 1 and by 3")}
)
def tied() -> Script:
    """The first and the third layer are one weight."""
    net = chain(nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[3].weight = net[1].weight
    return Script(net, batches(), cut="2")


class LazyInEvaluation(nn.Module):
    """Makes a buffer at its first forward in evaluation mode."""

    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(8.0, dtype=x.dtype) / 8)
        return x * self.table


@case(
    "a buffer made in evaluation alone",
    {"own-2 freeze wpipe": refused("is no place to cut at")},
)
def lazy_in_evaluation() -> Script:
    """Training knows nothing of it."""
    return _with(LazyInEvaluation())


class Keeps(nn.Module):
    """Adds the mean of an input that it had two microbatches before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        if len(self.seen) > 1 and self.training:
            y = y + self.seen[-2].mean()
        if self.training:
            self.seen = [*self.seen, x.detach()[:]]
        return y


@case("a module that keeps the inputs of earlier microbatches")
def keeps_earlier_inputs() -> Script:
    """On several workers they came in messages, whose memory is used again."""
    return _with(Keeps(), cut="1")
