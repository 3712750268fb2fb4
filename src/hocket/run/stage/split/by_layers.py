"""Splits a backward layer by layer: some layers' weight gradients wait for W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hocket.model.stages.reroute import Route, Routes, rerouted, runs_modules
from hocket.model.stages.splitter import SplitGradients, Starts
from hocket.model.stages.stage import StageModule
from hocket.run.stage.backward import run_backward
from hocket.run.stage.split.layers.accumulate import has_hooks
from hocket.run.stage.split.layers.call import Deferral
from hocket.run.stage.split.routes import make_routes

# Replaces operators inside modules that are run as they are.
#
# What such a module calls is known only while it runs. So the modules that own a weight
# are watched while they run, and no others, since watching costs some microseconds per
# call of a torch function:
#
#     Block.forward            not watched: it owns nothing itself
#       self.norm(x)           not watched: it owns vectors only
#       self.up(x)             nn.Linear: takes the route of F.linear at once
#       self.rows(x)           watched: all calls on its weight take their routes
#
# A weight may be used elsewhere, too: then its gradient comes in two parts, one with I
# and one with W. Only hooks on the parameter would notice; the gradients of parameters
# with hooks are not deferred.
#
# Python functions of torch are opened no further: nn.MultiheadAttention calls its
# linear layers inside of one, so their weights get their gradients with I.
#
# torch's modules that are one operator on their weight: no need to watch them.
#
# What such a module calls is known, so it need not be watched.


Operator: TypeAlias = Callable[..., Tensor]
# Reads from a module what its operator takes besides input, weight and bias.
More: TypeAlias = Callable[[nn.Module], tuple[Any, ...]]

_CONVOLUTIONS: Final[Mapping[Any, Operator]] = {
    nn.Conv1d: torch.conv1d,
    nn.Conv2d: torch.conv2d,
    nn.Conv3d: torch.conv3d,
}


_SHAPE: Final[More] = attrgetter("stride", "padding", "dilation", "groups")


def operator_of(module: nn.Module) -> tuple[Operator, More] | None:
    """Return a module's operator and the reader of its options; None if unknown.

    Args:
        module: any module. One with its own forward, or changed otherwise, is unknown.
    """
    if "forward" in vars(module):
        return None
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return F.linear, lambda _: ()
    for kind, operator in _CONVOLUTIONS.items():
        if isinstance(module, kind) and forward is kind.forward:
            return _convolution(module, kind, operator)
    return None


def _convolution(
    module: Any, kind: Any, operator: Operator
) -> tuple[Operator, More] | None:
    """Return a convolution's operator; only for zero padding."""
    is_own = type(module)._conv_forward is not kind._conv_forward
    return None if is_own or module.padding_mode != "zeros" else (operator, _SHAPE)


def has_own_kernel(module: nn.Module) -> bool:
    """Return whether its weights are read by a fused kernel only."""
    if not isinstance(module, nn.RNNBase):
        return False
    own = {id(p) for p in module.parameters(recurse=False)}
    return own == {id(p) for layer in module.all_weights for p in layer}


Forward: TypeAlias = Callable[..., Any]


class ModuleRoutes:
    """While it is on, calls of these operators take their routes.

    Args:
        routes: the routes, by operator.
        module: the module whose submodules run.
    """

    def __init__(self, routes: Routes, module: nn.Module) -> None:
        mode = _Mode(routes)
        self._before: list[list[Forward | None]] = []  # of each time that it is on
        self._forwards = [
            (vars(owner), _routed(mode, routes, owner))
            for owner in module.modules()
            if any(p.dim() > 1 for p in owner.parameters(recurse=False))
            and not has_own_kernel(owner)
        ]

    def __enter__(self) -> None:
        """Enable the routes for a forward, or a backward that runs forwards again."""
        self._before.append([own.get("forward") for own, _ in self._forwards])
        for own, forward in self._forwards:
            own["forward"] = forward

    def __exit__(self, *error: object) -> None:
        """Restore what the modules called before."""
        for (own, _), old in zip(self._forwards, self._before.pop(), strict=True):
            if old is None:
                del own["forward"]
            else:
                own["forward"] = old


def _routed(mode: _Mode, routes: Routes, owner: Any) -> Forward:
    """Return what to call in place of a module's forward."""
    known = operator_of(owner)
    if known is None:
        return _with_mode(mode, owner.forward)
    forward, (operator, more) = owner.forward, known
    function = routes[operator].function

    # The argument is named as torch names it.
    def routed(input: Tensor) -> Any:  # noqa: A002
        weight, bias = owner.weight, owner.bias
        has_any_hooks = has_hooks(weight) or (bias is not None and has_hooks(bias))
        if has_any_hooks or mode.is_on:
            return forward(input)
        return function(input, weight, bias, *more(owner))

    return routed


def _with_mode(mode: _Mode, forward: Forward) -> Forward:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if mode.is_on:  # inside of another module that owns weights
            return forward(*args, **kwargs)
        mode.is_on = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            mode.is_on = False

    return watched


class _Mode(TorchFunctionMode):
    """A torch function mode that replaces some functions.

    Args:
        routes: the routes, by operator.

    Attributes:
        is_on: whether the mode is entered.
    """

    def __init__(self, routes: Routes) -> None:
        super().__init__()
        self._routes = routes
        self.is_on = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take the route, if there is one."""
        route = self._routes.get(func)
        if route is None or _wants_grad(route, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        return route.function(*args, **(kwargs or {}))


def _wants_grad(route: Route, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the weight or the bias wants a gradient."""
    given = [kwargs.get("weight"), kwargs.get("bias")]
    places = (route.weight, route.bias)
    given += [args[i] for i in places if i is not None and i < len(args)]
    return any(isinstance(x, Tensor) and has_hooks(x) for x in given)


class ByLayers:
    """Splits the backwards of one stage.

    Args:
        stage: the stage's module.
    """

    def __init__(self, stage: StageModule) -> None:
        self._deferral = Deferral()
        routes = make_routes(self._deferral)
        self._watch: AbstractContextManager[object] = nullcontext()
        if stage.runs_backward:  # which would be taken for I
            self.module = stage
        elif runs_modules(stage):
            self.module = stage
            self._watch = ModuleRoutes(routes, stage)
        else:
            self.module = rerouted(stage, routes)

    def on(self) -> AbstractContextManager[object]:
        """See `Splitter.on`."""
        return self._watch

    def input_gradients(
        self, starts: Starts, grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> SplitGradients:
        """See `Splitter.input_gradients`.

        Parameters whose gradients do not wait get them here.
        """
        if starts:
            # Modules with activation checkpointing run their forward again in here.
            with self.on():
                run_backward(starts, grads)
        return [leaf.grad for leaf in leaves], self._deferral.take()
