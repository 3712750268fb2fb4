"""Try out, on copies, whether updates and their learning rates can be undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from hocket.errors import RecipeError
from hocket.run.stage.seed import generators_kept, random_state, set_random_state
from hocket.run.weights.settings import Settings
from hocket.run.weights.updater import Updater

_NUM_UPDATES: Final = 2  # the first one makes the state, the second finds it
_GRADIENT: Final = 1e-3


def check_undo(parameters: Mapping[str, nn.Parameter], settings: Settings) -> None:
    """Update with and without detours, and compare.

        ── update ────────────────────── update ───────────────────── weights
        ── other update, undone, update ─ other update, undone, update ─ the same?

    Args:
        parameters: of one stage.
        settings: with the optimizer and its learning-rate schedule.

    Raises:
        RecipeError: an update left something behind.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trained:
        return
    _check(trained, replace(settings, scheduler=None, ema_decay=None))
    if settings.scheduler is not None:
        # Apart: a schedule that begins with a rate of 0 would hide the optimizer.
        _check(trained, replace(settings, ema_decay=None))


def _check(trained: Mapping[str, nn.Parameter], settings: Settings) -> None:
    """Raise RecipeError unless both come to the same."""
    device = next(iter(trained.values())).device
    with generators_kept(device):
        random = random_state(device)
        straight = _weights(trained, settings, detours=False)
        set_random_state(device, random)
        undone = _weights(trained, settings, detours=True)
    for name, weight in straight.items():
        if not torch.equal(weight, undone[name]):
            raise RecipeError(
                "optimistic_updates=True needs updates that can be undone: after one "
                f"that was, the optimizer moves {name} otherwise than without it. It, "
                "or its learning-rate schedule, remembers something elsewhere than in "
                "its state, its param_groups and such attributes as numbers, tensors, "
                "lists, dicts and dataclasses, or draws random numbers from another "
                "generator than its device's: keep it there, or leave out "
                "optimistic_updates"
            )


def _weights(
    trained: Mapping[str, nn.Parameter], settings: Settings, *, detours: bool
) -> dict[str, Tensor]:
    """What a few updates of copies make."""
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
    updater = Updater(copies, settings)
    for i in range(1, 1 + _NUM_UPDATES):
        if detours:
            _give_gradients(copies.values(), -2 * i * _GRADIENT)
            updater.doubt()
            updater.update()
            updater.undo()
        _give_gradients(copies.values(), i * _GRADIENT)
        updater.update()
    return {name: p.detach() for name, p in copies.items()}


def _give_gradients(parameters: Iterable[nn.Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
