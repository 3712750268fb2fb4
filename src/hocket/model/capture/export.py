"""Runs torch.export, and raises errors for what it loses silently.

torch.export 2.13 silently loses four things: the backward of a custom autograd
function, a buffer that a submodule reassigns, state kept in a plain attribute, and
a batch dimension that the model pins to the example's. All four are caught here.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
)
from inspect import Parameter
from io import StringIO
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._python_dispatch import _disable_current_modes

from hocket.errors import CaptureError
from hocket.model.capture.as_is import ModulesAsIs
from hocket.model.capture.attribute_writes import AttributeSnapshot, preserve_attributes
from hocket.model.capture.lost_in_graph import (
    LostInGraphError,
    check_keeps_no_state,
    hooks_noted,
    preserve_numbers,
)
from hocket.model.capture.no_checkpointing import NoCheckpointing
from hocket.model.capture.source_line import OTHER_WAY, source_line_of
from hocket.model.guards.reached import reached_by
from hocket.model.trace.example import Example
from hocket.model.trace.observe import noticed_backwards
from hocket.model.trace.per_sample import PerSample
from hocket.model.trace.replaced import replaced
from hocket.model.trace.sizes import Condition, OpenSizes

# Unlikely to be a number that the model itself compares the batch size with.
EXPORT_SAMPLES: Final = 13
ASSIGNED: Final = "hocket_assigned_buffer"
_LOST: Final = (
    "the model cannot be captured: it calls torch.utils.checkpoint, and a captured "
    "graph would keep all activations all the same"
)


_LOOKS: Final = ("__bool__", "__float__", "__index__", "__int__", "item")


def constants_shown() -> AbstractContextManager[None]:
    """Answer reads of constants while the block runs; pass on all others.

    An exporter knows shapes and no numbers, so reading a number stops it:

        mask = torch.ones(t, t).tril()
        if (mask == other).all():           known, though: it follows from t alone

    Tensors made without the batch, the weights and random numbers are computed here
    when they are read, from the graph as far as it is recorded.
    """
    return replaced(Tensor, *_LOOKS, by=_answering)


def _answering(look: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def answer(tensor: Tensor) -> Any:
        node = _node_of(tensor)
        if node is not None:
            # The modes that trace would trace what is computed here, too.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                value = _computed(node.graph).get(node)
                if value is not None:
                    return look(value)
        return look(tensor)

    return answer


def _node_of(tensor: Tensor) -> fx.Node | None:
    """Return the call that made a tensor, if it is being traced."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    slot = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _computed(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Return all constants of a graph; none if an unknown call changes one."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        target, inputs = node.target, node.all_input_nodes
        if node.op != "call_function" or not isinstance(target, OpOverload):
            continue
        is_known = all(x in values for x in inputs)
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        if is_known and not is_random:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*args, **kwargs)
        elif target._schema.is_mutable and any(x in values for x in inputs):
            return {}
    return values


def export(
    model: nn.Module, example: Example, *, num_samples: int, as_is: ModulesAsIs
) -> tuple[ExportedProgram, OpenSizes]:
    """Return the model's graph in the mode that it is in, and what it is right for.

    Args:
        model: the module, in training or evaluation mode.
        example: what it is called with.
        num_samples: how many to export with, where any number is to do; 0 fixes the
            example's.
        as_is: the modules whose calls become one operator each.

    Raises:
        CaptureError: the model's code cannot be captured, or not with an open number
            of samples.
    """
    _refuse_lists(example)
    as_is.special |= reached_by(model).unseen
    given, notes, changed = example, AttributeSnapshot(model), list[str]()
    any_batch = num_samples > 0
    if any_batch:
        example = example.resized(num_samples)
    example = example.stretched()
    args, kwargs = example.call()
    call = _with_every_keyword(model, kwargs)
    shapes = ShapesCollection()
    dims: dict[int, dict[int, Any]] = {}
    decided: list[Condition] = []
    for i, dim in _open_dims(example, any_batch=any_batch):
        dims.setdefault(i, {})[dim] = Dim.AUTO
    for i, auto in dims.items():
        shapes[example.leaves[i]] = auto
    state = _tensor_attributes(model)
    with (
        _quiet() as warned,
        _watched(model),
        preserve_attributes(model),
        preserve_numbers(),
        hooks_noted(as_is.note_special),
        _noted(decided),
    ):
        model.forward = call
        as_is.put_in(model)
        model.register_forward_hook(lambda *_: changed.extend(notes.changed()))
        try:
            dynamic = shapes.dynamic_shapes(model, args, kwargs)
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=dynamic, strict=False
            )
        except CaptureError:
            raise
        except Exception as error:
            raise _capture_error(error) from error
    _check_attributes(state, [str(warning.message) for warning in warned])
    if changed:
        names = check_keeps_no_state(model, given, list(dict.fromkeys(changed)))
        as_is.special |= {
            name.rpartition(".")[0]: f"each forward changes {name}" for name in names
        }
    _check_open(program, example, any_batch=any_batch)
    return program, _open_sizes(program, example, decided)


