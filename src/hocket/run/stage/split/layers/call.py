"""Calls of layers whose weight gradients are deferred to W.

They are made in every forward of every layer and called in every backward: they must be
cheap.

Where an input wants a gradient, the operator has a node in the graph as always, which
makes that input's gradient and no other. A hook in front of it receives dy:

    x ─── AddmmBackward ◀── hook ◀── dy

Where no input does (a net's first layer, an embedding), there would be no node at all.
A node of our own takes its place and only passes dy to the hook:

    anchor ─── _GradHook ◀── dy
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.model.trace.local import local
from hocket.run.stage.memory import num_bytes_held
from hocket.run.stage.split.layers.accumulate import accumulate

# The weight's and the bias's gradient; None for one that is not wanted.
Pair: TypeAlias = tuple[Tensor | None, Tensor | None]

_detached: Final = Tensor.detach
_version: Final = attrgetter("_version")


@dataclass(eq=False, slots=True)
class DeferredCall:
    """The operands of a call's weight gradient, and the hook that receives dy.

    Args:
        name: the operator's name, for errors.
        inputs: the layer's one or two inputs; kept without their graph.
        weight: the weight whose gradient is deferred; None if it wants none, or gets it
            from autograd.
        bias: the bias whose gradient is deferred, or None.
        formula: computes the gradients of weight and bias from the call and dy.
        more: further arguments of the formula.

    Attributes:
        versions: the inputs' version counters when they were read.
        wants_grad: whether any of the inputs wants a gradient.
        recorded: the list to which the backward appends this call and dy.
    """

    name: str
    inputs: tuple[Tensor, ...]
    weight: Tensor | None
    bias: Tensor | None
    formula: Callable[[DeferredCall, Tensor], Pair]
    more: tuple[Any, ...] = ()
    versions: tuple[int, ...] = field(init=False)
    wants_grad: bool = field(init=False)
    recorded: list[tuple[DeferredCall, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        """Detach the inputs: a layer must not keep the graph before it alive."""
        self.wants_grad = self.inputs[0].requires_grad or self.inputs[-1].requires_grad
        self.inputs = tuple(map(_detached, self.inputs))
        self.versions = tuple(map(_version, self.inputs))
        self.recorded = []

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Record the output's gradient.

        Raises:
            ModelError: an input was changed in place; autograd refuses that, too.
        """
        (dy,) = grads
        if dy is not None:
            if tuple(map(_version, self.inputs)) != self.versions:
                self._refuse()
            self.recorded.append((self, dy))

    def _refuse(self) -> None:
        """Refuse inputs that changed after the forward had read them."""
        for tensor, version in zip(self.inputs, self.versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"the input of {self.name}, shape {tuple(tensor.shape)}, was "
                    "changed in place after the forward had read it: its weight's "
                    f"gradient needs version {version}, it is at {tensor._version}. "
                    "Compute what changes it into a new tensor"
                )


def defers(weight: Tensor) -> bool:
    """Return whether a weight's gradient can be deferred: a leaf that wants one.

    Not inside `torch.func.grad`, `jvp` and the like: they derive by the weight's uses.
    """
    wanted = weight.requires_grad and torch.is_grad_enabled()
    is_plain = torch._C._functorch.maybe_current_level() is None
    return wanted and is_plain and weight.is_leaf and weight.is_floating_point()


