"""Refuses losses and metrics that read what a worker does not have.

    loss(output, targets)      output             the only way that gradients go back
                               weights            of other stages: copies that no
                                                  update reaches; of stages with a
                                                  delay: newer ones than the forward's
                               module.aux, ...    computed before the loss was called

The graph behind the loss shows what is read with a gradient, and a mode that sees all
calls of torch what is read without one. Both look at the first microbatch; where the
code reaches the model, at all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hocket.errors import ModelError
from hocket.model.stages.stage import StageModule
from hocket.model.trace.observe import storage_of
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.reached import reached
from hocket.run.data.loss import TOTAL

_OWN: Final = frozenset(vars(nn.Module()))
# Calls that read values and return no tensor.
_VALUES: Final = frozenset(
    {
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__"),
    }
)


class ModelTensors:
    """The uncut model's parameters and buffers by name; it keeps none of them alive.

    Args:
        model: the uncut model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            self.names[x] = name

    def is_reached(self, function: object) -> bool:
        """Return whether a function's code reaches any of it."""
        own = {id(x) for x in self.names}
        found = nn.ModuleList()
        for x in reached(function).values():
            if isinstance(x, nn.Module):
                found.append(x)
            elif id(x) in own:
                return True
        return any(id(x) in own for x in (*found.parameters(), *found.buffers()))

    def where(self, node: Any) -> str:
        """Return what is known of a tensor that was computed before a loss."""
        for name, x in self.kept():
            if x.grad_fn is node:
                return name
        found = (self.names[x] for x in graph_behind(node, ())[0] if x in self.names)
        return f"a tensor that was computed from {next(found, node.name())}"

    @contextmanager
    def missing_named(self) -> Iterator[None]:
        """Name attributes of its modules that are not there: no forward made them."""
        try:
            yield
        except AttributeError as error:
            model = self.model()
            if model is None or not any(x is error.obj for x in model.modules()):
                raise
            raise _kept_error(f"an attribute ({error})") from error

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are attributes of the modules, by name."""
        model = self.model()
        for path, module in model.named_modules() if model is not None else ():
            for name, value in vars(module).items():
                for x in () if name in _OWN else tensors_in(value):
                    yield f"{path}.{name}" if path else name, x


@dataclass(frozen=True, slots=True)
class PlayedStage:
    """One stage of this worker.

    Args:
        module: the stage.
        delay: by how many updates its weights are old.
    """

    module: StageModule
    delay: int


class LossReads:
    """Watches what a loss reads, and metrics.

    Args:
        function: the loss.
        tensors: the uncut model's.
        stages: returns this worker's stages of the model.
    """

    def __init__(
        self,
        function: object,
        tensors: ModelTensors,
        stages: Callable[[], Sequence[PlayedStage]],
    ) -> None:
        self._tensors = tensors
        self._stages = stages
        self._stays = tensors.is_reached(function)
        self._held = {id(x) for x in reached(function).values()}
        self._is_checked = False

    @property
    def is_on(self) -> bool:
        """Whether the next loss is looked at."""
        return self._stays or not self._is_checked

    def losses(
        self,
        compute: Callable[..., dict[str, Tensor]],
        function: Any,
        output: Any,
        targets: Any,
        *others: Any,
    ) -> dict[str, Tensor]:
        """Compute named losses, and look at what they read.

        Args:
            compute: as `losses_of`.
            function: the loss.
            output: the model's output.
            targets: the targets.
            others: outputs of other nets.

        Raises:
            ModelError: they read something beside the outputs that is not followed.
        """
        begin, trains = torch.autograd._get_sequence_nr(), torch.is_grad_enabled()
        with self._watched("loss", trains=trains):
            named = compute(function, output, targets, *others)
        if trains:
            self._check(named[TOTAL], (output, others), begin)
        return named

    @contextmanager
    def _watched(self, what: str, *, trains: bool) -> Iterator[None]:
        """Watch one call.

        Args:
            what: "loss" or "metrics function".
            trains: whether forwards may read old weights.

        Raises:
            ModelError: it reads weights or buffers that are not here, or newer ones.
        """
        watch = _Watch({storage_of(x): why for x, why in self._refused(trains=trains)})
        with watch if watch.names else nullcontext(), self._tensors.missing_named():
            yield
        _refuse(what, watch.seen)

    def metrics(self, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return a metrics function that is watched where it may read the model."""
        if function is None:
            return None
        stays, seen = self._tensors.is_reached(function), list[bool]()

        def call(*given: Any) -> Any:
            if seen and not stays:
                return function(*given)
            seen.append(True)
            with self._watched("metrics function", trains=False):
                return function(*given)

        return call

    def _check(self, total: Tensor, outputs: Any, begin: int) -> None:
        """Look at the graph behind a loss.

        Args:
            total: the loss.
            outputs: what it was given.
            begin: autograd's number of the first node that the loss could make.

        Raises:
            ModelError: it reads something beside the outputs that is not followed.
        """
        self._is_checked = True
        leaves = refuse_kept(total, outputs, begin, self._tensors)
        whys = {id(x): why for x, why in self._refused(trains=True)}
        _refuse("loss", [whys[id(x)] for x in leaves if id(x) in whys])
        own = {id(x) for one in self._stages() for x in one.module.parameters()}
        for x in leaves:
            is_weight = isinstance(x, nn.Parameter) or id(x) in self._held
            if is_weight and id(x) not in own:
                raise ModelError(
                    f"the loss reads a weight of shape {tuple(x.shape)} that wants a "
                    "gradient, and the optimizer does not have it: let a "
                    "torch.nn.Module hold it, and give that as the loss. What "
                    "is not to be trained must not want a gradient"
                )

    def _refused(self, *, trains: bool) -> list[tuple[Tensor, str]]:
        """Return the tensors that must not be read, and what they are."""
        known = {name: x for x, name in self._tensors.names.items()}
        here, fixed = set[str](), frozenset[str]()
        refused: list[tuple[Tensor, str]] = []
        for one in self._stages():
            fixed = one.module.fixed_buffers
            for name, x in one.module.named_parameters():
                if trains and one.delay and name in known and x.requires_grad:
                    refused.append((x, f"{name} (updated with a delay)"))
                else:
                    here.add(name)
            if one.module.is_last:  # others may have begun later microbatches
                here.update(name for name, _ in one.module.named_buffers())
        away = {
            name: x
            for name, x in known.items()
            if name not in here and _may_change(name, x, fixed)
        }
        refused += [(x, name) for name, x in away.items()]
        paths = {name.rpartition(".")[0] for name in away}
        refused += [
            (x, name)
            for name, x in self._tensors.kept()
            if name.rpartition(".")[0] in paths
        ]
        return refused


