"""Capture a model: write down its work, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, assert_never

from torch import nn

from hocket.errors import CaptureError
from hocket.model.captured import Captured as Captured
from hocket.model.captured import captured
from hocket.model.convert import to_trace
from hocket.model.example import Example
from hocket.model.export import OTHER_WAY, export
from hocket.model.observe import Observation, observe
from hocket.model.sequential import (
    is_plain_sequential,
    open_structures,
    trace_sequential,
)
from hocket.model.state import State
from hocket.model.trace import Trace


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    capture: Literal["auto", "sequential", "export"] = "auto",
) -> Captured:
    """Write down what a model does, in training and in evaluation, and where to cut it.

    The model is not run on the data, and is left as it was. Arguments that are not
    tensors, and whatever the model's code decides by them, are fixed from here on. In
    training mode, submodules that are in evaluation mode (frozen batch norms) stay so.

    Args:
        model: any module.
        args: positional arguments of one microbatch.
        kwargs: keyword arguments of one microbatch.
        capture: `sequential` runs an nn.Sequential's children as they are; `export`
            takes the graph that torch.export makes; `auto` is the first for a plain
            nn.Sequential, and the second for everything else.

    Raises:
        CaptureError: the model cannot be captured; names the operation, the line and
            the other way.
        ModelError: the example holds no tensor with a batch dimension.
    """
    example = Example.of(args, kwargs or {})
    state = State.of(model)
    match capture:
        case "sequential":
            return _of_sequential(model, example, state)
        case "export":
            return _of_export(model, example, state)
        case "auto" if is_plain_sequential(model):
            return _of_sequential(model, example, state)
        case "auto":
            return _of_export(model, example, state)
        case _:
            assert_never(capture)


def _of_sequential(model: nn.Module, example: Example, state: State) -> Captured:
    if not isinstance(model, nn.Sequential):
        raise CaptureError(
            f"a {type(model).__name__} is no nn.Sequential, so its submodules cannot "
            f"be run one after the other\n{OTHER_WAY}"
        )
    with _in_mode(model, training=True):
        trace = trace_sequential(model, example, state)
        seen = _watch(trace, example)
        if open_structures(trace, seen.facts):
            seen = _watch(trace, example)
        fixed = ""
        try:
            more = _watch(trace, example.resized(example.num_samples + 1))
        except Exception as error:
            fixed, more = f"{type(error).__name__}: {error}", seen
    return captured(model, example, (trace, trace), (seen, more, seen), fixed)


def _of_export(model: nn.Module, example: Example, state: State) -> Captured:
    fixed = ""
    try:
        traces = _export_both(model, example, state, any_batch=True)
    except CaptureError as error:
        fixed = str(error)
        traces = _export_both(model, example, state, any_batch=False)
    training, evaluation = traces
    seen = observe(training, example)
    size = example.num_samples if fixed else example.num_samples + 1
    more = observe(training, example.resized(size))
    seen_all = (seen, more, observe(evaluation, example))
    return captured(model, example, traces, seen_all, fixed)


def _export_both(
    model: nn.Module, example: Example, state: State, *, any_batch: bool
) -> tuple[Trace, Trace]:
    traces = []
    for training in (True, False):
        with _in_mode(model, training=training):
            program = export(model, example, any_batch=any_batch)
        traces.append(to_trace(program, state))
    return traces[0], traces[1]


def _watch(trace: Trace, example: Example) -> Observation:
    """On fake tensors if its modules let us, and on the real ones otherwise."""
    try:
        return observe(trace, example)
    except Exception:
        return observe(trace, example, real=True)


@contextmanager
def _in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation for a while; what was frozen stays so in training."""
    modes = {module: module.training for module in model.modules()}
    if not training or not model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
