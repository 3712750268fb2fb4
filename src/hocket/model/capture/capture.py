"""Captures a model: its graph in training and in evaluation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final, Literal, assert_never

import torch
from torch import nn

from hocket.errors import CaptureError, ModelError
from hocket.garbage import no_collections
from hocket.model.capture.as_is import ModulesAsIs, seen_calls
from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.capture.calls import watch_calls
from hocket.model.capture.captured import Captured as Captured
from hocket.model.capture.captured import captured, with_more_layers
from hocket.model.capture.convert import to_trace
from hocket.model.capture.export import export, samples_to_export
from hocket.model.capture.lost_in_graph import LostInGraphError, preserve_numbers
from hocket.model.capture.sequential import (
    has_hooks,
    hooks_of,
    is_plain_sequential,
    open_structures,
    prefixes,
    trace_sequential,
)
from hocket.model.capture.source_line import OTHER_WAY, place_of
from hocket.model.capture.submodules import (
    check_open,
    closed_modules,
    trace_submodules,
    tried,
)
from hocket.model.guards.reached import reached_by, used_by_forward
from hocket.model.trace.example import Example, Place
from hocket.model.trace.local import is_sharded
from hocket.model.trace.observe import (
    Observation,
    computes_as,
    in_mode,
    observe,
    preserve_state,
)
from hocket.model.trace.state import State
from hocket.model.trace.trace import Trace


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    capture: Literal["auto", "sequential", "export", "submodules"] = "auto",
    cut: Sequence[str] = (),
    both: bool = True,
    lengths: Mapping[Place, int] | None = None,
) -> Captured:
    """Capture a model's graph in both modes, and where it can be cut.

    The model is not changed, but for buffers that its first forward makes; it is run on
    the data only for these, or if some of it has to run as it is. Arguments that are
    not tensors, and all that its code decides by them, are fixed from here on. In
    training mode, submodules that are in evaluation mode (frozen batch norms) stay so.

    Args:
        model: any module.
        args: positional arguments of one microbatch.
        kwargs: keyword arguments of one microbatch.
        capture: `sequential` runs an nn.Sequential's children as they are; `export`
            takes the graph that torch.export makes, in which the modules that it cannot
            capture run as they are; `submodules` runs all submodules as they are, if
            the model's own code only passes on what they return. `auto` is the first
            for a plain nn.Sequential, the second for everything else, and the third for
            what cannot be exported.
        cut: the submodules with which stages are to begin.
        both: whether evaluation is exported, too; if not, training stands for it.
        lengths: the dimensions behind the samples that may be of any size, by leaf and
            dimension, each with a size to export with.

    Raises:
        CaptureError: the model cannot be captured; names the operation, the line and
            the alternative.
        ModelError: the example holds no tensor with a batch dimension.
    """
    _refuse_iterators(model)
    example = replace(Example.of(args, kwargs or {}), open=lengths or {})
    _make_buffers(model, example)
    with in_mode(model, training=False):
        _make_buffers(model, example)
    state = State.of(model)
    with no_collections():
        match capture:
            case "sequential":
                found = _of_sequential(model, example, state)
            case "export":
                found = _of_export(model, example, state, both)
            case "submodules":
                found = _of_submodules(model, example, state, cut)
            case "auto" if is_plain_sequential(model):
                found = _of_sequential(model, example, state)
            case "auto":
                found = _of_any(model, example, state, cut, both)
            case _:
                assert_never(capture)
        for path, module in model.named_modules():
            if has_hooks(module):
                hooks = [x for kind in hooks_of(module) for x in kind.values()]
                named = ", ".join(map(place_of, hooks)) or "hooks of all modules"
                found.as_is[path] = f"it calls {named}"
        found.as_is.update(found.evaluation.trace.as_is)
        found.as_is.update(found.training.trace.as_is)
        return with_more_layers(found, cut)


def _refuse_iterators(model: nn.Module) -> None:
    for path, name in reached_by(model).iterators.items():
        raise LostInGraphError(
            f"the model cannot be captured: the forward of {path or 'the model'} goes "
            f"on with {name}, an iterator, from one call to the next, and it is called "
            "to be measured, too. Let forward take its values as an argument"
        )


def _make_buffers(model: nn.Module, example: Example) -> None:
    """Run a first forward, if modules register buffers in theirs.

    Raises:
        ModelError: a buffer depends on the data.
    """
    if not any("register_buffer" in used_by_forward(type(x)) for x in model.modules()):
        return
    before = State.of(model)
    equal, known = example.resized(1).resized(example.num_samples), before.first_name
    with preserve_state(before), torch.no_grad():
        with preserve_attributes(model):
            _call(model, equal)
            others = dict(model.named_buffers())
        _call(model, example)
    for name, x in model.named_buffers():
        if name in known or x.is_meta:
            continue
        if name not in others or not torch.equal(x, others[name]):
            raise ModelError(
                f"the first forward makes the buffer {name} from its batch: call the "
                "model with that batch, `model(*inputs)`, before it is given"
            )


def _call(model: nn.Module, example: Example) -> None:
    args, kwargs = example.call()
    model(*args, **kwargs)


def _of_any(
    model: nn.Module, example: Example, state: State, cut: Sequence[str], both: bool
) -> Captured:
    try:
        return _of_export(model, example, state, both)
    except CaptureError as error:
        lost = error if isinstance(error, LostInGraphError) else None
        if example.open or (lost is not None and not cut):
            raise
        try:
            return _of_submodules(model, example, state, cut, lost)
        except LostInGraphError:
            raise
        except CaptureError as other:
            raise CaptureError(f"{error}\nBut {other}") from error


def _of_sequential(model: nn.Module, example: Example, state: State) -> Captured:
    if not isinstance(model, nn.Sequential):
        raise CaptureError(
            f"a {type(model).__name__} is no nn.Sequential, so its submodules cannot "
            f"be run one after the other\n{OTHER_WAY}"
        )
    with in_mode(model, training=True):
        trace = trace_sequential(model, example, state)
        seen = _watch(model, trace, example)
        if open_structures(trace, seen.facts):
            seen = _watch(model, trace, example)
        fixed = ""
        try:
            more = _watch(model, trace, example.resized(example.num_samples + 1))
        except Exception as error:
            fixed, more = f"{type(error).__name__}: {error}", seen
        seen = _with_known_shapes(model, trace, example, seen)
    return captured(model, example, (trace, trace), (seen, more, seen), fixed)


def _of_submodules(
    model: nn.Module,
    example: Example,
    state: State,
    cut: Sequence[str],
    lost: LostInGraphError | None = None,
) -> Captured:
    """Run submodules as they are, unless the code between them reads what is lost."""
    calls = []
    for mode in (True, False):
        with in_mode(model, training=mode), preserve_state(state):
            calls.append(watch_calls(model, example))
    closed = closed_modules(calls, state)
    check_open(closed, cut)
    if lost is not None and _graph_reads(model, lost.names, closed):
        raise lost
    training, evaluation = (trace_submodules(x, closed, example, state) for x in calls)
    with in_mode(model, training=False):
        seen_evaluating = _watch(model, evaluation, example)
        evaluation, _ = tried(model, calls[1], evaluation, closed, example)
    with in_mode(model, training=True):
        seen = more = _watch(model, training, example)
        training, fixed = tried(model, calls[0], training, closed, example)
        try:
            if not fixed:
                more = _watch(model, training, example.resized(example.num_samples + 1))
        except Exception as error:
            fixed = f"{type(error).__name__}: {error}"
        seen = _with_known_shapes(model, training, example, seen)
    seen_all = (seen, more, seen_evaluating)
    return captured(
        model, example, (training, evaluation), seen_all, fixed, between_modules=True
    )


def _of_export(
    model: nn.Module, example: Example, state: State, both: bool
) -> Captured:
    """Export the model; modules that cannot be exported are run as they are."""
    closed = _parallel_modules(model, state)
    while True:
        try:
            return _with_modules_as_is(model, example, state, closed, both)
        except _StoppedInModuleError as error:
            new = {x for path in error.paths for x in _modules_like(model, path)}
            if new <= closed or not _can_close(model, error, closed | new):
                raise error.why from error
            closed |= new


def _parallel_modules(model: nn.Module, state: State) -> frozenset[str]:
    """Return the modules that have DTensors, or hooks: no graph holds such tensors."""
    if not any(map(is_sharded, state.tensors.values())):
        return frozenset()
    return frozenset(
        path
        for path, x in model.named_modules()
        if any(map(is_sharded, x.parameters(recurse=False))) or (path and has_hooks(x))
    )


def _can_close(
    model: nn.Module, stopped: _StoppedInModuleError, closed: frozenset[str]
) -> bool:
    """Whether it may help to run modules as they are; of the model itself, its hooks.

    Not where others, which the graph has, read what they keep.
    """
    why = stopped.why
    if not isinstance(why, LostInGraphError):
        return "" not in stopped.paths or has_hooks(model)
    return "" not in stopped.paths and not _graph_reads(model, why.names, closed)


def _graph_reads(
    model: nn.Module, names: Sequence[str], closed: Collection[str]
) -> bool:
    """Whether code that a graph has names attributes, and has no others of these names.

    Args:
        model: the model.
        names: the attributes' names, with their modules' paths.
        closed: the modules that run as they are.
    """
    others = [
        module
        for path, module in model.named_modules()
        if not path or not any(x in closed for x in prefixes(path))
    ]

    def is_read(name: str) -> bool:
        path, _, attribute = name.rpartition(".")
        value = getattr(model.get_submodule(path), attribute, None)
        readers = (x for x in others if getattr(x, attribute, value) is value)
        return any(attribute in used_by_forward(type(x)) for x in readers)

    return any(map(is_read, names))


class _StoppedInModuleError(Exception):
    """The export stopped.

    Args:
        paths: the modules that may run as they are: the innermost that was running, or
            those that a graph would lose something of. Empty names the model itself.
        why: the error to raise if nothing else helps.
    """

    def __init__(self, paths: frozenset[str], why: CaptureError) -> None:
        super().__init__(paths)
        self.paths = paths
        self.why = why


class _DecidesBySamplesError(_StoppedInModuleError):
    """The graph is not right for the example's number of samples."""