def _may_change(name: str, tensor: Tensor, fixed: Collection[str]) -> bool:
    """Return whether training may change a parameter, or a buffer."""
    is_weight = isinstance(tensor, nn.Parameter)
    return tensor.requires_grad if is_weight else name not in fixed


def refuse_kept(
    total: Tensor, outputs: Any, begin: int, tensors: ModelTensors
) -> list[Tensor]:
    """Return the leaves that a loss reads, beside those that its outputs are.

    Args:
        total: the loss.
        outputs: what it was given.
        begin: autograd's number of the first node that the loss could make.
        tensors: the uncut model's.

    Raises:
        ModelError: it reads a tensor with a graph that was made before.
    """
    given = tensors_in(outputs)
    if not given:
        return []  # they are in objects that are not looked into
    known = {x.grad_fn for x in given}
    leaves, nodes, _ = graph_behind(total.grad_fn, known, begin)
    if nodes:
        raise _kept_error(", ".join(dict.fromkeys(map(tensors.where, nodes))))
    own = {id(x) for x in given}
    return [x for x in leaves if id(x) not in own]


def graph_behind(
    start: Any, known: Collection[Any], begin: int = 0
) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return the leaves behind a node, nodes whose number is below `begin`, and others.

    Args:
        start: the node.
        known: nodes behind which nothing is looked at.
        begin: see above; nothing is looked at behind these, either.
    """
    leaves, early, nodes = list[Tensor](), list[Any](), list[Any]()
    todo, seen = [start], {None, *known}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        elif node._sequence_nr() < begin:
            early.append(node)
        else:
            nodes.append(node)
            todo += [following for following, _ in node.next_functions]
    return leaves, early, nodes


def _kept_error(what: str) -> ModelError:
    return ModelError(
        f"the loss reads {what}, which a forward has kept and which is not the model's "
        "output: stages and microbatches run apart, and gradients come back through "
        "outputs alone. Return it from the model's forward, beside the output, and let "
        "the loss take it from there"
    )


def _refuse(what: str, names: Sequence[str]) -> None:
    """Raise an error that names what is read, if anything is.

    Raises:
        ModelError: something is.
    """
    if not names:
        return
    first, *others = dict.fromkeys(names)
    more = f" and {len(others)} more" if others else ""
    raise ModelError(
        f"the {what} reads {first}{more} of the model, which other stages compute or "
        "train: here it is not what the forward has read. Take the optimizer's "
        "weight_decay for a penalty, let the optimizer add it, or return the term from "
        "the model's forward; for a metric, read pipeline.state_dict()"
    )


class _Watch(TorchFunctionMode):
    """Finds calls of torch that read the values of some tensors.

    Args:
        names: what the tensors are, by the identity of their memory.

    Attributes:
        names: see above.
        seen: what was read.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function, and look at what it was given."""
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        makes_like = name.endswith("_like") or name.startswith("new_")
        if name in _VALUES or (tensors_in(out) and not makes_like):
            for x in tensors_in((args, kwargs)):
                with suppress(RuntimeError):  # it has no memory of its own
                    if (found := self.names.get(storage_of(x))) is not None:
                        self.seen.append(found)
        return out
