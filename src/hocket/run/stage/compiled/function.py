"""The function that replaces a stage's code: compiled graphs where there are some.

To autograd a compiled stage is one node, whose backward is B, or I:

    leaves ──▶ F ──▶ outputs
                     │ gradients
    leaves ◀── B or I        weights' gradients are added up on the way, or left for W
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.errors import ModelError
from hocket.model.stages.emit import Code
from hocket.model.stages.splitter import SplitGradients, Splitter, Starts
from hocket.model.stages.stage import StageModule
from hocket.run.stage.compiled.capture import CompiledCapture, Strides
from hocket.run.stage.compiled.lower import Backward
from hocket.run.stage.memory import memory_of, num_bytes_held
from hocket.run.stage.split.by_layers import ByLayers
from hocket.run.stage.split.layers.accumulate import accumulate, has_hooks


@dataclass(eq=False, repr=False)
class CompiledRemainder:
    """W's graph and inputs, until it runs.

    Args:
        backward: W.
        inputs: the tensors that I and the forward hold for it.
        weights: the parameters whose gradients it makes, by number.
    """

    backward: Backward
    inputs: list[Tensor]
    weights: Mapping[int, Tensor]

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the weight gradients and release what was held for them."""
        found = self.backward.run(self.inputs, self.weights)
        add_up([self.weights[i] for i in self.backward.returned], found)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it holds the memory of any of these tensors."""
        own = set(map(memory_of, self._held()))
        return any(memory_of(x) in own for x in tensors)

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds, each block of memory once."""
        return num_bytes_held(self._held())

    def _held(self) -> list[Tensor]:
        """Return the held tensors, without the weights."""
        weights = {id(x) for x in self.weights.values()}
        return [x for x in self.inputs if id(x) not in weights]