def _noted(decided: list[Condition]) -> AbstractContextManager[None]:
    """Note what the model's code decides by sizes while the block runs.

    torch.export notes no condition that any size of 2 or more fulfils. What operators
    decide is left out: they decide again whenever they run.
    """

    def noting(look: Callable[[torch.SymBool], bool]) -> Callable[..., bool]:
        def answer(condition: torch.SymBool) -> bool:
            found = look(condition)
            if proxy_tensor.get_proxy_mode() is not None:
                decided.append((condition.node._expr, found))
            return found

        return answer

    return replaced(torch.SymBool, "__bool__", by=noting)


def samples_to_export(example: Example) -> int:
    """Return a number of samples that is no length: it would be taken for one."""
    return EXPORT_SAMPLES + 4 * (EXPORT_SAMPLES in example.open.values())


def _open_dims(example: Example, *, any_batch: bool) -> list[tuple[int, int]]:
    cut = [i for i, is_cut in enumerate(example.batched) if is_cut and any_batch]
    return [*((i, 0) for i in cut), *example.open]


def _open_sizes(
    program: ExportedProgram, example: Example, decided: Sequence[Condition]
) -> OpenSizes:
    """Return what sizes a program is right for."""
    values = _input_values(program)
    cut = [(i, 0) for i, is_cut in enumerate(example.batched) if is_cut]
    sizes = {(i, dim): values[i].shape[dim] for i, dim in (*cut, *example.open)}
    # As they were before one was found to be another: that is a condition, too.
    symbols = {
        place: size.node._expr
        for place, size in sizes.items()
        if not is_concrete_int(size)
    }
    if not symbols:
        return OpenSizes()
    env = values[next(iter(symbols))[0]].fake_mode.shape_env
    return OpenSizes.of(
        symbols,
        [*((guard.expr, True) for guard in env.guards), *decided],
        env.var_to_range,
        example.open,
    )


def _input_values(program: ExportedProgram) -> list[Any]:
    nodes = {node.name: node for node in program.graph.nodes}
    names = program.graph_signature.user_inputs
    return [nodes[str(x)].meta["val"] if str(x) in nodes else x for x in names]


def _with_every_keyword(
    model: nn.Module, keywords: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return its forward, whose signature names what goes into `**kwargs`.

    torch.export 2.13 fails with "Must provide a tree_name" where one is not named.
    """
    forward = model.forward
    known = inspect.signature(forward).parameters
    if keywords.keys() <= known.keys():
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named = [x for x in known.values() if x.kind is not Parameter.VAR_KEYWORD]
    more = [Parameter(x, Parameter.KEYWORD_ONLY) for x in keywords if x not in known]
    call.__signature__ = inspect.Signature([*named, *more])  # type: ignore[attr-defined]
    return call


def _refuse_lists(example: Example) -> None:
    for name, leaf in zip(example.names, example.leaves, strict=True):
        if isinstance(leaf, PerSample | np.ndarray):
            raise CaptureError(
                f"the model cannot be captured: the argument {name} is a "
                f"{type(leaf).__name__}, and a captured graph takes nothing but "
                f"tensors: torch.from_numpy(x) makes one of an array\n{OTHER_WAY}"
            )


def _capture_error(error: Exception) -> CaptureError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return CaptureError(
        f"the model cannot be captured{_operation(error)}: {type(error).__name__}: "
        f"{reason.strip()}\n"
        f"{source_line_of(traceback.extract_tb(error.__traceback__))}\n{OTHER_WAY}"
    )


def _operation(error: Exception) -> str:
    """Return the last operator before the model's code read the data, if known."""
    code = str(getattr(error, "partial_fx_graph", ""))
    operators = re.findall(r"torch\.ops\.([\w.]+)\(", code)
    return f", at the operation {operators[-1]}" if operators else ""


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Suppress the exporter's log and warnings; its errors are raised."""
    loggers = [logging.getLogger(x) for x in ("torch.fx", "torch.export", "torch")]
    levels = [logger.level for logger in loggers]
    record = warnings.catch_warnings(record=True)
    with record as warned, redirect_stderr(StringIO()):
        warnings.simplefilter("always")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield warned
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_no_custom_functions())
        stack.enter_context(NoCheckpointing(_LOST, LostInGraphError))
        stack.enter_context(constants_shown())
        stack.enter_context(noticed_backwards(_refuse_backward))
        stack.enter_context(_preserve_buffer_hooks())
        torch.nn.modules.module.register_module_buffer_registration_hook(
            _Assignments(model).note
        )
        yield


