"""Observes a trace's run: shapes, gradients, shared memory, writes and random draws.

The run is on fake tensors: they have shapes and an autograd graph but no data, so it
costs no memory, computes nothing and changes nothing. A module whose Python code reads
the data cannot run so; then real tensors are used, and changes are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.model.trace.are_close import are_close
from hocket.model.trace.example import Example
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.replaced import replaced
from hocket.model.trace.state import State, overwrite
from hocket.model.trace.trace import Trace
from hocket.model.trace.value import order_of

# What begins a transform of torch.func that is like a backward.
_TRANSFORMS: Final = "_grad_increment_nesting", "_jvp_increment_nesting"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The shape and type of an observed tensor.

    Args:
        shape: the shape with the example's number of samples.
        dtype: its type.
        requires_grad: whether a gradient flows back through it.
        order: see `order_of`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node did in the run.

    Args:
        structure: what it returned, with `TensorInfo` in place of tensors; None if
            shapes depend on the data.
        makes: the memory that what it returned lives in.
        touches: the same, and the memory of its inputs.
        writes: the part of it that the node changed.
        is_random: whether it drew random numbers.
        runs_backward: whether it ran a backward of its own.
    """

    structure: Any
    makes: frozenset[int]
    touches: frozenset[int]
    writes: frozenset[int]
    is_random: bool
    runs_backward: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts of one run of a trace.

    Args:
        facts: what each call did.
        memory: where the batch, parameters and buffers live, by node.
    """

    facts: Mapping[fx.Node, NodeFacts]
    memory: Mapping[fx.Node, frozenset[int]]

    def with_shapes_of_both(self, other: Observation) -> Observation:
        """Return it without the shapes that the other one does not have.

        Args:
            other: a run of the same trace on other samples, as many: where it has
                another shape, shapes depend on the data.
        """
        facts = {
            node: fact
            if fact.structure == other.facts[node].structure
            else replace(fact, structure=None)
            for node, fact in self.facts.items()
        }
        return Observation(facts, self.memory)


def observe(trace: Trace, example: Example, *, real: bool = False) -> Observation:
    """Run a trace once and return what each node did.

    Args:
        trace: one mode of a model.
        example: the example to run it on.
        real: whether to run on the model's own tensors instead of fake ones.
    """
    if real:
        with preserve_state(trace.state):
            return _TraceRun(trace, example, dict(trace.state.tensors), real=True).all()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    example = example.mapped(fake.from_tensor)
    state = {name: fake.from_tensor(x) for name, x in trace.state.tensors.items()}
    with fake:
        return _TraceRun(trace, example, state, real=False).all()


def computes_as(model: nn.Module, trace: Trace, example: Example) -> bool:
    """Whether a model computes what its trace does, in the mode that it is in.

    Both run on fake tensors. Values are equal if equal calls of operators made their
    memory, and they lie alike in it: a view of all is no change. Where that is not so,
    or a module reads data, outputs and gradients for this example are compared. The
    caller restores what the model's forward sets.
    """
    state = trace.state.tensors
    with suppress(Exception):  # a module reads data
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        faked = example.mapped(fake.from_tensor)
        fakes = {name: fake.from_tensor(x) for name, x in state.items()}
        known = [*fakes.values(), *tensors_in(faked.leaves)]
        with fake, _WorkWatch(known) as own:
            outputs = _outputs(model, trace, faked, fakes)
        with fake, _WorkWatch(known) as traced:
            found = _TraceRun(trace, faked, fakes, real=False).outputs()
        made = [own.name(x) for x in (*outputs, *known)]
        if made == [traced.name(x) for x in (*found, *known)]:
            return True
    try:
        with preserve_state(trace.state):
            outputs = _with_gradients(_outputs(model, trace, example, state), state)
        with preserve_state(trace.state):
            found = _TraceRun(trace, example, state, real=True).outputs()
            found = _with_gradients(found, state)
    except Exception:  # the model refuses such a batch, or is on meta
        return False
    return are_close(outputs, found)


def _with_gradients(
    outputs: Sequence[Tensor], state: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return outputs, and a gradient of them for each parameter; empty without one."""
    weights = [x for x in state.values() if x.requires_grad]
    # Of a plain sum, that of a softmax or of a norm would be zero.
    sums = [
        (x * torch.arange(x.numel(), device=x.device).cos().view(x.shape)).sum()
        for x in outputs
        if x.requires_grad and x.is_floating_point()
    ]
    grads: Sequence[Tensor | None] = ()
    if sums:
        grads = torch.autograd.grad(sums, weights, allow_unused=True)
    return [*outputs, *(torch.empty(0) if x is None else x for x in grads)]


def _outputs(
    model: nn.Module, trace: Trace, example: Example, state: Mapping[str, Tensor]
) -> list[Tensor]:
    """Call a model with tensors in place of its own."""
    names = trace.state.names.items()
    named = {name: state[first] for first, each in names for name in each}
    args, kwargs = example.call()
    with torch.enable_grad():
        return tensors_in(torch.func.functional_call(model, named, args, kwargs))


