"""Captures a model: its graph in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, assert_never

from torch import nn

from hocket.errors import CaptureError
from hocket.model.capture.calls import preserve_attributes, watch_calls
from hocket.model.capture.captured import Captured as Captured
from hocket.model.capture.captured import captured
from hocket.model.capture.convert import to_trace
from hocket.model.capture.export import export
from hocket.model.capture.sequential import (
    is_plain_sequential,
    open_structures,
    trace_sequential,
)
from hocket.model.capture.source_line import OTHER_WAY
from hocket.model.capture.submodules import (
    check_open,
    closed_modules,
    same_calls,
    trace_submodules,
)
from hocket.model.trace.example import Example
from hocket.model.trace.observe import Observation, observe, preserve_state
from hocket.model.trace.state import State
from hocket.model.trace.trace import Trace


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    capture: Literal["auto", "sequential", "export", "submodules"] = "auto",
    cut: Sequence[str] = (),
) -> Captured:
    """Capture a model's graph in both modes, and where it can be cut.

    The model is not run on the data, and is not changed. Arguments that are not
    tensors, and all that the model's code decides by them, are fixed from here on. In
    training mode, submodules that are in evaluation mode (frozen batch norms) stay so.

    Args:
        model: any module.
        args: positional arguments of one microbatch.
        kwargs: keyword arguments of one microbatch.
        capture: `sequential` runs an nn.Sequential's children as they are; `export`
            takes the graph that torch.export makes; `submodules` runs submodules as
            they are, if the model's own code only passes on what they return. `auto` is
            the first for a plain nn.Sequential, the second for everything else, and the
            third for what cannot be exported, if `cut` names submodules.
        cut: the submodules with which stages are to begin.

    Raises:
        CaptureError: the model cannot be captured; names the operation, the line and
            the alternative.
        ModelError: the example holds no tensor with a batch dimension.
    """
    example = Example.of(args, kwargs or {})
    state = State.of(model)
    match capture:
        case "sequential":
            return _of_sequential(model, example, state)
        case "export":
            return _of_export(model, example, state)
        case "submodules":
            return _of_submodules(model, example, state, cut)
        case "auto" if is_plain_sequential(model):
            return _of_sequential(model, example, state)
        case "auto":
            return _of_any(model, example, state, cut)
        case _:
            assert_never(capture)


def _of_any(
    model: nn.Module, example: Example, state: State, cut: Sequence[str]
) -> Captured:
    try:
        return _of_export(model, example, state)
    except CaptureError as error:
        if not cut:
            raise
        try:
            return _of_submodules(model, example, state, cut)
        except CaptureError as other:
            raise CaptureError(f"{error}\nBut {other}") from error


def _of_sequential(model: nn.Module, example: Example, state: State) -> Captured:
    if not isinstance(model, nn.Sequential):
        raise CaptureError(
            f"a {type(model).__name__} is no nn.Sequential, so its submodules cannot "
            f"be run one after the other\n{OTHER_WAY}"
        )
    with _in_mode(model, training=True):
        trace = trace_sequential(model, example, state)
        seen = _watch(model, trace, example)
        if open_structures(trace, seen.facts):
            seen = _watch(model, trace, example)
        fixed = ""
        try:
            more = _watch(model, trace, example.resized(example.num_samples + 1))
        except Exception as error:
            fixed, more = f"{type(error).__name__}: {error}", seen
    return captured(model, example, (trace, trace), (seen, more, seen), fixed)


def _of_submodules(
    model: nn.Module, example: Example, state: State, cut: Sequence[str]
) -> Captured:
    larger = example.resized(example.num_samples + 1)
    with _in_mode(model, training=True), preserve_state(state):
        calls = watch_calls(model, example)
    with _in_mode(model, training=False), preserve_state(state):
        calls_evaluating = watch_calls(model, example)
    closed = closed_modules((calls, calls_evaluating), state)
    check_open(closed, cut)
    training, evaluation = (
        trace_submodules(call, closed, example, state)
        for call in (calls, calls_evaluating)
    )
    with _in_mode(model, training=False):
        seen_evaluating = _watch(model, evaluation, example)
    fixed = ""
    with _in_mode(model, training=True):
        seen = more = _watch(model, training, example)
        try:
            with preserve_state(state):
                grown = trace_submodules(
                    watch_calls(model, larger), closed, larger, state
                )
            if same_calls(training, grown):
                more = _watch(model, training, larger)
            else:
                fixed = "another number of samples leads to other calls"
        except Exception as error:
            fixed = f"{type(error).__name__}: {error}"
    seen_all = (seen, more, seen_evaluating)
    return captured(
        model, example, (training, evaluation), seen_all, fixed, between_modules=True
    )


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


def _watch(model: nn.Module, trace: Trace, example: Example) -> Observation:
    """Observe a trace on fake tensors if its modules allow that, else on real ones."""
    try:
        with preserve_attributes(model):
            return observe(trace, example)
    except Exception:
        with preserve_attributes(model):
            return observe(trace, example, real=True)


@contextmanager
def _in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set train or eval mode for a while; frozen submodules stay in eval mode."""
    modes = {module: module.training for module in model.modules()}
    if not training or not model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
