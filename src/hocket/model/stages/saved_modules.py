"""What modules save besides parameters and buffers, and what they hook into it.

A state dict of torch has three sources: parameters and buffers, which stages hold; the
extra state of modules (`get_extra_state`); and hooks, which see it before and after it
is made or loaded. The last two are the user's modules' own.

Modules that read what a module of another stage keeps are refused. The other stage may
be another worker's, where nothing is kept, or what an earlier forward has left; and on
one worker it has run another microbatch in between. The model runs once to find out,
where its code sets attributes or modules share collections.
"""

from __future__ import annotations

import dis
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import (
    COLLECTIONS,
    AttributeSnapshot,
    preserve_attributes,
)
from hocket.model.capture.captured import Captured
from hocket.model.guards.reached import own_attributes, used_by_forward
from hocket.model.stages.stage import KEPT_ELSEWHERE, StageModule
from hocket.model.trace.observe import preserve_state
from hocket.model.trace.state import State

EXTRA_STATE: Final = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
_HOOKS: Final = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def state_names(model: nn.Module, state: State) -> tuple[str, ...]:
    """Return the names in a model's `state_dict()`, in its order, before any hook.

    Args:
        model: the model.
        state: its parameters and buffers.

    Raises:
        ModelError: a module saves more than parameters, buffers and an extra state.
    """
    found: dict[str, Any] = {}
    whole: tuple[str, ...] = ()  # saved with all that is inside of them
    for path, module in model.named_modules(remove_duplicate=False):
        prefix, own = f"{path}." if path else "", dict[str, Any]()
        if prefix.startswith(whole):
            continue
        if type(module).state_dict is nn.Module.state_dict:
            module._save_to_state_dict(own, prefix, keep_vars=True)
        else:
            own = module.state_dict(prefix=prefix, keep_vars=True)
            whole += (prefix,)
        for name in own:
            if name not in state.first_name and not (
                name.endswith(EXTRA_STATE) and name.startswith(prefix)
            ):
                raise ModelError(
                    f"{path or 'the model'} ({type(module).__name__}) saves {name}, "
                    "which is no parameter and no buffer: keep it in a buffer, or "
                    "return it from get_extra_state(), and only there"
                )
        found |= own
    return tuple(found)


class SavedModules:
    """The modules of nets that have an extra state, or hooks of their state dict.

    Keeps these modules, and follows hooks that are registered later as long as the
    user keeps the net.

    Args:
        nets: the nets, by what comes before the names of their state.
    """

    def __init__(self, nets: Mapping[str, nn.Module]) -> None:
        self._nets = {prefix: weakref.ref(net) for prefix, net in nets.items()}
        self._kept = dict(self._found())

    def joined(self, others: Mapping[str, SavedModules]) -> SavedModules:
        """Return these with those of other nets, under names of their own."""
        every = SavedModules({})
        for name, one in {"": self, **others}.items():
            before = f"{name}." if name else ""
            every._nets |= {before + prefix: x for prefix, x in one._nets.items()}
            every._kept |= {before + prefix: x for prefix, x in one._kept.items()}
        return every

    @property
    def extra_names(self) -> Set[str]:
        """The names of extra states."""
        return self._with_extra().keys()

    def extra(self, only: Set[nn.Module] | None = None) -> dict[str, Any]:
        """Return the extra states that the modules have here, by name.

        Args:
            only: those of these modules; all when not given.
        """
        return {
            name: module.get_extra_state()
            for name, module in self._with_extra().items()
            if only is None or module in only
        }

    def load(self, extra: Mapping[str, Any]) -> None:
        """Set the extra states, and call the hooks that come after a state is loaded.

        Tensors are loaded by then, and nothing is missing.
        """
        for name, module in self._with_extra().items():
            module.set_extra_state(extra[name])
        for module in reversed(self._every().values()):
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, nn.modules.module._IncompatibleKeys([], []))

    def before_save(self) -> None:
        """Call the hooks that come before a state dict is made."""
        for prefix, module in self._every().items():
            for hook in module._state_dict_pre_hooks.values():
                hook(module, prefix, keep_vars=False)

    def after_save(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict as the hooks leave it; inner modules' come first."""
        for prefix, module in reversed(self._every().items()):
            for hook in module._state_dict_hooks.values():
                changed = hook(module, state, prefix, {"version": module._version})
                if not getattr(hook, "_from_public_api", False):
                    state = state if changed is None else changed
        return state

    def _with_extra(self) -> dict[str, nn.Module]:
        return {
            prefix + EXTRA_STATE: module
            for prefix, module in self._every().items()
            if _has_extra(module)
        }

    def _every(self) -> dict[str, nn.Module]:
        return self._kept | dict(self._found())

    def _found(self) -> Iterator[tuple[str, nn.Module]]:
        for before, net in self._nets.items():
            model = net()
            if model is None:
                continue
            for path, module in model.named_modules(remove_duplicate=False):
                if _has_extra(module) or any(getattr(module, x) for x in _HOOKS):
                    yield f"{before}{path}." if path else before, module


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def refuse_kept(captured: Captured, stages: Sequence[StageModule]) -> None:
    """Refuse an attribute that forwards change, and that another stage reads.

    It is known by its name in the code of the other module's forward, which has no
    other value of that name itself.

    Args:
        captured: the model, which runs once, and stays as it is.
        stages: all of its stages.

    Raises:
        ModelError: names the attribute, and who reads it.
    """
    stage_of = {id(part): stage.index for stage in stages for part in stage.modules()}
    parts = [x for x in captured.model.named_modules() if id(x[1]) in stage_of]
    model, (args, kwargs) = captured.model, captured.example.call()
    if len(stages) == 1 or not _may_share([module for _, module in parts]):
        return
    with preserve_attributes(model), preserve_state(captured.state), torch.no_grad():
        before = AttributeSnapshot(model)
        model(*args, **kwargs)
        for name in before.changed():
            path, _, attribute = name.rpartition(".")
            keeper = model.get_submodule(path)
            value, home = vars(keeper).get(attribute), stage_of.get(id(keeper))
            if not isinstance(value, (torch.Tensor, *COLLECTIONS)):
                continue  # numbers and None may be the same in modules apart
            for other, reader in parts:
                is_same = getattr(reader, attribute, value) is value
                is_apart = home not in (None, stage_of[id(reader)])
                if is_same and is_apart and attribute in used_by_forward(type(reader)):
                    raise ModelError(
                        f"{other} reads {name}, which each forward changes, and is in "
                        f"stage {stage_of[id(reader)]}, not {home}. {KEPT_ELSEWHERE}"
                    )


def _may_share(modules: Sequence[nn.Module]) -> bool:
    """Whether a forward sets an attribute, or several modules have one collection."""
    if any(map(_sets_attributes, {type(x) for x in modules})):
        return True
    own = [
        {id(x) for x in own_attributes(m).values() if isinstance(x, COLLECTIONS)}
        for m in modules
    ]
    counts = Counter(x for ids in own for x in ids)
    return any(count > 1 for count in counts.values())


def _sets_attributes(kind: type[nn.Module]) -> bool:
    """Whether code of the user's own, which `forward` may call, sets an attribute."""
    names = used_by_forward(kind)
    functions = [
        value
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if name in names and isinstance(value, FunctionType)
    ]
    return any(
        step.opname == "STORE_ATTR"
        for x in functions
        for step in dis.get_instructions(x)
    )
