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

from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.run.stage.precision import LossScale
from hocket.run.weights.gradient_status import PendingGradientStatus
from hocket.run.weights.gradients import Gradients, GradientStatus
from hocket.run.weights.live_rates import refuse_rates
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.tied_weights import add_up_ties
from hocket.run.weights.updater import Updater

Finish: TypeAlias = Callable[[int], None]  # waits for the reduction of a stage


@dataclass(slots=True)
class _Pending:
    """A step that has begun to come to the gate.

    Args:
        complete: the stages of this worker whose gradients are complete.
        passed: those that were updated.
        norms: the norms of this worker's gradients, once they are posted.
        updates: whether the step's updates are made, once that is decided.
    """

    complete: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    norms: Tensor | None = None
    updates: bool | None = None


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
        posts_early: whether norms are posted once gradients are complete, by whichever
            lane completes them.

    Attributes:
        status: what the gradients were, of the last step that was decided.
    """

    def __init__(
        self,
        stages: Sequence[int],
        gradients: Gradients,
        updaters: Mapping[int, Updater],
        ties: Mapping[int, Sequence[Reducer]],
        stage_of: Mapping[str, int],
        *,
        waits: bool,
        counts: bool,
        clip_norm: float | None,
        scale: LossScale | None,
        on_norms: Callable[[int, Tensor], None],
        posts_early: bool = True,
    ) -> None:
        self._stages = frozenset(stages)
        self._gradients = gradients
        self._updaters = updaters
        self._ties = ties
        self._stage_of = stage_of
        self._waits = waits
        self._counts = counts
        self._clip_norm = clip_norm
        self._scale = scale
        self._on_norms = on_norms
        self._posts_early = posts_early
        self._lock = threading.Lock()  # several lanes may come to it
        self._steps: dict[int, _Pending] = {}
        self._passed = -1  # the last step that all stages have passed
        self.status = PendingGradientStatus(0, lambda: GradientStatus(0.0))

    @property
    def posts_early(self) -> bool:
        """Whether norms are posted once the gate's gradients are complete."""
        return self._posts_early and self._waits and self._gradients.allows_any_order

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
                and not any(self._ties[other] for other in self._stages)
            ):
                self._post(pending, step)

    def enter(self, stage: int, step: int, finish: Finish) -> bool:
        """Return whether the update of a stage is made; decide at the first one.

        Args:
            stage: a stage of this device.
            step: whose gradients they are.
            finish: waits for the reduction of a stage's gradients.

        Raises:
            NonFiniteError: a gradient is not finite; every member of a gate that waits
                raises it.
            SchemaError: learning rates differ by rank; every member raises it.
            WaitError: another worker did not come.
        """
        with self._lock:
            pending = self._steps.setdefault(step, _Pending())
            if pending.updates is None:
                self._decide(pending, step, finish)
            pending.passed.add(stage)
            if pending.passed >= self._stages:
                del self._steps[step]
                self._passed = step
            assert pending.updates is not None
            return pending.updates

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
        if self._waits and not self._stages:
            self._decide(_Pending(), step, finish)

    def _decide(self, pending: _Pending, step: int, finish: Finish) -> None:
        for stage in sorted(self._stages - pending.complete):
            finish(stage)
        if pending.norms is None:
            self._post(pending, step)
        norms = pending.norms
        assert norms is not None
        if self._waits:
            self.status = PendingGradientStatus(step, self._gradients.wait)
        else:
            status = self._gradients.status_of(norms)
            self.status = PendingGradientStatus(step, lambda: status)
        pending.updates = self._judged(self.status.status, step)

    def _post(self, pending: _Pending, step: int) -> None:
        """Have the gradients as they would be in one process, and post their norms."""
        add_up_ties(
            [tie for stage in sorted(self._stages) for tie in self._ties[stage]]
        )
        if self._scale is not None:
            for stage in self._stages:
                self._scale.unscale(self._updaters[stage].grads)
        pending.norms = self._gradients.own_norms()
        if self._counts:
            self._on_norms(step, pending.norms)
        if self._waits:
            self._gradients.post(step, pending.norms.clone())

    def _judged(self, status: GradientStatus, step: int) -> bool:
        """Do what the norms ask for; whether there is an update."""
        refuse_rates(status.rate_fault, step)
        if self._scale is not None:
            self._scale.update(overflowed=not status.is_finite)
        elif not status.is_finite:
            raise NonFiniteError(self._fault(status, step))
        if status.is_finite and self._clip_norm is not None:
            self._gradients.clip(status, self._clip_norm)
        return status.is_finite

    def _fault(self, status: GradientStatus, step: int) -> str:
        name = status.culprit
        at_fault = f"that of {name}, stage {self._stage_of[name]}"
        if self._waits:
            return (
                f"the losses of step {step} are finite, its gradients are not: the "
                f"first at fault is {at_fault}; no weights were updated from it"
            )
        return (
            f"the losses of step {step} are finite, its gradients are not: the first "
            f"at fault on this worker is {at_fault}; this stage was not updated from "
            "it, others may have been from their own gradients"
        )
