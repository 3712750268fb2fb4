"""Runs a stage's forward a second time, exactly as it ran the first time.

    F    runs, and what autograd would save is discarded at once;
         kept are the input, the random state, copies of the buffers it changes, and
         what the user's modules have in their attributes
    B    runs the forward again from these, then backward

The first run records its graph like any other (hocket.model.stages), so that it
computes the same numbers.

The buffers (a BatchNorm's statistics) are changed by the first run only: the second one
finds the copies in their place, and changes those. So are attributes of the user's
modules. What else these change is changed twice: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import KeptAttributes
from hocket.model.capture.lost_in_graph import (
    numbers_state,
    preserve_numbers,
    restore_numbers,
)
from hocket.model.guards.guards import HOOKS, Guards
from hocket.model.guards.reached import OWN
from hocket.model.stages.parameter_paths import Home
from hocket.model.stages.stage import StageModule
from hocket.run.data.batch import Microbatch
from hocket.run.stage.seed import preserve_generators, random_state, set_random_state

_WITHOUT: Final = OWN - {"_buffers"}  # of attributes: what no forward changes


class ForwardInputs(NamedTuple):
    """The arguments of a forward.

    Args:
        microbatch: the microbatch's inputs and targets.
        received: the values from the stage before, detached.
        weight: the microbatch's share of the step, by samples.
    """

    microbatch: Microbatch
    received: tuple[Tensor, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class Replay:
    """The state from which a forward runs the same again.

    Args:
        inputs: its arguments.
        buffers: copies of the buffers that it changes, from before its first run, and
            where they belong.
        random: the generator's state from before its first run.
        attributes: those of the user's modules from before its first run.
        numbers: the state of Python's and NumPy's generators from before that, if the
            user's modules may draw from them.
    """

    inputs: ForwardInputs
    buffers: tuple[tuple[Home, Tensor], ...]
    random: Tensor
    attributes: tuple[KeptAttributes, ...]
    numbers: tuple[Any, ...] | None


class Replayer:
    """Saves and restores what a stage's forward depends on.

    Args:
        module: the stage.
        device: the stage's device.
    """

    def __init__(self, module: StageModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._homes = changing_buffers(module)
        own = [x for one in (module, *module.whole) for x in one.modules()]
        self._own = [x for x in dict.fromkeys(own) if _is_users(x)]
        self._modules = nn.ModuleList(self._own)
        self._guards = Guards(self._modules)

    def keep(self, inputs: ForwardInputs) -> Replay:
        """Save the state; called when the generator is seeded, before the first run."""
        # The user's modules may set and replace buffers at any time.
        homes = changing_buffers(self._module) if self._own else self._homes
        buffers = {id(home[key]): home[key] for home, key in homes}
        copies = {number: x.detach().clone() for number, x in buffers.items()}
        return Replay(
            inputs,
            tuple(((home, key), copies[id(home[key])]) for home, key in homes),
            random_state(self._device),
            tuple(KeptAttributes(x, _WITHOUT) for x in self._own),
            numbers_state() if self._own else None,
        )

    @contextmanager
    def restored(self, replay: Replay) -> Iterator[None]:
        """Restore the state for the second run; afterwards, undo that.

        Raises:
            ModelError: the second run has changed what cannot be restored.
        """
        now = [(place, place[0][place[1]]) for place in self._homes]
        own = [KeptAttributes(x, _WITHOUT) for x in self._own]
        self._guards.changes()  # since the last run
        with (
            preserve_generators(self._device),
            preserve_numbers() if self._own else nullcontext(),
        ):
            set_random_state(self._device, replay.random)
            if replay.numbers is not None:
                restore_numbers(replay.numbers)
            for kept in replay.attributes:
                kept.restore()
            _put(replay.buffers)
            try:
                yield
            finally:
                _put(now)
                for kept in own:
                    kept.restore()
        for change in self._guards.changes():
            if not change.kind:  # old weights may be in the place of new ones
                number, dot, rest = change.name.partition(".")
                is_own = number.isdecimal()
                where = type(self._own[int(number)]).__name__ if is_own else number
                raise ModelError(
                    f"{where}{dot}{rest} was {change.before} and is {change.now}: a "
                    "forward changes it, and would do so twice, as its stage runs "
                    "forwards again (recompute). Keep it in an attribute or a buffer "
                    'of the module, or take recompute="none"'
                )


def _put(buffers: Iterable[tuple[Home, Tensor]]) -> None:
    for (home, key), buffer in buffers:
        home[key] = buffer


def _is_users(module: nn.Module) -> bool:
    """Whether a module's forward is the user's code, or may call it by a hook."""
    home = type(module).__module__
    is_known = home.startswith(("torch.", "hocket.")) and "forward" not in vars(module)
    return not is_known or any(vars(module)[x] for x in HOOKS)


def changing_buffers(module: StageModule) -> tuple[Home, ...]:
    """Return where a stage keeps the buffers that its forward changes in training."""
    named = module.named_buffers(remove_duplicate=False)
    changing = {id(x) for name, x in named if name not in module.fixed_buffers}
    return tuple(
        (child._buffers, key)
        for child in module.modules()
        for key, buffer in child._buffers.items()
        if id(buffer) in changing
    )
