"""Runs compiled graphs once and compares their results with the stage's own code.

The inputs are the stage's weights and random values. F's outputs and new buffers are
compared with those of the stage's own code, under the same random state; of the
backward, only the memory of its results is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.run.stage.compiled.capture import (
    CannotCompileError,
    CompiledCapture,
    SplitBackward,
)
from hocket.run.stage.compiled.lower import Backward
from hocket.run.stage.compiled.trace import FakeRun
from hocket.run.stage.seed import preserve_generators, seed_generators

# Far more than rounding, far less than another random number makes.
TOLERANCES: Final = {torch.float64: 1e-8, torch.float32: 1e-3}
TOLERANCE: Final = 0.1  # for shorter floating-point types


def check_compiled(capture: CompiledCapture, fake_run: FakeRun) -> CompiledCapture:
    """Run each graph and compare; nothing of the stage is changed.

    Args:
        capture: the compiled graphs.
        fake_run: the call that it was compiled for.

    Returns:
        The capture, with backwards that copy results which share memory.

    Raises:
        CannotCompileError: F computes something else than the stage's own code.
    """
    own = fake_run.call.inputs.tensors(fake_run.call.code, fake_run.call.args)
    with preserve_generators(fake_run.call.device):
        seed_generators(fake_run.call.device, 0)
        tensors = _tensors(capture, fake_run, own)
        seed_generators(fake_run.call.device, 1)
        with torch.no_grad():
            drawn = capture.draws.made(fake_run.call.device)
            results = capture.forward([*tensors, *drawn])
        seed_generators(fake_run.call.device, 1)
        with torch.enable_grad():
            expected = fake_run.call.run(tensors)
    first = len(capture.buffers)
    _compare_buffers(capture, own, results[:first], tensors)
    outputs = results[first : first + len(capture.differentiated)]
    leaves = pytree.tree_leaves(expected)
    for i, output in zip(capture.shape.places, outputs, strict=True):
        check_close(output, leaves[i].detach())
    with torch.no_grad():
        return _tried(capture, fake_run, outputs, results[first + len(outputs) :])


def _tried(
    capture: CompiledCapture,
    fake_run: FakeRun,
    outputs: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> CompiledCapture:
    pairs = zip(outputs, capture.differentiated, strict=True)
    grads = [torch.zeros_like(x).contiguous() for x, gives in pairs if gives]
    weights = {i: _zeros(fake_run.fakes[i]) for i in capture.weights}
    whole, split, given = capture.whole, capture.split, [*kept, *grads]
    if whole is not None:
        whole, _ = _tried_backward(whole, given, weights)
    if split is not None:
        split = _tried_split(split, given, weights)
    return replace(capture, whole=whole, split=split)


def _tried_split(
    split: SplitBackward, given: Sequence[Tensor], weights: Mapping[int, Tensor]
) -> SplitBackward:
    first, results = _tried_backward(split.first, given, weights)
    held = results[len(first.returned) :]
    read = [*(given[i] for i in split.reads), *held]
    second, _ = _tried_backward(split.second, read, weights)
    return replace(split, first=first, second=second)


def _tried_backward(
    backward: Backward, given: Sequence[Tensor], weights: Mapping[int, Tensor]
) -> tuple[Backward, list[Tensor]]:
    results = backward.run(list(given), weights)
    shared = backward.shared_places(given, results, weights)
    return replace(backward, shared=shared), results


def _tensors(
    capture: CompiledCapture, fake_run: FakeRun, own: Sequence[Tensor]
) -> list[Tensor]:
    """Return the stage's tensors, copied where they may change, and random values."""
    tensors = []
    for i, (tensor, fake) in enumerate(zip(own, fake_run.fakes, strict=True)):
        if i in capture.values:
            tensors.append(_drawn(fake))
        else:
            may_change = not (isinstance(tensor, nn.Parameter) or is_expanded(tensor))
            tensors.append(
                _zeros(fake).copy_(tensor) if may_change else tensor.to(fake.device)
            )
    return tensors


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that it cannot be written."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _drawn(fake: Tensor) -> Tensor:
    """Return random numbers around 0, or zeros for integers such as indices."""
    tensor = _zeros(fake)
    return tensor.normal_() if tensor.is_floating_point() else tensor


def _zeros(fake: Tensor) -> Tensor:
    return torch.empty_strided(
        fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
    ).zero_()


def _compare_buffers(
    capture: CompiledCapture,
    own: Sequence[Tensor],
    became: Sequence[Tensor],
    tensors: Sequence[Tensor],
) -> None:
    """Check that F assigns to buffers what the stage's own code does."""
    changed = dict(zip(capture.buffers, became, strict=True))
    for i, tensor in enumerate(tensors):
        if i not in capture.values and not isinstance(own[i], nn.Parameter):
            before = own[i].to(tensor.device)
            check_close(changed.get(i, before), tensor.detach())


def check_close(actual: Tensor, expected: Tensor) -> None:
    """Check that a compiled result is the expected one, but for rounding.

    Integers and booleans must be equal.

    Raises:
        CannotCompileError: its values, type or shape differ.
    """
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        raise CannotCompileError(
            f"compiled, it makes {actual.dtype} of shape {tuple(actual.shape)}, not "
            f"{expected.dtype} of shape {tuple(expected.shape)}"
        )
    if not (expected.is_floating_point() or expected.is_complex()):
        if not torch.equal(actual, expected):
            num_other = int((actual != expected).sum())
            raise CannotCompileError(
                f"compiled, it computes something else: {num_other} of "
                f"{expected.numel()} values differ"
            )
        return
    tolerance = TOLERANCES.get(expected.dtype, TOLERANCE)
    a, b = (torch.nan_to_num(x.double()) for x in (actual, expected))
    if not a.numel():
        return
    off = float((a - b).abs().max() / b.abs().max().clamp_min(1.0))
    if off > tolerance:
        raise CannotCompileError(
            f"compiled, it computes something else, off by {off:.1g} of the largest "
            f"number where {tolerance:g} would be rounding"
        )