def _modules_like(model: nn.Module, path: str) -> frozenset[str]:
    """Return the modules of its class; only itself if it is torch's, or the model."""
    kind = type(model.get_submodule(path))
    if not path or kind.__module__.startswith("torch."):
        return frozenset({path})
    modules = model.named_modules()
    return frozenset(other for other, x in modules if type(x) is kind)


def _with_modules_as_is(
    model: nn.Module, example: Example, state: State, closed: frozenset[str], both: bool
) -> Captured:
    number, fixed = samples_to_export(example), ""
    while True:
        try:
            traces = _export_both(model, example, state, closed, both, number)
            break
        except _StoppedInModuleError as error:
            if not number:
                raise
            decides = isinstance(error, _DecidesBySamplesError)
            own = example.num_samples if decides else 0
            # A size of 1, or of a length, would be taken for that.
            number = 0 if own in (1, number, *example.open.values()) else own
            fixed = "" if number else str(error.why)
    training, evaluation = traces
    size = example.num_samples if fixed else example.num_samples + 1
    with in_mode(model, training=True):
        seen = evaluating = _watch(model, training, example)
        more = _watch(model, training, example.resized(size))
    if evaluation is not training:
        with in_mode(model, training=False):
            evaluating = _watch(model, evaluation, example)
    seen_all = (seen, more, evaluating)
    as_is = bool(closed)
    return captured(model, example, traces, seen_all, fixed, between_modules=as_is)


