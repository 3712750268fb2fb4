"""Updates the weights and buffers of a net that follows another one (op U).

The update is an exponential moving average of the followed net's weights, as in MoCo
and BYOL, or a copy of them every so many steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.model.stages.stage import StageModule
from hocket.run.weights.momentum import FollowerUpdate


@dataclass(frozen=True, slots=True)
class Pairs:
    """Tensors that follow others, and these, by name.

    Args:
        own: the tensors that an update changes.
        followed: the tensors that it reads.
        holders: the stages that hold each followed tensor: several if it is tied.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    followed: dict[str, Tensor] = field(default_factory=dict)
    holders: dict[str, frozenset[int]] = field(default_factory=dict)

    @property
    def stages(self) -> frozenset[int]:
        """The stages that hold followed tensors."""
        return frozenset().union(*self.holders.values())

    def parts(self, part_of: Callable[[Tensor], Tensor]) -> Pairs:
        """Return the same of what this worker keeps of each tensor."""
        own, followed = (
            {name: part_of(x) for name, x in named.items()}
            for named in (self.own, self.followed)
        )
        return Pairs(own, followed, self.holders)

    def keep_copies(self, stage: int, kept: dict[str, Tensor]) -> None:
        """Copy the followed tensors of one stage, but those that are kept already.

        Args:
            stage: the stage.
            kept: gets them, by name.
        """
        for name, stages in self.holders.items():
            if stage in stages and name not in kept:
                kept[name] = self.followed[name].detach().clone()


class Follower:
    """Updates one stage of a net that follows another one.

    The update of step t reads the followed weights after their own update of step t,
    and the followed buffers after the forwards of step t. If the followed stage updates
    again, or runs its next forward, before this update, the follower copies its values
    first:

        followed    U of step 0 ── U of step 1 ──────────────────────┐
                                   └ first copies the weights of 0   │
        follower                                U of step 0 ── U of step 1

    Args:
        update: the moving average, or the copies.
        weights: the stage's parameters.
        buffers: the buffers that are updated; none if the net keeps its own.
    """

    def __init__(
        self, update: FollowerUpdate, weights: Pairs, buffers: Pairs | None = None
    ) -> None:
        self.weights = weights
        self.buffers = Pairs() if buffers is None else buffers
        self._update = update
        self._lock = threading.Lock()  # the updates may be in two lanes
        self._next: int | None = None  # the step whose move comes next
        self._kept: dict[int, dict[str, Tensor]] = {}  # by step
        self._skipped: set[int] = set()  # the steps without an update

    def update(self, step: int) -> None:
        """Update weights and buffers, once the followed weights are updated.

        At a momentum of 1 nothing changes, buffers included. Nor does a moving average
        change in a step whose update of the followed weights was skipped; a copy is
        made also then.

        Raises:
            ConfigError: the momentum is below 0 or above 1.
        """
        with self._lock:
            kept = self._kept.pop(step, {})
            self._next = step + 1
            momentum = self._update.at(step)
            is_skipped = step in self._skipped
            self._skipped.discard(step)
            if momentum == 1.0 or (is_skipped and momentum):
                return
            _move(momentum, self.weights, kept)
            averages = self._update.buffers == "averaged"
            _move(momentum if averages else 0.0, self.buffers, kept)

    def before_update_of(self, stage: int, step: int, *, skips: bool = False) -> None:
        """Copy the weights of a followed stage that the next update still reads.

        Args:
            stage: the stage that is about to be updated.
            step: its step.
            skips: whether its update is skipped.
        """
        if stage not in self.weights.stages:
            return
        with self._lock:
            if skips:
                self._skipped.add(step)
            if self._next is None:
                self._next = step
            if self._next < step:
                kept = self._kept.setdefault(step - 1, {})
                self.weights.keep_copies(stage, kept)

    def after_forwards_of(self, stage: int, step: int) -> None:
        """Copy the buffers of a followed stage, before forwards of the next step.

        Args:
            stage: the stage whose last forward of the step has run.
            step: the step.
        """
        with self._lock:
            self.buffers.keep_copies(stage, self._kept.setdefault(step, {}))


@torch.no_grad()
def _move(momentum: float, pairs: Pairs, kept: Mapping[str, Tensor]) -> None:
    """Average tensors in place with those that they follow; integers are copied.

    Args:
        momentum: the share that a tensor keeps of itself; 0 for a copy.
        pairs: the tensors.
        kept: copies of followed tensors that have changed since, by name.
    """
    averaged: dict[str, Tensor] = {}
    copied: dict[str, Tensor] = {}
    for name, x in pairs.own.items():
        moves = momentum and (x.is_floating_point() or x.is_complex())
        (averaged if moves else copied)[name] = x
    followed = {**pairs.followed, **kept}
    if averaged:
        own = list(averaged.values())
        factor: Any = momentum
        if own[0].device.type == "cpu":  # torch would round a number to bfloat16
            factor = torch.tensor(momentum, dtype=torch.float64)
        torch._foreach_mul_(own, factor)
        others = [followed[name] for name in averaged]
        torch._foreach_add_(own, others, alpha=1.0 - momentum)
    if copied:
        torch._foreach_copy_(list(copied.values()), [followed[name] for name in copied])


def follow(
    update: FollowerUpdate,
    own: StageModule,
    weights: Mapping[str, Tensor],
    others: Mapping[int, StageModule],
    where: str,
) -> Follower:
    """Make the follower of one stage.

    Args:
        update: the moving average, or the copies.
        own: the stage.
        weights: the parameters that it updates; of a weight that stages of one device
            share, one stage updates it.
        others: the stages that it follows, by number.
        where: names the stage in errors.

    Raises:
        ModelError: the stages that it follows lack one of its tensors, or have one of
            another shape.
    """
    moved = _pairs(
        "parameter",
        dict(weights),
        {number: dict(other.named_parameters()) for number, other in others.items()},
        where,
    )
    if update.buffers == "own":
        return Follower(update, moved)
    buffers = dict(own.named_buffers())
    moving = {name: x for name, x in buffers.items() if name not in own.fixed_buffers}
    held = {number: dict(other.named_buffers()) for number, other in others.items()}
    return Follower(update, moved, _pairs("buffer", moving, held, where))


def _pairs(
    what: str,
    own: dict[str, Tensor],
    held: Mapping[int, Mapping[str, Tensor]],
    where: str,
) -> Pairs:
    followed = {name: x for named in held.values() for name, x in named.items()}
    holders = {
        name: frozenset(number for number, named in held.items() if name in named)
        for name in own
    }
    for name, x in own.items():
        if name not in followed or followed[name].shape != x.shape:
            other = f"of {tuple(followed[name].shape)}" if name in followed else "none"
            listed = ", ".join([*followed][:5])
            raise ModelError(
                f"{where} has the {what} {name} of {tuple(x.shape)}, and the stages "
                f"that it follows ({', '.join(map(str, held))}) have {other}; they "
                f"have {listed}, ...: make both nets alike, and cut them at the same "
                "modules"
            )
    return Pairs(own, {name: followed[name] for name in own}, holders)
