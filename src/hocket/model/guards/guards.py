"""Compares what a captured graph has fixed, and which tensors it reads, in each step.

    captured with   net.temperature = 1.0      x / 1.0 in the graph
    the loop sets   net.temperature = 2.0      a change: "temperature", 1.0 and 2.0

A comparison takes a fraction of a microsecond per module, and some more where a step
has driven the modules out of the processor's caches: it is by kind, in lists. Modules
are referred to weakly: where the user keeps no reference to the model, no loop can
change it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter, call, is_, itemgetter
from typing import Any, Final, TypeAlias
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from hocket.model.guards.code_text import PLAIN
from hocket.model.guards.reached import Holders, own_attributes, used_by_forward

HOOKS: Final = tuple(x for x in vars(nn.Module()) if x.endswith("_hooks"))
_GLOBAL_HOOKS: Final = tuple(
    x for x in vars(torch_module) if x.startswith("_global_") and x.endswith("_hooks")
)
_OF_ALL: Final = "(torch.nn.modules.module)."
_HELD: Final = {"_modules": "module", "_parameters": "parameter", "_buffers": "buffer"}
_TRAINED: Final = "requires_grad of "
_FACTS: Final = attrgetter("dtype", "requires_grad")  # in C; of no None
_ABSENT: Final = object()
_MOST_TEXT: Final = 60


@dataclass(frozen=True, slots=True)
class ModelChange:
    """Something that a graph has fixed, and that is otherwise now.

    Args:
        name: how the user reaches it, such as `blocks.0.rate`.
        before: its value when the model was captured, as text.
        now: its present value, as text.
        owners: the paths of the modules whose forwards may read it.
        kind: "module", "parameter" or "buffer" if it is one; "type" if it is a
            parameter that has another type; "trained" if it is `requires_grad` of one;
            "" for any other value.
    """

    name: str
    before: str
    now: str
    owners: frozenset[str]
    kind: str = ""

    @property
    def is_outside(self) -> bool:
        """Whether it is a global or a variable, or what one holds."""
        return self.name.startswith(("the global ", "the variable "))

    @property
    def is_mode(self) -> bool:
        """Whether it is a module's training or evaluation mode."""
        return self.name.rpartition(".")[2] == "training"

    @property
    def is_switch(self) -> bool:
        """Whether it may be undone by the loop, and is no change then."""
        return self.is_mode or self.kind == "trained"

    def __str__(self) -> str:
        """Return one line."""
        is_alike = self.kind == "module" and self.now == self.before
        now = f"another {self.now}" if is_alike else self.now
        return f"{self.name} was {self.before} and is {now}"


Noted: TypeAlias = dict[tuple[str, str], ModelChange]  # by name and kind


def note_changes(noted: Noted, changes: Iterable[ModelChange]) -> None:
    """Add changes to those that are noted and not followed yet."""
    for change in changes:
        # A parameter may become an attribute of the same name.
        key = change.name, change.kind
        before = noted[key].before if key in noted else change.before
        noted[key] = replace(change, before=before)
        if change.is_switch and before == change.now:
            del noted[key]