def add_up(parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients into those of parameters, as autograd would.

    Args:
        parameters: leaves.
        grads: one gradient of each; the caller may not use them afterwards.
    """
    sums: list[Tensor] = []
    parts: list[Tensor] = []
    for parameter, grad in zip(parameters, grads, strict=True):
        so_far = parameter.grad
        if so_far is None or so_far.is_sparse or has_hooks(parameter):
            accumulate(parameter, grad)
        else:
            sums.append(so_far)
            parts.append(grad)
    if sums:
        torch._foreach_add_(sums, parts)


class CompileWarning(UserWarning):
    """A stage could not be compiled, or no longer can, and runs uncompiled."""


@dataclass(eq=False, repr=False)
class CompiledFunction:
    """A stage's code in training, compiled for some sizes.

    Args:
        code: the stage's own code, for sizes that are not compiled.
        num_state: how many arguments are parameters and buffers.
        device: the stage's device.
        has_backward: whether the stage is run with gradients; if not, without.

    Attributes:
        captures: the compiled graphs, by the form of a microbatch.
        num_calls: how often compiled graphs were called, in forwards whose backward is
            B or is split.
    """

    code: Code
    num_state: int
    device: torch.device
    has_backward: bool = True

    def __post_init__(self) -> None:
        self.captures: dict[Hashable, CompiledCapture] = {}
        self.num_calls = 0
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)

    def __call__(self, objects: Any, device: torch.device, *args: Any) -> Any:
        """Run the stage's code."""
        found = self.found(args)
        if found is None:
            return self.code.function(objects, device, *args)
        return self.run(found, args, None)

    def found(self, args: Sequence[Any]) -> CompiledCapture | None:
        """Return what was compiled for such arguments; None if nothing was."""
        if self.has_backward and not torch.is_grad_enabled():
            return None
        return self.captures.get(form_of(args[self.num_state :]))

    def run(
        self,
        capture: CompiledCapture,
        args: Sequence[Any],
        pending: list[CompiledRemainder] | None,
    ) -> Any:
        """Run the compiled graphs.

        Args:
            capture: the graphs for these arguments.
            args: the arguments of the stage's own code, behind the device.
            pending: where the backward leaves what remains for W; if None, it is whole.
        """
        self.num_calls += 1
        tensors = capture.inputs.tensors(self.code, args)
        leaves = [tensors[i] for i in capture.leaves]
        with torch.autocast(self.device.type, enabled=False):
            outputs = _node(capture, pending, tensors, self._anchor, *leaves)
        return capture.shape.filled(outputs)


def form_of(values: Sequence[Any]) -> Hashable:
    """Return a key that is equal for arguments that one capture fits."""
    return tuple(
        (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else _plain(x)
        for x in values
    )


def _plain(value: Any) -> Hashable:
    """Return a number or the like; anything else becomes an object that equals none."""
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return (type(value), value) if is_plain else object()


def is_compiled(stage: StageModule) -> bool:
    """Return whether a stage's code is compiled, in training or in evaluation."""
    codes = (stage.code_in(training=mode) for mode in (True, False))
    return any(isinstance(code.function, CompiledFunction) for code in codes)


@contextmanager
def uncompiled(stage: StageModule) -> Iterator[None]:
    """Let a stage run its own code while the block runs, if it is compiled."""
    code = stage.training_code
    if isinstance(code.function, CompiledFunction):
        stage.set_training_code(code.function.code)
    try:
        yield
    finally:
        stage.set_training_code(code)


class _Node(torch.autograd.Function):
    """A compiled stage in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        capture: CompiledCapture,
        pending: list[CompiledRemainder] | None,
        tensors: list[Tensor],
        anchor: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        for i, strides in capture.values.items():
            tensors[i] = _laid_out(tensors[i], strides)
        weights = {i: tensors[i] for i in capture.weights}
        buffers = [tensors[i] for i in capture.buffers]
        results = capture.forward([*tensors, *capture.draws.made(anchor.device)])
        num_buffers, num_outputs = len(buffers), len(capture.depends)
        if buffers:
            torch._foreach_copy_(buffers, list(results[:num_buffers]))
        outputs = _one_tensor_each(results[num_buffers : num_buffers + num_outputs])
        ctx.save_for_backward(*results[num_buffers + num_outputs :])
        ctx.set_materialize_grads(False)
        # Outputs without an expected gradient stay in autograd's graph, too: if a
        # gradient comes, that is an error, and not a lost gradient.
        pairs = zip(outputs, capture.depends, strict=True)
        ctx.mark_non_differentiable(*(x for x, depends in pairs if not depends))
        ctx.capture, ctx.pending, ctx.weights = capture, pending, weights
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        capture: CompiledCapture = ctx.capture
        weights: dict[int, Tensor] = ctx.weights
        given = [*ctx.saved_tensors, *_given(capture, grads)]
        ctx.maybe_clear_saved_tensors()
        split, first = capture.split, capture.whole
        read: list[Tensor] = []
        if ctx.pending is not None and split is not None:
            first, read = split.first, [given[i] for i in split.reads]
        assert first is not None
        results = first.run(given, weights)
        numbers = first.returned
        if ctx.pending is not None and split is not None:
            read += results[len(numbers) :]
            ctx.pending.append(CompiledRemainder(split.second, read, weights))
        found = dict(zip(numbers, results[: len(numbers)], strict=True))
        own = [i for i in numbers if i in weights]
        add_up([weights[i] for i in own], [found[i] for i in own])
        return (None, None, None, None, *(found.get(i) for i in capture.leaves))


def _one_tensor_each(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a separate tensor for each output, as autograd's graph needs.

    A parameter must not become a node of its own graph; and of a tensor that is several
    outputs autograd would keep one place, the last.
    """
    found: dict[int, Tensor] = {}
    for x in results:
        own = x.detach() if x.requires_grad or id(x) in found else x
        found[id(own)] = own
    return tuple(found.values())


def _given(capture: CompiledCapture, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the outputs' gradients in the form that the graphs take."""
    found: list[Tensor] = []
    pairs = zip(grads, capture.differentiated, strict=True)
    for i, (grad, was_used) in enumerate(pairs):
        if (grad is not None) != was_used:
            raise ModelError(_grads_given(i, len(grads), was_used))
        if grad is not None:
            found.append(grad)
    return list(map(_laid_out, found, capture.strides))


def _grads_given(number: int, num_outputs: int, was_used: bool) -> str:
    uses, used = ("does not use", "did") if was_used else ("uses", "did not use")
    return (
        f"the loss {uses} tensor {number} of the {num_outputs} that the model returns "
        f"(counted from 0), and {used} when the stage was compiled, so that its "
        "gradients are of another loss: let the loss use the same tensors in every "
        "step, with a weight of 0.0 where one is not to count, or train with "
        "compile=False"
    )


def _laid_out(tensor: Tensor, strides: Strides) -> Tensor:
    """Return a tensor with the strides that the graphs were compiled for.

    Where a dimension is 1, a dense tensor may have any stride, but operators choose the
    order of their results by it.
    """
    if tensor.stride() == strides:
        return tensor
    found = tensor.contiguous().as_strided(tensor.shape, strides)
    return found if found.is_contiguous() else torch.empty_like(found).copy_(tensor)


_node: Callable[..., tuple[Tensor, ...]] = _Node.apply


def make_splitter(stage: StageModule) -> Splitter:
    """Make a stage's splitter: by graphs if it is compiled, or else by layers."""
    if isinstance(stage.training_code.function, CompiledFunction):
        return ByCompiled(stage)
    return ByLayers(stage)


class ByCompiled:
    """Splits one stage's backwards; those of other sizes, layer by layer.

    Args:
        stage: the stage whose training code is compiled.
    """

    def __init__(self, stage: StageModule) -> None:
        function = stage.training_code.function
        assert isinstance(function, CompiledFunction)
        self._layers = ByLayers(stage)
        other = self._layers.module.training_code.function
        self._other = function.code.function if other is function else other
        self._function = function
        self._pending: list[CompiledRemainder] = []
        code = replace(stage.training_code, function=self._run)
        self.module = stage.with_training_code(code)

    def on(self) -> AbstractContextManager[object]:
        """See `Splitter.on`."""
        return self._layers.on()

    def input_gradients(
        self, starts: Starts, grads: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> SplitGradients:
        """See `Splitter.input_gradients`."""
        found, left = self._layers.input_gradients(starts, grads, leaves)
        return found, self._pending.pop() if self._pending else left

    def _run(self, objects: Any, device: torch.device, *args: Any) -> Any:
        capture = self._function.found(args)
        if capture is None:
            return self._other(objects, device, *args)
        return self._function.run(capture, args, self._pending)
