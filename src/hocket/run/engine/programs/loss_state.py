"""Gives a captured model the weights and buffers of its loss, in the last layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hocket.model.capture.captured import Captured, with_module
from hocket.run.data.loss import LossFunction
from hocket.run.engine.same_everywhere import losses_of_random_outputs
from hocket.run.stage.loss_checks.trial import loss_name, loss_part


def with_loss(
    captured: Captured,
    loss: LossFunction,
    targets: Any,
    others: Sequence[Any] = (),
    nets: Mapping[str, nn.Module] | None = None,
) -> Captured:
    """Return the model with what its loss keeps: it is trained and saved, too.

    A loss without weights that want a gradient, and whose buffers are constants (the
    weights of classes), keeps nothing.

    Args:
        captured: the model, in its final layers.
        loss: the user's.
        targets: the targets of the example.
        others: the outputs of other nets that the loss reads.
        nets: these nets, by name.
    """
    nets = nets or {}
    part = loss_part(loss, [captured.model, *nets.values()])
    trains = any(x.requires_grad for x in part.parameters())
    if not trains and not _changes(part, captured, loss, targets, others):
        return captured
    return with_module(captured, loss_name([captured.model], nets), part)


def _changes(
    part: nn.Module,
    captured: Captured,
    loss: LossFunction,
    targets: Any,
    others: Iterable[Any],
) -> bool:
    """Return whether a loss changes its buffers, or cannot be tried on random outputs.

    What it changes is restored.
    """
    seen = False

    def noting(*given: Any) -> Any:
        nonlocal seen
        before = [(x, x.detach().clone()) for x in part.buffers()]
        found = loss(*given)
        now = [*part.buffers()]
        seen |= len(now) != len(before) or not all(
            torch.equal(x, value) for x, (_, value) in zip(now, before, strict=False)
        )
        return found

    if not any(True for _ in part.buffers()):
        return False
    losses = losses_of_random_outputs(
        noting, captured, targets, [*others], torch.device("cpu")
    )
    return seen or any(not value for value in losses.values())