class _Registered:
    """Counts what any module of this process is given: parameters, buffers, modules.

    Attributes:
        count: how many, since `begin` was first called.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_on = False

    def begin(self) -> None:
        """Begin to count; once per process."""
        if not self._is_on:
            self._is_on = True
            torch_module.register_module_parameter_registration_hook(self._add)
            torch_module.register_module_buffer_registration_hook(self._add)
            torch_module.register_module_module_registration_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


_registered: Final = _Registered()


class Guards:
    """What the forwards of a model's modules read, as it is now.

    Of parameters and buffers it counts which tensors they are, and not their values.

    Args:
        model: the outermost module.

    Attributes:
        asking: see `Holders`.
    """

    def __init__(self, model: nn.Module) -> None:
        _registered.begin()
        self._model = ref(model)
        self._read(model)

    def changes(self) -> list[ModelChange]:
        """Return what is otherwise than when this was last called, or made."""
        model = self._model()
        if model is None:
            return []
        if self._is_as_noted(self._live_values, self._fixed_values):
            return []
        found = [*self._compare()]
        if all(type(x) in PLAIN for change in found for x in change[1:3]):
            self._note()
        else:
            self._read(model)
        return [
            ModelChange(
                name, _text(a), _text(b), frozenset(who), getattr(a, "kind", "")
            )
            for name, a, b, who in found
        ]

    def forget(self) -> None:
        """Note what forwards have changed; what they cannot change is not looked at."""
        if self._model() is not None and not self._is_as_noted(self._live_values):
            self.changes()

    def _is_as_noted(self, *reads: Callable[[], list[Any]]) -> bool:
        """Whether some values, and all that is not the modules', are as noted."""
        try:
            read = [x() for x in reads]  # the fixed ones are behind the live ones
            content, values = self._content(), (read[0][1], self._was[0][1])
            is_equal = read == self._was[: len(read)] and content == self._held
            return is_equal and _same(*values) and _same(content, self._held)
        except Exception:  # two tensors, say, have no one answer
            return False

    def _read(self, model: nn.Module) -> None:
        """Find all that is to be compared, and note its values."""
        reached = Holders(model)
        self.asking = reached.asking
        self._modules: list[tuple[str, ref[nn.Module], tuple[str, ...]]] = []
        self._tensors: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if "training" not in vars(module):  # torch.compile's, around another
                continue
            own = reached.of_module(path, module)
            # Twice, for a getter of several names returns a tuple.
            self._modules.append((path, ref(module), ("training", "training", *own)))
            for name, value in own.items():
                if isinstance(value, Tensor):
                    self._tensors[_joined(path, name)] = value
        self._see_modules()
        self._holders = [*reached.holders.values()]
        self._hooks = dict(self._hooks_now())
        self._num_hooks = RemovableHandle.next_id
        self._children = dict(self._children_now())
        self._num_registered = _registered.count
        self._note()

    def _see_modules(self) -> None:
        """Prepare the comparison of the modules that are still there."""
        self._modules = [x for x in self._modules if x[1]() is not None]
        getters = {names: itemgetter(*names) for *_, names in self._modules}
        self._refs = [one for _, one, _ in self._modules]
        self._gets = [getters[names] for *_, names in self._modules]
        own = [vars(one()) for one in self._refs]
        self._with = {kind: [i for i, x in enumerate(own) if x[kind]] for kind in _HELD}

    def _note(self) -> None:
        """Note the present values of what is compared."""
        self._was = [self._live_values(), self._fixed_values()]
        self._held = [_copied(x) for x in self._content()]

    def _live_values(self) -> list[Any]:
        """Return what forwards may change by themselves, by the fastest way.

        Raises:
            TypeError: a module is gone.
        """
        own = [*map(vars, map(call, self._refs))]  # of None: TypeError
        return [
            [*map(len, own)],
            [*chain.from_iterable(map(call, self._gets, own))],
            [x._version for x in self._tensors.values()],
            [RemovableHandle.next_id, _registered.count],  # each hook has a number
        ]

    def _fixed_values(self) -> list[Any]:
        """Return the modules' classes and submodules; which tensors parameters are.

        No hook of torch's is called where a parameter is set to None, moved or frozen,
        nor where a buffer or a submodule is removed, or changes its place.

        Raises:
            TypeError: a module is gone.
        """
        modules = [*map(call, self._refs)]
        own = [*map(vars, modules)]
        children, weights, buffers = (
            [own[i][kind] for i in places] for kind, places in self._with.items()
        )
        every = [*chain.from_iterable(map(dict.values, weights))]
        return [
            [*map(type, modules)],
            [*chain.from_iterable(children)],  # their names
            [*map(id, chain.from_iterable(map(dict.values, children)))],
            [*chain.from_iterable(buffers)],
            [*map(id, every)],
            [*map(_FACTS, [x for x in every if x is not None])],
        ]

    def _content(self) -> list[Any]:
        return [holder.read() for holder in self._holders]

    def _compare(self) -> Iterator[tuple[str, Any, Any, Collection[str]]]:
        """Yield the name of each change, both values, and who may read it."""
        yield from self._compare_modules()
        self._see_modules()
        for holder, held, content in zip(
            self._holders, self._held, self._content(), strict=True
        ):
            for name, a, b in _different(_entries(held), _entries(content)):
                yield f"{holder.name}{name}", a, b, holder.owners
        if self._num_hooks != RemovableHandle.next_id:
            now = dict(self._hooks_now())
            known = {k: self._hooks[k] for k in now if k in self._hooks}
            every = [path for path, *_ in self._modules]
            for name, a, b, owner in _described(_different(known, now)):
                yield name, a, b, every if name.startswith(_OF_ALL) else owner
        is_known = self._num_registered == _registered.count
        if not is_known or self._was[-1][1:] != self._fixed_values()[1:]:
            present = dict(self._children_now())
            yield from _described(_different(self._children, present))
            for path in self._moved(present):
                a, b = _Text("in one order"), _Text("in another")
                yield _joined(path, "_modules"), a, b, (path,)

    def _moved(self, present: Mapping[str, Any]) -> set[str]:
        """Return the modules whose submodules have other places among each other."""
        before = [x for x in self._children if x in present]
        now = [x for x in present if x in self._children]
        moved = {b for a, b in zip(before, now, strict=True) if a != b}
        return {x.removeprefix(_TRAINED).rpartition(".")[0] for x in moved}

    def _compare_modules(self) -> Iterator[tuple[str, Any, Any, Collection[str]]]:
        (sizes, values, versions, _), (types, *_) = self._was
        every = iter(values)
        for (path, one, names), get, size, kind in zip(
            self._modules, self._gets, sizes, types, strict=True
        ):
            module, noted = one(), tuple(islice(every, len(names)))
            if module is None:
                continue
            with suppress(Exception):  # as in `changes`
                own = vars(module)
                is_one = (len(own), type(module)) == (size, kind)
                if is_one and all(map(_same, get(own), noted)):
                    continue
            if kind is not type(module):
                yield _joined(path, "__class__"), kind, type(module), (path,)
            before = dict(zip(names, noted, strict=True))
            now = {"training": module.training} | own_attributes(module)
            for name, a, b in _different(before, now):
                yield _joined(path, name), a, b, (path, *self._readers(path, name))
        for (name, x), version in zip(self._tensors.items(), versions, strict=True):
            if version != x._version:
                yield f"{name} (in place)", x, x, (name.rpartition(".")[0],)

    def _readers(self, path: str, name: str) -> Iterator[str]:
        """Yield the modules around one whose code names an attribute of it."""
        for outer, one, _ in self._modules:
            is_around = path and path != outer and f"{path}.".startswith(f"{outer}.")
            if name == "training" or not (is_around or (path and not outer)):
                continue
            module = one()
            if module is not None and name in used_by_forward(type(module)):
                yield outer

    def _hooks_now(self) -> Iterator[tuple[str, Any]]:
        """Yield the hooks of all modules, and those of each."""
        for kind in _GLOBAL_HOOKS:
            hooks = getattr(torch_module, kind)
            yield f"{_OF_ALL}{kind}", _of_hooks(hooks)
        for path, one, _ in self._modules:
            module = one()
            for kind in HOOKS if module is not None else ():
                yield _joined(path, kind), _of_hooks(vars(module)[kind])

    def _children_now(self) -> Iterator[tuple[str, Any]]:
        for path, one, _ in self._modules:
            module = one()
            for kind in _HELD if module is not None else ():
                for name, held in vars(module)[kind].items():
                    text = _Text(_class_name(held))
                    text.kind = _HELD[kind]
                    dtype = _Text(getattr(held, "dtype", ""))
                    yield _joined(path, name), (id(held), text, dtype)
                    if isinstance(held, nn.Parameter):
                        is_trained = held.requires_grad
                        told = _Text(is_trained)
                        told.kind = "trained"
                        yield _TRAINED + _joined(path, name), (is_trained, told)