def _export_both(
    model: nn.Module,
    example: Example,
    state: State,
    closed: frozenset[str],
    both: bool,
    num_samples: int,
) -> tuple[Trace, Trace]:
    traces = []
    for training in (True, False):
        with in_mode(model, training=training), _read_modes(model) as read:
            runs = seen_calls(model, example, state) if closed else ()
            _refuse_unknown_lengths(example, closed)
            as_is = ModulesAsIs(closed, runs, example)
            try:
                found = export(model, example, num_samples=num_samples, as_is=as_is)
            except CaptureError as error:
                paths = (x.partition("@")[0] for x in reversed(as_is.running))
                running = frozenset([next((x for x in paths if x not in closed), "")])
                names = error.names if isinstance(error, LostInGraphError) else ()
                lost = frozenset(name.rpartition(".")[0] for name in names)
                raise _StoppedInModuleError(lost or running, error) from error
        traces.append(to_trace(found, state, as_is, example))
        _check_samples(model, traces[-1], example)
        is_same = not (read or closed) and all(map(_has_plain_mode, model.modules()))
        if is_same or not both:
            return traces[0], traces[0]
    return traces[0], traces[1]


def _check_samples(model: nn.Module, trace: Trace, example: Example) -> None:
    """Refuse a trace that is not right for the example's number of samples.

    A decision for one sample often changes nothing: `if len(x) > 1: y = y.expand(...)`.
    """
    fault_of = trace.open.fault_of_samples
    if fault_of(1):
        with preserve_attributes(model), preserve_numbers():
            for module in model.modules():
                for hooks in hooks_of(module, forward=False):
                    hooks.clear()
            if computes_as(model, trace, example.resized(1)):
                trace.open.known.add(1)
    if fault := fault_of(example.num_samples):
        raise _DecidesBySamplesError(frozenset(), CaptureError(fault))