def detached_weight(parameter: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the values for the graph, and the parameter if it is deferred."""
    if parameter is None or not defers(parameter):
        return parameter, None
    return parameter.detach(), parameter


def operands(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return input, weight and bias as the operator reads them, and the deferred bias.

    Under autocast the operator would cast them by itself, but W needs the tensor that
    it read: the cast one, which is kept instead of the original, and not beside it.

    Args:
        x: the layer's input, of any shape.
        weight: the weight, whose gradient is deferred.
        bias: the bias, if the layer has one.
    """
    values, deferred = detached_weight(bias)
    kind = "cpu" if x.is_cpu else x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight.detach(), values, deferred
    dtype = torch.get_autocast_dtype(kind)
    short_bias = None if values is None else _short(values, dtype)
    return _short(x, dtype), _short(weight.detach(), dtype), short_bias, deferred


def _short(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor as autocast does; float64 and integers stay as they are."""
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_cast else tensor


def in_rows(x: Tensor) -> Tensor:
    """Flatten all dimensions but the last."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class Pending:
    """Layers' inputs and output gradients, in the order of the backward.

    Args:
        calls: each call with the gradient of its output.
    """

    def __init__(self, calls: Iterable[tuple[DeferredCall, Tensor]]) -> None:
        self._calls = deque(calls)

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the weight gradients, and release one layer after the other.

        A parameter of several layers gets the sum of its gradients at once, added up
        in the order of the backward: that is autograd's order, too.
        """
        calls = self._calls
        again = _used_again(calls)
        sums: dict[int, Tensor] = {}
        while calls:
            call, dy = calls.popleft()
            dw, db = call.formula(call, dy)
            for parameter, grad in ((call.weight, dw), (call.bias, db)):
                if parameter is None or grad is None:
                    continue
                if again and id(parameter) in again:
                    _add(parameter, grad, again, sums)
                else:
                    accumulate(parameter, grad)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it holds the memory of any of these tensors."""
        storages = [local(tensor).untyped_storage() for tensor in tensors]
        blocks = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        held = [local(tensor).data_ptr() for tensor in self._held()]
        return bool([x for x in held for begin, end in blocks if begin <= x < end])

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds, each block of memory once."""
        return num_bytes_held(self._held())

    def _held(self) -> list[Tensor]:
        return [x for call, dy in self._calls for x in (*call.inputs, dy)]


def _used_again(calls: Iterable[tuple[DeferredCall, Tensor]]) -> Counter[int]:
    """Return how often each parameter with several uses is used."""
    pairs = [(call.weight, call.bias) for call, _ in calls]
    used = [id(x) for pair in pairs for x in pair if x is not None]
    if len(set(used)) == len(used):
        return Counter()
    return Counter({key: num for key, num in Counter(used).items() if num > 1})


def _add(
    parameter: Tensor, grad: Tensor, uses: Counter[int], sums: dict[int, Tensor]
) -> None:
    """Add one of the uses of a parameter; the last one accumulates the sum."""
    key = id(parameter)
    uses[key] -= 1
    if key in sums:
        grad = sums.pop(key) + grad
    if uses[key]:
        sums[key] = grad
    else:
        accumulate(parameter, grad)


Routed: TypeAlias = Callable[..., Tensor]


class Deferral:
    """Records output gradients in a backward, and passes them on to W.

    One backward of the stage runs at a time; forwards of several microbatches may lie
    before it, since their calls are in their own graphs.
    """

    def __init__(self) -> None:
        """Make an empty one."""
        self._recorded: list[tuple[DeferredCall, Tensor]] = []
        # A leaf that wants a gradient and never gets one.
        self._anchor = torch.zeros((), requires_grad=True)

    def enter(
        self,
        call: DeferredCall,
        compute: Routed,
        arguments: tuple[Any, ...],
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute a call's output, and defer its weight gradient.

        Args:
            call: the call; it receives the output's gradient in each backward.
            compute: the operator.
            arguments: the operator's arguments, parameters detached.
            bias: the bias among the arguments, if it wants its gradient at once.
        """
        call.recorded = self._recorded
        if not call.wants_grad and (bias is None or not bias.requires_grad):
            return _enter_alone(self._anchor, compute, arguments, call)
        output = compute(*arguments)
        node: Any = output.grad_fn
        # Some operators return a view of what they computed. If that is changed in
        # place, the view's node leaves the graph, but the one behind it stays.
        if output._is_view():
            node = node.next_functions[0][0]
        node.register_prehook(call)
        return output

    def take(self) -> Pending:
        """Return what the backward that has just ended leaves for W."""
        pending = Pending(self._recorded)
        self._recorded.clear()  # the list object stays: all calls refer to it
        return pending


class _GradHook(torch.autograd.Function):
    """An autograd function without inputs' gradients that passes dy to a hook."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        compute: Routed,
        arguments: tuple[Any, ...],
        on_grad: DeferredCall,
    ) -> Tensor:
        """Return the output, as a tensor that may be changed in place."""
        ctx.on_grad = on_grad
        output = compute(*arguments)
        if output._is_view():
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Return no gradients: no input wants one."""
        ctx.on_grad((grad,))
        return None, None, None, None


_enter_alone: Final[Routed] = _GradHook.apply
