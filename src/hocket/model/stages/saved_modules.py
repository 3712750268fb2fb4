"""What modules save besides parameters and buffers, and what they hook into it.

A state dict of torch has three sources: parameters and buffers, which stages hold; the
extra state of modules (`get_extra_state`); and hooks, which see it before and after it
is made or loaded. The last two are the user's modules' own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

from torch import nn

from hocket.errors import ModelError
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