class _WorkWatch(TorchDispatchMode):
    """Names each tensor by the calls that made it.

    Args:
        given: tensors that have names of their own.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = {storage_of(x): i for i, x in enumerate(given)}
        self.kept: list[Any] = []  # or memory would be used again

    def name(self, tensor: Tensor) -> Hashable:
        """Return how a tensor was made, how it lies in memory, and if it is trained."""
        made = self.made.get(storage_of(tensor), id(tensor))
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return made, *place, tensor.dtype, tensor.requires_grad

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = pytree.tree_map_only(Tensor, self.name, (args, kwargs))
        call = str((func, given))
        out = func(*args, **(kwargs or {}))
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        known = set() if func._schema.is_mutable else set(map(storage_of, inputs))
        for i, x in enumerate(outputs):
            if storage_of(x) not in known:
                self.made[storage_of(x)] = hash((call, i))
        self.kept += [out, inputs]
        return out


class _TraceRun:
    """One run; every value is kept, so that no memory is reused."""

    def __init__(
        self, trace: Trace, example: Example, state: Mapping[str, Tensor], *, real: bool
    ) -> None:
        self.trace = trace
        self.state = state
        self.real = real
        self.random = _RandomWatch()
        self.backwards: list[bool] = []  # that the call under way has run
        self.values: dict[fx.Node, Any] = {trace.num_samples: example.num_samples}
        for node, position in trace.leaf_of.items():
            self.values[node] = example.leaves[position]
        for (position, dim), node in trace.lengths.items():
            self.values[node] = example.leaves[position].shape[dim]

    def all(self) -> Observation:
        facts = {}
        noticed = noticed_backwards(lambda: self.backwards.append(True))
        with torch.enable_grad(), self.random, noticed:
            for node in self.trace.graph.nodes:
                if node.op == "get_attr":
                    self.values[node] = self._attribute(str(node.target))
                elif node.op.startswith("call"):
                    facts[node] = self._call(node)
        memory = {
            node: frozenset(map(storage_of, tensors_in(value)))
            for node, value in self.values.items()
            if node not in facts
        }
        return Observation(facts, memory)

    def outputs(self) -> list[Tensor]:
        """Run all, and return the tensors that the model returns."""
        self.all()
        value_of = self.values.__getitem__
        return tensors_in(fx.node.map_arg(self.trace.output.args[0], value_of))

    def _attribute(self, target: str) -> Any:
        if target in self.state:
            return self.state[target]
        return self.trace.objects[target]

    def _call(self, node: fx.Node) -> NodeFacts:
        value_of = self.values.__getitem__
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        inputs = tensors_in((args, kwargs))
        versions = [x._version for x in inputs]
        self.random.seen = False
        self.backwards.clear()
        out = self._function(node)(*args, **kwargs)
        self.values[node] = out
        outputs = tensors_in(out)
        pairs = zip(inputs, versions, strict=True)
        written = [x for x, version in pairs if x._version != version]
        has_shape = node not in self.trace.data_sized
        return NodeFacts(
            pytree.tree_map_only(Tensor, _tensor_info, out) if has_shape else None,
            frozenset(map(storage_of, outputs)),
            frozenset(map(storage_of, [*inputs, *outputs])),
            frozenset(map(storage_of, written)),
            self.random.seen,
            bool(self.backwards),
        )

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_function":
            assert callable(node.target)
            return node.target
        module = self.trace.objects[str(node.target)]
        assert isinstance(module, nn.Module)
        if self.real:
            return module
        path = self.trace.path_of(node)
        own = [*module.named_parameters(), *module.named_buffers()]
        first = self.trace.state.first_name
        fakes = {name: self.state[first[f"{path}.{name}"]] for name, _ in own}
        return lambda *args, **kwargs: torch.func.functional_call(
            module, fakes, args, kwargs
        )


class _RandomWatch(TorchDispatchMode):
    """Detects operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen |= is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def noticed_backwards(notice: Callable[[], object]) -> Iterator[None]:
    """Call a function where Python code begins a backward, or a transform of it.

    That is `torch.autograd.grad`, `Tensor.backward`, `torch.func.grad`, `jvp` and such.
    """

    def noticed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            notice()
            return function(*args, **kwargs)

        return run

    with (
        replaced(torch.autograd, "_engine_run_backward", by=noticed),
        replaced(eager_transforms, *_TRANSFORMS, by=noticed),
    ):
        yield


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an operator draws random numbers.

    Attention draws none where its dropout is 0.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0) != 0.0)


def _tensor_info(tensor: Tensor) -> TensorInfo:
    shape, order = tuple(tensor.shape), order_of(tensor)
    return TensorInfo(shape, tensor.dtype, tensor.requires_grad, order)


def storage_of(tensor: Tensor) -> int:
    """Return an identity of a tensor's memory; fake tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def preserve_state(state: State) -> Iterator[None]:
    """Restore buffers and random state when the block ends."""
    # By default the random state of every GPU would be saved.
    devices = {x.device for x in state.tensors.values() if x.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        before = {
            name: tensor.detach().clone()
            for name, tensor in state.tensors.items()
            if not state.is_parameter(name)
        }
        try:
            yield
        finally:
            for name, tensor in before.items():
                overwrite(state.tensors[name], tensor)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set train or eval mode for a while; frozen submodules stay in eval mode."""
    modes = {module: module.training for module in model.modules()}
    if not training or not model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
