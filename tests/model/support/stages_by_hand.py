"""Run stages one after the other by hand, and compare them with the uncut model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.model.capture.capture import Captured, capture
from hocket.model.stages.cut import cut
from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import PerSample, map_tensors, num_rows, take_rows

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Case:
    """A model and how it is called."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    smallest: int = 1  # samples; batch norm over single numbers needs 2

    def double(self) -> Case:
        """The same in float64, where rounding cannot hide a mistake."""
        call = (self.args, self.kwargs)
        args, kwargs = pytree.tree_map(lambda x: map_tensors(x, _double), call)
        return Case(self.model.double(), args, kwargs, self.smallest)

    def capture(self) -> Captured:
        """Captured as a user would."""
        return capture(self.model, self.args, self.kwargs)

    def rows(self, num_samples: int, seed: int) -> Call:
        """Another microbatch: rows of the example, drawn with repetition."""
        call = (self.args, self.kwargs)
        sizes = map(num_rows, pytree.tree_leaves(call))
        size = next(x for x in sizes if x is not None)
        draw = torch.Generator().manual_seed(seed)
        index = torch.randint(size, (num_samples,), generator=draw)
        rows: Call = pytree.tree_map(
            lambda x: x if num_rows(x) is None else take_rows(x, index), call
        )
        return rows


def forward(
    stages: Sequence[StageModule], leaves: Sequence[Any]
) -> tuple[list[tuple[Tensor, ...]], Any]:
    """All stages in turn.

    Returns:
        What each stage received, as leaves of autograd, and what each returned.
    """
    received: tuple[Tensor, ...] = ()
    inputs, outputs = [], []
    for stage in stages:
        received = tuple(
            x.detach().requires_grad_(value.requires_grad)
            for x, value in zip(received, stage.inputs, strict=True)
        )
        inputs.append(received)
        received = stage(*received, *(leaves[i] for i in stage.batch_inputs))
        outputs.append(received)
    return inputs, outputs


def backward(inputs: Sequence[tuple[Tensor, ...]], outputs: Sequence[Any]) -> None:
    """Backward through all stages, the last one first."""
    roots = graded(outputs[-1])
    torch.autograd.backward(roots, seeds(roots))
    for made, taken in zip(outputs[-2::-1], inputs[:0:-1], strict=True):
        pairs = [
            (out, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            for out, leaf in zip(made, taken, strict=True)
            if leaf.requires_grad
        ]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def graded(output: Any) -> list[Tensor]:
    """The tensors of an output that a gradient can start from."""
    tensors = (x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
    return [x for x in tensors if x.requires_grad]


def seeds(roots: Sequence[Tensor]) -> list[Tensor]:
    """Gradients to start with, the same for the same shapes."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, dtype=x.dtype, generator=draw) for x in roots]


def even_cut(captured: Captured, num_stages: int) -> tuple[StageModule, ...]:
    """Stages of about equally many layers."""
    count = len(captured.layers)
    return cut(captured, [round(i * count / num_stages) for i in range(1, num_stages)])


def worst_difference(case: Case, captured: Captured, num_stages: int) -> float:
    """Train both on several microbatches, the last ones smaller, then evaluate.

    Returns:
        The largest difference in any output, gradient or buffer, relative to its size.
    """
    case.model.zero_grad()
    uncut = copy.deepcopy(case.model)
    modes = {path: x.training for path, x in uncut.named_modules()}
    stages = even_cut(captured, num_stages)
    compare = _Comparison()
    for stage in stages:
        stage.train()
    for seed, num_samples in enumerate((4, 4, 3, case.smallest)):
        args, kwargs = case.rows(num_samples, seed)
        torch.manual_seed(seed)
        expected = uncut(*args, **kwargs)
        torch.manual_seed(seed)
        inputs, outputs = forward(stages, pytree.tree_leaves((args, kwargs)))
        compare.outputs(expected, outputs[-1])
        roots = graded(expected)
        torch.autograd.backward(roots, seeds(roots))
        backward(inputs, outputs)
    compare.gradients(uncut, case.model)
    compare.buffers(uncut, case.model)
    uncut.eval()
    for stage in stages:
        stage.eval()
    with torch.inference_mode():
        args, kwargs = case.rows(3, 9)
        _, outputs = forward(stages, pytree.tree_leaves((args, kwargs)))
        compare.outputs(uncut(*args, **kwargs), outputs[-1])
    for path, mode in modes.items():
        case.model.get_submodule(path).training = mode
    return compare.worst


class _Comparison:
    """The largest difference seen."""

    def __init__(self) -> None:
        self.worst = 0.0

    def outputs(self, expected: Any, got: Any) -> None:
        assert type(got) is type(expected)
        old, spec = pytree.tree_flatten(expected)
        new, new_spec = pytree.tree_flatten(got)
        assert new_spec == spec
        for a, b in zip(old, new, strict=True):
            self._leaves(a, b)

    def _leaves(self, expected: Any, got: Any) -> None:
        if isinstance(expected, PerSample):
            self.outputs(list(expected), list(got))
        elif isinstance(expected, Tensor):
            self._tensors(expected, got)
        else:
            assert expected == got

    def gradients(self, expected: nn.Module, got: nn.Module) -> None:
        cut_ones = dict(got.named_parameters())
        for name, parameter in expected.named_parameters():
            grad = cut_ones[name].grad
            assert (parameter.grad is None) == (grad is None), name
            if parameter.grad is not None and grad is not None:
                self._tensors(parameter.grad, grad)

    def buffers(self, expected: nn.Module, got: nn.Module) -> None:
        cut_ones = dict(got.named_buffers())
        for name, buffer in expected.named_buffers():
            self._tensors(buffer, cut_ones[name])

    def _tensors(self, expected: Tensor, got: Tensor) -> None:
        expected, got = expected.detach(), got.detach()
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        if expected.numel():
            scale = max(1.0, float(expected.double().abs().max()))
            difference = float((expected.double() - got.double()).abs().max())
            self.worst = max(self.worst, difference / scale)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