def _entries(content: Any) -> Mapping[str, Any]:
    return content if hasattr(content, "items") else {"": content}


def _described(
    different: Iterator[tuple[str, Any, Any]],
) -> Iterator[tuple[str, Any, Any, Collection[str]]]:
    """Yield changes of hooks or submodules, by the texts that were noted."""
    for name, *both in different:
        path = name.removeprefix(_TRAINED).rpartition(".")[0]
        if name.startswith(_TRAINED) and _ABSENT in both:  # so is the parameter
            continue
        pair: list[Any] = [(0, _Text("not set")) if x is _ABSENT else x for x in both]
        is_moved = pair[0][0] == pair[1][0]
        if is_moved and pair[0][-1] == pair[1][-1]:  # its class
            continue
        a, b = (x[-1 if is_moved else 1] for x in pair)
        a.kind = "type" if is_moved else a.kind or b.kind
        yield name, a, b, (path, *[""] * is_moved)


class _Text(str):
    """A text that is shown as it is; of a module or a tensor, with its kind."""

    kind = ""
    __repr__ = str.__str__


def _of_hooks(hooks: Mapping[int, Any]) -> tuple[tuple[int, ...], _Text]:
    text = ", ".join(map(_class_name, hooks.values())) or "empty"
    return tuple(hooks), _Text(text)


def _class_name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _different(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, and both values."""
    for name in dict.fromkeys((*before, *now)):
        a, b = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if not _same(a, b):
            yield name, a, b


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same to code: 1 is not True, and 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) in PLAIN or type(b) in PLAIN:
        return type(a) is type(b) and repr(a) == repr(b)
    if isinstance(a, list | tuple | deque) and type(a) is type(b):
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(_same, a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[x], b[x]) for x in a)
    with suppress(Exception):  # as in `changes`
        return bool(a == b)
    return False


def _copied(value: Any) -> Any:
    """Return a copy that compares equal as long as nothing is exchanged in it."""
    if hasattr(value, "items"):
        return dict(value)
    return value.copy() if isinstance(value, list | set | deque) else value


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    text = repr(value) if isinstance(value, (*PLAIN, list, tuple, dict)) else ""
    return text if 0 < len(text) <= _MOST_TEXT else f"a {type(value).__name__}"
