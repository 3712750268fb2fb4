"""What happens besides the ops where several steps are in flight: no one waits for all.

lane 0    F B F B ... B U0 │ F B F B ... B U0 │      each stage is updated as soon as
lane 1    B F B F U1 F B   │ B F B F U1 F B   │      its own gradients are complete
                           │                  │
                          tell step 0        learn of step 0, tell step 1

Whether gradients are finite is seen where they are, before the update. How large all of
them are together is told when a step is over, and asked for one step later, when nobody
has to wait for it any more.

To clip, the stages of one delay are a group, scaled by the norm of all its gradients:
what `hocket.emulate` does. Each worker tells its part when its own gradients are
complete, and learns the sum at the update, which the order has later for its sake:

lane 0    ...     F B F B │U      tell, learn
lane 1    ... B │ F B F B  U      tell at │, and go on; learn at U
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.data.step_batch import Work
from hocket.run.engine.results import Results
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradient_status import Judgement
from hocket.run.weights.gradients import Gradients, Verdict
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.tied_weights import add_up_ties


@dataclass(slots=True)
class _Step:
    """What is known of a step in flight.

    Args:
        shares: of its microbatches.
        norms: of the gradients on this worker, as far as they were complete.
        told: the stages whose norms their groups were told.
        has_told_losses: whether this worker has; of the last stage's.
    """

    shares: dict[int, float]
    norms: Tensor | None = None
    told: set[int] = field(default_factory=set)
    has_told_losses: bool = False


class StreamEnds:
    """What one worker does where its lane's work is not enough.

    Args:
        runners: this device's stages by number.
        last_stage: the one that knows the losses; not always this device's.
        stage_of: the stage of each parameter that is trained, on any device.
        results: the losses of a step, for everyone.
        replicas: to see that all have the same batches, where there are any.
        ties: of each of this device's stages: add up the gradients of weights that it
            shares, over the devices that hold them.
        everyone: tells the norms of all gradients.
        own: the gradients of each of this device's stages.
        groups: likewise, as a part of those of their delay; where they are clipped.
        clip_norm: the most that the gradients of a group may measure.
        counts: whether this worker's norms count: those of one replica do.
    """

    def __init__(
        self,
        runners: Mapping[int, StageRunner],
        last_stage: int,
        stage_of: Mapping[str, int],
        results: Results,
        replicas: ReplicaCheck | None,
        ties: Mapping[int, Sequence[Reducer]],
        everyone: Gradients,
        own: Mapping[int, Gradients],
        groups: Mapping[int, Gradients],
        clip_norm: float | None,
        *,
        counts: bool,
    ) -> None:
        self._last = runners.get(last_stage)
        self._last_stage = last_stage
        self._stage_of = stage_of
        self._results = results
        self._replicas = replicas
        self._ties = ties
        self._everyone = everyone
        self._own = own
        self._groups = groups
        self._clip_norm = clip_norm
        self._counts = counts
        self._steps: dict[int, _Step] = {}
        self._judgement = Judgement(0, lambda: Verdict(0.0))

    def begin(self, work: Work) -> None:
        """Before a step's first op."""
        self._steps[work.step.number] = _Step(work.shares())
        if self._replicas is not None:
            self._replicas.begin(work.step)

    def after_losses(self, work: Work) -> None:
        """When the last stage's last forward has run, which this device has."""
        assert self._last is not None
        number = work.step.number
        shares = self._steps[number].shares
        self._results.begin(number, self._last.losses.read(), shares)

    def after_backwards(self, stage: int, work: Work) -> None:
        """When a stage has done all of a step but its update.

        The others may end the step before this worker updates.
        """
        number = work.step.number
        if stage == self._last_stage and self._results.is_known(number):
            self._results.tell(number)
            self._steps[number].has_told_losses = True

    def after_gradients(self, stage: int, work: Work) -> None:
        """When all gradients of a stage are there, over all replicas: tell early.

        Not where weights are shared: then the other holders would have to be waited
        for. Their update looks at them. Nor where all must tell in one order: when a
        reduction ends is not the same everywhere.

        Raises:
            NonFiniteError: one of them is not finite; this worker's own.
        """
        if self._clip_norm is None or self._ties[stage]:
            return
        if self._replicas is None or self._groups[stage].is_told_in_any_order:
            self._look_at(stage, work.step.number)

    def before_update(self, stage: int, work: Work) -> None:
        """When the lane comes to the update of a stage.

        Raises:
            NonFiniteError: one of them is not finite; this worker's own.
            SchemaError: a replica had another batch.
            WaitError: another worker did not come.
        """
        number = work.step.number
        if self._replicas is not None:
            self._replicas.finish(number)
        step = self._steps[number]
        if stage == self._last_stage and not step.has_told_losses:
            self._results.tell(number)
        if stage not in step.told:
            self._look_at(stage, number)
        if self._clip_norm is not None:
            group = self._groups[stage]
            group.clip(group.learn(), self._clip_norm)

    def end(self, number: int) -> tuple[dict[str, float], Judgement]:
        """When a step is over on all workers; each calls this, step by step.

        Returns:
            Its losses, and what its gradients were like.

        Raises:
            WaitError: another worker did not tell.
        """
        step = self._steps.pop(number)
        _ = self._judgement.verdict  # learned before the next is told
        norms = self._everyone.no_norms() if step.norms is None else step.norms
        self._everyone.tell(number, norms)
        self._judgement = Judgement(number, self._everyone.learn)
        return self._results.finish(number), self._judgement

    def give_up(self) -> None:
        """When the pipeline ends: nobody will hear from the other workers any more."""
        self._judgement.give_up()

    def _look_at(self, stage: int, number: int) -> None:
        """See that complete gradients are finite, and tell their group how large."""
        add_up_ties(self._ties[stage])
        norms = self._judged(stage, number)
        if self._clip_norm is not None:
            self._groups[stage].tell(number, norms.clone() if self._counts else None)
            self._steps[number].told.add(stage)

    def _judged(self, stage: int, number: int) -> Tensor:
        """The norms of a stage's gradients, which are finite."""
        own = self._own[stage]
        norms = own.own_norms()
        verdict = own.verdict_of(norms)
        if not verdict.is_finite:
            name = verdict.culprit
            raise NonFiniteError(
                f"the losses of step {number} are finite, its gradients are not: the "
                f"first at fault on this worker is that of {name}, stage "
                f"{self._stage_of[name]}; this stage was not updated from it, others "
                "may have been from their own gradients"
            )
        if self._counts:
            step = self._steps[number]
            # Where another stage has no gradient, it says so; a row is told by one.
            step.norms = norms if step.norms is None else step.norms + norms
        return norms
