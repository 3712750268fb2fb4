"""What happens in a step besides its ops: losses are told, gradients are judged.

lane   F F B F B B R │ U U
         │           └─ every worker waits here until all gradients of the model are
         │              complete, and learns how large they are; then all update
         │              their weights, or all stop, or all skip the step
         └─ the last stage's last forward: the losses begin their way to everyone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hocket.errors import NonFiniteError
from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.data.step_batch import Work
from hocket.run.engine.results import Results
from hocket.run.stage.precision import LossScale
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradient_status import Judgement
from hocket.run.weights.gradients import Gradients, Verdict
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.tied_weights import add_up_ties
from hocket.run.weights.updater import Updater


class StepEnds:
    """What one worker does where its lane's work is not enough.

    Args:
        runners: this device's stages by number.
        updaters: likewise.
        last_stage: the one that knows the losses; not always this device's.
        stage_of: the stage of each parameter that is trained, on any device.
        results: the losses of a step, for everyone.
        replicas: to see that all have the same batches, where there are any.
        ties: add up the gradients of shared weights over the devices that hold them.
        gradients: of this worker, as a part of all.
        scale: of the loss, where it needs one.
        clip_norm: the most that all gradients together may measure.

    Attributes:
        judgement: of the last step's gradients.
    """

    def __init__(
        self,
        runners: Mapping[int, StageRunner],
        updaters: Mapping[int, Updater],
        last_stage: int,
        stage_of: Mapping[str, int],
        results: Results,
        replicas: ReplicaCheck | None,
        ties: Sequence[Reducer],
        gradients: Gradients,
        scale: LossScale | None,
        clip_norm: float | None,
    ) -> None:
        self._last = runners.get(last_stage)
        self._updaters = updaters
        self._stage_of = stage_of
        self._results = results
        self._replicas = replicas
        self._ties = ties
        self._gradients = gradients
        self._scale = scale
        self._clip_norm = clip_norm
        self._shares: dict[int, float] = {}
        self._work: Work | None = None
        self.judgement = Judgement(0, lambda: Verdict(0.0))

    def begin(self, work: Work) -> None:
        """Before each batch of a step; a step may take several."""
        self._work = work
        self._shares.update(work.shares())
        if self._replicas is not None:
            self._replicas.begin(work.step)

    def after_losses(self, work: Work) -> None:
        """When the last stage's last forward has run, which this device has.

        Raises:
            NonFiniteError: a loss is not finite, and was not read before.
        """
        assert self._last is not None
        if not work.closes:
            return
        self._results.begin(work.step.number, self._last.losses.read(), self._shares)

    def before_updates(self) -> bool:
        """When the lane comes to its first update: whether there is any.

        Raises:
            NonFiniteError: a gradient is not finite; every worker raises it.
            SchemaError: a replica had another batch.
            WaitError: another worker did not come.
        """
        assert self._work is not None
        self._complete()
        number = self._work.step.number
        self._gradients.tell(number)
        self.judgement = Judgement(number, self._gradients.learn)
        return self._decide()

    def _complete(self) -> None:
        """Have this worker's gradients as they would be without any pipeline."""
        assert self._work is not None
        self._shares.clear()
        if self._replicas is not None:
            self._replicas.finish(self._work.step.number)
        for updater in self._updaters.values():
            updater.wait()
        add_up_ties(self._ties)
        if self._scale is not None:
            for updater in self._updaters.values():
                self._scale.unscale(updater.grads)

    def _decide(self) -> bool:
        """Do what the verdict asks for; whether there is an update."""
        verdict = self.judgement.verdict
        if self._scale is not None:
            self._scale.update(overflowed=not verdict.is_finite)
        elif not verdict.is_finite:
            raise NonFiniteError(self._fault(verdict))
        if verdict.is_finite and self._clip_norm is not None:
            self._gradients.clip(verdict, self._clip_norm)
        return verdict.is_finite

    def _fault(self, verdict: Verdict) -> str:
        name = verdict.culprit
        return (
            f"the losses of step {self.judgement.step} are finite, its gradients "
            f"are not: the first at fault is that of {name}, stage "
            f"{self._stage_of[name]}; no weights were updated from it"
        )