def _refuse_unknown_lengths(example: Example, closed: Collection[str]) -> None:
    if example.open and closed:
        raise CaptureError(
            f"{min(closed)} runs as it is, and it is not known what shapes it returns "
            "for other lengths"
        )


@dataclass(eq=False, slots=True)
class _ModeWatch:
    """Notes which modules of a model are asked for their mode, by any thread.

    Args:
        own: the model's modules.

    Attributes:
        read: those whose `training` was read.
    """

    own: frozenset[nn.Module]
    read: set[nn.Module] = field(default_factory=set)


_LOCK: Final = Lock()
_WATCHES: Final[list[_ModeWatch]] = []  # of all captures under way


@contextmanager
def _read_modes(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yield the modules of a model whose `training` is read while the block runs."""
    watch = _ModeWatch(frozenset(model.modules()))
    with _LOCK:
        _WATCHES.append(watch)
        nn.Module.training = property(_mode_of, _set_mode)  # type: ignore[assignment]
    try:
        yield watch.read
    finally:
        with _LOCK:
            _WATCHES.remove(watch)
            if not _WATCHES:
                del nn.Module.training


def _mode_of(module: nn.Module) -> Any:
    for watch in tuple(_WATCHES):
        if module in watch.own:
            watch.read.add(module)
    try:
        return vars(module)["training"]
    except KeyError:
        raise AttributeError("training") from None


def _set_mode(module: nn.Module, training: Any) -> None:
    vars(module)["training"] = training


def _has_plain_mode(module: nn.Module) -> bool:
    """Whether a module's mode is its attribute `training` and nothing else."""
    kind = type(module)
    own = [x for x in kind.__mro__ if x is not nn.Module]
    has_more = any({"training", "train", "eval"} & vars(x).keys() for x in own)
    return not (has_more or {"__dict__", "vars"} & used_by_forward(kind))


def _watch(model: nn.Module, trace: Trace, example: Example) -> Observation:
    """Observe a trace on fake tensors if its modules allow that, else on real ones."""
    try:
        with preserve_attributes(model):
            return observe(trace, example)
    except Exception:
        with preserve_attributes(model):
            return observe(trace, example, real=True)


def _with_known_shapes(
    model: nn.Module, trace: Trace, example: Example, seen: Observation
) -> Observation:
    """Forget shapes that depend on the data: no message can carry such a tensor."""
    equal = example.resized(1).resized(example.num_samples)
    return seen.with_shapes_of_both(_watch(model, trace, equal))
