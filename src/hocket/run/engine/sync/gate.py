"""A gate: stages that share one check for overflow, and one norm to clip by.

It is what `GradScaler` and `clip_grad_norm_` are for a model in one process.

    step                             one gate of all stages        a gate for each delay
    lane 0    F F B F B B R │ U U    waits at its first update,    waits at the first
    lane 1    F B F B F B R │ U      until all gradients of        update of a delay's
                            ▲        the model are complete        stages
                            └ norms, posted as soon as they are complete

Every member posts the norms of its gradients when they are complete. A gate that waits
reads the sum of all of them at its first update: then all members update, or all stop,
or all skip the step, or all scale by one norm. A gate that does not wait has one stage,
and looks at its own gradients only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.run.device.late import Late
from hocket.run.stage.precision import LossScale
from hocket.run.weights.gradients import Gradients, GradientStatus
from hocket.run.weights.live_rates import refuse_rates
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.tied_weights import add_up_ties
from hocket.run.weights.updater import Updater

Finish: TypeAlias = Callable[[int], None]  # waits for the reduction of a stage
LossSum: TypeAlias = Tensor | float  # 0 if the host has read the losses


@dataclass(frozen=True, slots=True)
class UpdateVerdict:
    """Whether updates are made.

    Args:
        updates: whether the host asks for them.
        is_bad: 1 on a device that leaves them out, 0 on one that makes them, where the
            host does not wait to know.
    """

    updates: bool
    is_bad: Tensor | None = None


@dataclass(slots=True)
class _Pending:
    """A step that has begun to come to the gate.

    Args:
        complete: the stages of this worker whose gradients are complete.
        passed: those that were updated.
        norms: the norms of this worker's gradients, once they are posted.
        status: what they say of all workers' gradients.
        decision: on the step's updates.
    """

    complete: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    norms: Tensor | None = None
    status: Late[GradientStatus] | None = None
    decision: UpdateVerdict | None = None


@dataclass(eq=False)
class Gate:
    """One worker's part of a gate.

    Args:
        stages: this device's stages of the gate; none where it has no member.
        gradients: the gradients of these stages, as a part of the gate's.
        updaters: their updaters, by stage.
        ties: the sums of shared weights' gradients over their holders, by stage.
        stage_of: the stage of each trained parameter of the model, for errors.
        waits: whether updates wait for all members.
        counts: whether this worker's norms count; those of one replica do.
        clip_norm: the most that the gate's gradients may measure together.
        scale: the loss scale, where gradients are unscaled before they are judged.
        on_norms: called with each step and the norms of this worker's gradients.
        may_post_early: whether norms are posted once gradients are complete, by the
            lane that completes them.
        may_mask: whether a device may leave out updates, on a worker that is alone:
            no other waits for norms then, and errors are raised at the next update.

    Attributes:
        status: what the gradients were, of the last step that was decided.
    """

    stages: Sequence[int]
    gradients: Gradients
    updaters: Mapping[int, Updater]
    ties: Mapping[int, Sequence[Reducer]]
    stage_of: Mapping[str, int]
    waits: bool
    counts: bool
    clip_norm: float | None
    scale: LossScale | None
    on_norms: Callable[[int, Tensor], None]
    may_post_early: bool = True
    may_mask: bool = False

    def __post_init__(self) -> None:
        """Begin without a step."""
        self._stages = frozenset(self.stages)
        self._masked: int | None = None  # a step that was not judged by the host yet
        self._lock = threading.Lock()  # several lanes may come to it
        self._steps: dict[int, _Pending] = {}
        self._passed = -1  # the last step that all stages have passed
        self.status = Late(lambda: GradientStatus(0.0))

    @property
    def masks(self) -> bool:
        """Whether a device may leave out the next updates, so that no host waits."""
        return self.may_mask and all(
            self.updaters[stage].can_be_masked for stage in self._stages
        )

    @property
    def posts_early(self) -> bool:
        """Whether norms are posted once the gate's gradients are complete."""
        return self.may_post_early and self.waits and self.gradients.allows_any_order

    def complete(self, stage: int, step: int) -> None:
        """Note that a stage's gradients are complete, over all replicas.

        The gate's norms are posted with the last of its stages, if that needs no wait:
        no weight is shared, the sum allows any order, and no earlier step is pending.
        """
        with self._lock:
            if step <= self._passed:  # another lane was faster
                return
            pending = self._steps.setdefault(step, _Pending())
            pending.complete.add(stage)
            if (
                pending.norms is None
                and self.posts_early
                and self._stages <= pending.complete
                and min(self._steps) == step  # sums are read one after the other
                and not any(self.ties[other] for other in self._stages)
            ):
                self._post(pending, step)

    def enter(
        self, stage: int, step: int, finish: Finish, losses: LossSum | None = None
    ) -> UpdateVerdict:
        """Return whether the update of a stage is made; decide at the first one.

        Args:
            stage: a stage of this device.
            step: whose gradients they are.
            finish: waits for the reduction of a stage's gradients.
            losses: the sum of the step's losses where the device judges them, and so
                all gradients; None where the host does.

        Raises:
            NonFiniteError: a gradient is not finite; every member of a gate that waits
                raises it.
            SchemaError: learning rates differ by rank; every member raises it.
            WaitError: another worker did not come.
        """
        with self._lock:
            pending = self._steps.setdefault(step, _Pending())
            if pending.decision is None:
                pending.decision = self._decide(pending, step, finish, losses)
            pending.passed.add(stage)
            if pending.passed >= self._stages:
                del self._steps[step]
                self._passed = step
            return pending.decision

    def resume_from(self, step: int) -> None:
        """Set the next step, after another state was loaded."""
        self._passed = step - 1

    def close(self, step: int, finish: Finish) -> None:
        """Decide a step on a worker that updates nothing, since the others wait for it.

        Raises:
            NonFiniteError: a gradient is not finite; every member raises it.
            SchemaError: learning rates differ by rank; every member raises it.
            WaitError: another worker did not come.
        """
        if self.waits and not self._stages:
            self._decide(_Pending(), step, finish, None)

    def check_last(self) -> None:
        """Raise what is wrong with the step that a device has judged; waits for it.

        Raises:
            NonFiniteError: a gradient is not finite, and the device has left its
                updates out.
        """
        step, self._masked = self._masked, None
        if step is not None and not self.status.value.is_finite:
            raise NonFiniteError(self._fault(self.status.value, step))

    def _decide(
        self, pending: _Pending, step: int, finish: Finish, losses: LossSum | None
    ) -> UpdateVerdict:
        self.check_last()
        for stage in sorted(self._stages - pending.complete):
            finish(stage)
        if pending.norms is None:
            self._post(pending, step)
        assert pending.norms is not None
        assert pending.status is not None
        self.status = pending.status
        if losses is None:
            return UpdateVerdict(self._judged(self.status.value, step))
        refuse_rates(self.gradients.rate_fault(), step)
        self._masked = step
        norm = self.gradients.total_of(pending.norms)
        if self.clip_norm is not None:
            self.gradients.clip(norm, self.clip_norm)
        is_finite = torch.isfinite(norm + losses)
        return UpdateVerdict(True, torch.logical_not(is_finite).float())

    def _post(self, pending: _Pending, step: int) -> None:
        """Have the gradients as they would be in one process, and post their norms."""
        add_up_ties([tie for stage in sorted(self._stages) for tie in self.ties[stage]])
        if self.scale is not None:
            for stage in self._stages:
                self.scale.unscale(self.updaters[stage].grads)
        pending.norms = self.gradients.own_norms()
        if self.counts:
            self.on_norms(step, pending.norms)
        pending.status = self.gradients.post(step, pending.norms)

    def _judged(self, status: GradientStatus, step: int) -> bool:
        """Do what the norms ask for; whether there is an update."""
        refuse_rates(status.rate_fault, step)
        if self.scale is not None:
            self.scale.update(overflowed=not status.is_finite)
        elif not status.is_finite:
            raise NonFiniteError(self._fault(status, step))
        if status.is_finite and self.clip_norm is not None:
            self.gradients.clip(status.norm, self.clip_norm)
        return status.is_finite

    def _fault(self, status: GradientStatus, step: int) -> str:
        name = status.culprit
        at_fault = f"that of {name}, stage {self.stage_of[name]}"
        if self.waits:
            return (
                f"the losses of step {step} are finite, its gradients are not: the "
                f"first at fault is {at_fault}; no weights were updated from it"
            )
        return (
            f"the losses of step {step} are finite, its gradients are not: the first "
            f"at fault on this worker is {at_fault}; this stage was not updated from "
            "it, others may have been from their own gradients"
        )
