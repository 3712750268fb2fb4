"""Hooks of every kind: those that look, those that change, added and removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from tests.conformance.script import Script, batches, case, chain, refused


class ScalesGradient(nn.Module):
    """Its forward puts a hook on an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: 0.1 * g)
        return self.b(h)


@case(
    "`tensor.register_hook` in a root's forward",
    {"own-2 freeze wpipe": refused("its forward calls register_hook at ")},
)
def activation_hook() -> Script:
    """The gradient of an activation is scaled."""
    return Script(ScalesGradient(), batches(), cut="b")


class Reverses(nn.Module):
    """A gradient reversal by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda g: -0.5 * g)
        return x


@case("`tensor.register_hook` in a layer's forward")
def activation_hook_in_layer() -> Script:
    """A gradient reversal, as domain adaptation has it."""
    return Script(chain(nn.Linear(6, 8), Reverses(), nn.Tanh()), batches())


class Retains(nn.Module):
    """Keeps an activation, and asks for its gradient."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        if x.requires_grad:
            x.retain_grad()
        self.kept = x
        return x


@case("`retain_grad` in forward, read after the step")
def retains_grad() -> Script:
    """The gradient of the last microbatch's activation."""
    seen: dict[str, list[Any]] = {"norms": []}

    def after_step(step: int, net: Any) -> None:
        kept = getattr(net[1], "kept", None)
        if kept is not None and kept.grad is not None:
            seen["norms"].append(round(float(kept.grad.norm()), 9))

    net = chain(nn.Linear(6, 8), Retains(), nn.Linear(8, 8), nn.Tanh())
    return Script(net, batches(), after_step=after_step, seen=seen, evaluates=False)


def _noting(seen: dict[str, list[Any]], name: str) -> Any:
    """A hook of modules that notes the sums of what comes out."""

    def hook(module: nn.Module, given: Any, out: Tensor) -> None:
        if module.training:
            seen[name].append(round(float(out.detach().sum()), 9))

    return hook


@case("a forward hook that logs")
def logging_hook() -> Script:
    """Called once for each microbatch, and with its numbers."""
    seen: dict[str, list[Any]] = {"first": [], "last": []}
    net = chain()
    net[0].register_forward_hook(_noting(seen, "first"))
    net[4].register_forward_hook(_noting(seen, "last"))
    return Script(net, batches(), seen=seen)


@case("forward hooks that log, and a slope that the loop changes")
def logging_hooks_and_change() -> Script:
    """What is tried out because of a change is not logged."""
    seen: dict[str, list[Any]] = {"first": [], "last": []}

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[1].negative_slope = net[3].negative_slope = 0.4

    net = chain(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 8), nn.LeakyReLU())
    net[0].register_forward_hook(_noting(seen, "first"))
    net[4].register_forward_hook(_noting(seen, "last"))
    return Script(net, batches(), before_step=before_step, seen=seen, evaluates=False)


@case(
    "a forward hook that logs, on the model itself",
    {
        "own-2 seq-2 freeze wpipe": refused("it calls _noting.<locals>.hook"),
    },
)
def logging_hook_on_root() -> Script:
    """On the root; a worker has only parts of it."""
    seen: dict[str, list[Any]] = {"root": []}
    net = chain()
    net.register_forward_hook(_noting(seen, "root"))
    return Script(net, batches(), seen=seen)


@case("a forward hook that logs, added under way")
def late_logging_hook() -> Script:
    """To look at a layer that misbehaves."""
    seen: dict[str, list[Any]] = {"late": []}

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].register_forward_hook(_noting(seen, "late"))

    return Script(chain(), batches(), before_step=before_step, seen=seen)


@case("a forward hook that changes the output")
def changing_hook() -> Script:
    """There before the pipeline is made."""
    net = chain()
    net[1].register_forward_hook(lambda module, given, out: 2 * out)
    return Script(net, batches())


@case("a forward hook that changes the output, added and removed under way")
def hook_comes_and_goes() -> Script:
    """In the second and third step only."""
    handles: list[Any] = []

    def before_step(step: int, net: Any) -> None:
        if step == 1:
            hook = net[1].register_forward_hook(lambda module, given, out: 2 * out)
            handles.append(hook)
        if step == 3:
            handles.pop().remove()

    return Script(chain(), batches(), before_step=before_step)