def _refuse_backward() -> None:
    """Refuse a backward in a forward: no graph has the backward of that."""
    raise CaptureError(
        "the model cannot be captured: its forward runs a backward of its own "
        f"(torch.autograd.grad, torch.func), which must be in a submodule\n"
        f"{source_line_of(traceback.extract_stack())}\n{OTHER_WAY}"
    )


@contextmanager
def _preserve_buffer_hooks() -> Iterator[None]:
    """Remove the global hooks that the block adds.

    torch.export 2.11 leaves one behind when it fails, which keeps the model in memory.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = list(hooks)
    try:
        yield
    finally:
        for added in hooks.keys() - before:
            del hooks[added]


@contextmanager
def _no_custom_functions() -> Iterator[None]:
    """Refuse a custom autograd function: the graph would lose its backward."""
    function = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._"):
            return original.__get__(None, cls)(*args, **kwargs)
        source_line = source_line_of(traceback.extract_stack())
        raise CaptureError(
            f"the model cannot be captured: {cls.__module__}.{cls.__qualname__} is a "
            "custom autograd function, and a captured graph would replace its backward "
            f"by that of the operators in its forward\n{source_line}\n{OTHER_WAY}"
        )

    function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        function.apply = original  # type: ignore[method-assign]


class _Assignments:
    """Marks the nodes whose values a submodule assigns to its buffers.

    torch.export itself does so for the outermost module only.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}

    def note(self, module: nn.Module, name: str, buffer: Any) -> None:
        mode = proxy_tensor.get_proxy_mode()
        path = self.paths.get(id(module))
        if mode is None or not path or not isinstance(buffer, Tensor):
            return
        slot = proxy_tensor.get_proxy_slot(buffer, mode.tracer, None)
        if slot is None:
            raise CaptureError(
                f"the model cannot be captured: {path} assigns a new tensor to its "
                f"buffer {name}; change it in place (self.{name}.copy_(...))\n"
                f"{source_line_of(traceback.extract_stack())}\n{OTHER_WAY}"
            )
        slot.proxy.node.meta[ASSIGNED] = f"{path}.{name}"


def _tensor_attributes(model: nn.Module) -> frozenset[str]:
    """Yield tensors in plain attributes of modules, named as torch.export does."""
    return frozenset(
        f"self.{path}.{name}" if path else f"self.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    )


def _check_attributes(state: frozenset[str], messages: Sequence[str]) -> None:
    """Refuse changed attributes, of which the exporter only warns.

    An attribute that held no tensor before is harmless (`self.last = x`); one that did
    is state.
    """
    assigned = {name for text in messages for name in re.findall(r"self\.[\w.]+", text)}
    changed = sorted(assigned & state)
    if changed:
        raise LostInGraphError(
            "the model cannot be captured: it keeps state in the plain attribute "
            f"{', '.join(changed)}, which a captured graph would never change; make it "
            f"a buffer (register_buffer) and change it in place\n{OTHER_WAY}",
            [name.removeprefix("self.") for name in changed],
        )


def _check_open(program: ExportedProgram, example: Example, *, any_batch: bool) -> None:
    """Refuse a dimension that the exporter silently fixes."""
    values = _input_values(program)
    for i, dim in _open_dims(example, any_batch=any_batch):
        if is_concrete_int(values[i].shape[dim]):
            what = "size" if (i, dim) in example.open else "number"
            where = f"dimension {dim}" if what == "size" else "samples"
            raise CaptureError(
                f"the model's code fixes the {what} of {where} of {example.names[i]}, "
                f"so it runs with the example's {what} only"
            )