@case("a forward pre-hook that changes the input, removed under way")
def pre_hook() -> Script:
    """There before the pipeline is made, gone for the last steps."""
    net = chain()
    handle = net[2].register_forward_pre_hook(lambda module, given: (3 * given[0],))

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            handle.remove()

    return Script(net, batches(), before_step=before_step)


def _halved(module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
    return tuple(None if g is None else 0.5 * g for g in grads_in)


@case("a full backward hook that changes gradients")
def backward_hook() -> Script:
    """There before the pipeline is made."""
    net = chain()
    net[2].register_full_backward_hook(_halved)
    return Script(net, batches())


@case("a full backward hook, added under way")
def late_backward_hook() -> Script:
    """From the third step on."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].register_full_backward_hook(_halved)

    return Script(chain(), batches(), before_step=before_step)


@case("a full backward pre-hook that changes gradients")
def backward_pre_hook() -> Script:
    """It gets the gradient of the output."""
    net = chain()
    net[2].register_full_backward_pre_hook(
        lambda module, grads: tuple(0.5 * g for g in grads)
    )
    return Script(net, batches())


class Branches(nn.Module):
    """Its result depends on the data, which no graph can show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if float(y.detach().sum()) > 0 else 2 * y


class AroundBranches(nn.Module):
    """Computes something itself between its modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(6, 8), Branches()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.middle(x))


@case("hooks that change the input and the output of a module with branches")
def hooks_of_branches() -> Script:
    """Each is called once, by the module that runs as it is."""
    net = AroundBranches()
    net.middle.register_forward_pre_hook(lambda module, given: (3 * given[0],))
    net.middle.register_forward_hook(lambda module, given, out: 2 * out)
    return Script(net, batches(), cut="last", frozen=("first",))


@case("a hook that reads numbers, where the root computes between its modules")
def logging_hook_in_glue() -> Script:
    """It reads the value as a number."""
    seen: dict[str, list[Any]] = {"last": []}
    net = AroundBranches()
    net.last.register_forward_hook(_noting(seen, "last"))
    return Script(net, batches(), cut="last", frozen=("first",), seen=seen)


@case("a hook on a parameter", {"2bw": refused("2.weight has a hook")})
def parameter_hook() -> Script:
    """Some rows of a weight get no gradient."""
    net = chain()

    def masked(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:4] = 0
        return grad

    net[2].weight.register_hook(masked)
    return Script(net, batches())


@case(
    "a hook on a parameter, added under way",
    {"2bw": refused("before step 2, 2.weight has a hook on its gradient")},
)
def late_parameter_hook() -> Script:
    """From the third step on."""

    def before_step(step: int, net: Any) -> None:
        if step == 2:
            net[2].weight.register_hook(lambda g: 0.5 * g)

    return Script(chain(), batches(), before_step=before_step)


@case(
    "a post-accumulate-grad hook that clips values",
    {"wpipe 2bw": refused("0.weight has a hook on its gradient")},
)
def accumulate_hook() -> Script:
    """Called after each microbatch, as accumulating by hand does."""

    def clip(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-0.01, 0.01)

    net = chain()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(clip)
    return Script(net, batches())


@case(
    "a global forward hook of all modules, for two steps",
    {"own-2 seq-2 freeze wpipe": refused("the model's own forward is cut apart")},
)
def global_hook() -> Script:
    """As profilers and debuggers of torch set it."""
    handles: list[Any] = []
    seen: dict[str, list[Any]] = {"layers": []}

    def hook(layer: nn.Module, given: Any, out: Any) -> None:
        if isinstance(layer, nn.Tanh):
            seen["layers"].append(round(float(out.detach().sum()), 9))

    def before_step(step: int, net: Any) -> None:
        if step == 1:
            handles.append(module.register_module_forward_hook(hook))

    def after_step(step: int, net: Any) -> None:
        if step == 2:
            handles.pop().remove()
            seen["layers"].sort()

    net = chain(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh())
    return Script(
        net, batches(), before_step=before_step, after_step=after_step, seen=seen
    )
