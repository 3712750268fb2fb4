"""What workers exchange in a step besides the schedule's values: losses and norms.

    lane   F F B F B B R │ U U
                 │       └─ gates: gradients are judged, clipped and updated together
                 └─ the losses are posted once the last stage's host has all of them

Where one gate has all stages, its norms are the step's. Where steps overlap, each step
has several gates: their norms are added up when the step is over, and read one step
later, when that takes no wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.data.step_batch import NetBatches, StepBatch, first_of, with_counts
from hocket.run.data.token_mean import TokenMean
from hocket.run.engine.sync.gate import Finish, Gate
from hocket.run.engine.sync.results import Results
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradient_status import PendingGradientStatus
from hocket.run.weights.gradients import Gradients, GradientStatus
from hocket.run.weights.live_rates import refuse_rates


class Norms(dict[int, Tensor]):
    """The norms of this worker's gradients, by step: one row for each parameter."""

    def add(self, step: int, norms: Tensor) -> None:
        """Add the norms of some gradients; rows of others are zero."""
        self[step] = self[step] + norms if step in self else norms


class NoSync:
    """Exchanges nothing: nothing is updated.

    Attributes:
        posts_early: whether other workers may wait for norms of gradients that are
            complete here, before this worker's lane comes to an update.
    """

    posts_early = False

    def after_losses(self, stage: int, work: StepBatch) -> None:
        """Called when the last stage's last forward of a batch has run."""

    def after_backwards(self, stage: int, work: StepBatch) -> None:
        """Called when a stage's last backward of a step has run."""

    def after_gradients(self, stage: int, work: StepBatch) -> None:
        """Called when a stage's gradients are complete, over all replicas."""

    def before_update(self, stage: int, work: StepBatch, finish: Finish) -> bool:
        """Called when a lane comes to an update; whether the update is made."""
        raise AssertionError("an update without gates")

    def close(self, batches: NetBatches, finish: Finish) -> None:
        """Called when a step is over that does not overlap with others."""


@dataclass(slots=True)
class _Step:
    """A step under way.

    Args:
        shares: each microbatch's share of the step, by samples, for each net.
        unread: the stages whose losses are complete, and not read yet.
        posted: the nets whose losses this worker has posted.
    """

    shares: dict[str, dict[int, float]] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    posted: set[str] = field(default_factory=set)


class StepSync(NoSync):
    """One worker's part of what is exchanged.

    Args:
        runners: this device's stages.
        ends: the nets of those that make losses.
        results: broadcasts the losses of each net that has any.
        replicas: sees that all replicas have the same batches; None without replicas.
        gates: the gates of this program, in one order on all workers.
        gate_of: the gate of each of this device's trained stages.
        everyone: adds up the norms of all gradients; None where one gate does.
        norms: the norms that this worker's gates have seen, by step.
    """

    def __init__(
        self,
        runners: Mapping[int, StageRunner],
        ends: Mapping[int, str],
        results: Mapping[str, Results],
        replicas: ReplicaCheck | None,
        gates: Sequence[Gate],
        gate_of: Mapping[int, Gate],
        everyone: Gradients | None,
        norms: Norms,
    ) -> None:
        self._runners = runners
        self._ends = ends
        self._results = results
        self._replicas = replicas
        self._gates = gates
        self._gate_of = gate_of
        self._everyone = everyone
        self._norms = norms
        self._steps: dict[int, _Step] = {}
        self._status = PendingGradientStatus(0, lambda: GradientStatus(0.0))
        self.posts_early = any(gate.posts_early for gate in gates)

    def with_counts(self, batches: list[NetBatches]) -> list[NetBatches]:
        """Weight a step's microbatches, where the loss counts targets (`TokenMean`).

        Args:
            batches: all batches of the step.

        Raises:
            WaitError: another replica did not come as far.
        """
        for stage, net in self._ends.items():
            loss = self._runners[stage].loss.function
            if isinstance(loss, TokenMean):
                add_up = self._results[net].add_up
                batches = with_counts(batches, net, loss, add_up)
        return batches

    def begin(self, batches: NetBatches) -> None:
        """Begin a batch of each net, before its first op; a step may take several."""
        for net, work in batches.items():
            step = self._steps.setdefault(work.step.number, _Step())
            step.shares.setdefault(net, {}).update(work.shares())
            if self._replicas is not None:
                self._replicas.begin(work.step)

    def after_losses(self, stage: int, work: StepBatch) -> None:
        """See `NoSync.after_losses`; the losses begin their way.

        Raises:
            ModelError: microbatches' losses are not that of the batch.
        """
        if work.ends_step:
            losses = self._runners[stage].loss.values
            losses.begin_read()
            self._steps[work.step.number].unread.add(stage)
            if losses.is_read:
                self._read_losses(stage, work.step.number)

    def _read_losses(self, stage: int, number: int) -> None:
        """Read the losses of a step, and begin to add them up.

        Raises:
            NonFiniteError: a loss is not finite, and was not read before.
            ModelError: microbatches' losses are not that of the batch.
        """
        step, net = self._steps[number], self._ends[stage]
        if stage not in step.unread:
            return
        step.unread.remove(stage)
        losses, shares = self._runners[stage].loss.values.read(number), step.shares[net]
        if len(losses) < len(shares):  # one over the whole batch
            shares = dict.fromkeys(losses, sum(shares.values()))
        self._runners[stage].loss.compare(number)
        self._results[net].begin(number, losses, shares)

    def after_backwards(self, stage: int, work: StepBatch) -> None:
        """See `NoSync.after_backwards`; others may end the step before this worker."""
        net, number = self._ends.get(stage), work.step.number
        if net is None or number != min(self._steps):  # losses are posted in order
            return
        if self._runners[stage].loss.values.is_read:
            self._read_losses(stage, number)
            if self._results[net].is_ready(number):
                self._post_losses(stage, number)

    def _post_losses(self, stage: int, number: int) -> None:
        net, posted = self._ends[stage], self._steps[number].posted
        self._read_losses(stage, number)
        if net not in posted:
            self._results[net].post(number)
            posted.add(net)

    def after_gradients(self, stage: int, work: StepBatch) -> None:
        """See `NoSync.after_gradients`; the gate may post its norms early."""
        self._gate_of[stage].complete(stage, work.step.number)

    def before_update(self, stage: int, work: StepBatch, finish: Finish) -> bool:
        """See `NoSync.before_update`.

        Raises:
            NonFiniteError: a loss or a gradient is not finite.
            SchemaError: a replica had another batch, or learning rates differ by rank.
            WaitError: another worker did not come.
        """
        number = work.step.number
        if self._replicas is not None:
            self._replicas.finish(number)
        if stage in self._ends:
            self._post_losses(stage, number)
        finish(stage)
        return self._gate_of[stage].enter(stage, number, finish)

    def close(self, batches: NetBatches, finish: Finish) -> None:
        """See `NoSync.close`; workers without updates raise what all raise.

        Raises:
            NonFiniteError: a gradient is not finite; every worker raises it.
            WaitError: another worker did not come.
        """
        work = first_of(batches)
        if work.ends_step:
            for gate in self._gates:
                gate.close(work.step.number, finish)

    def end(
        self, number: int
    ) -> tuple[dict[str, dict[str, float]], PendingGradientStatus]:
        """End a step that is over on this worker; every worker calls it, step by step.

        Returns:
            The step's losses by net, and the status of its gradients.

        Raises:
            NonFiniteError: a loss is not finite.
            SchemaError: learning rates differed by rank in the step before.
            WaitError: another worker did not post.
        """
        for stage in list(self._steps[number].unread):
            self._read_losses(stage, number)
        del self._steps[number]
        norms = self._norms.pop(number, None)
        if self._everyone is None:
            (gate,) = self._gates
            self._status = gate.status
        else:
            self.check_last_status()  # read before the next is posted
            self._everyone.post(
                number, self._everyone.no_norms() if norms is None else norms
            )
            self._status = PendingGradientStatus(number, self._everyone.wait)
        losses = {net: one.finish(number) for net, one in self._results.items()}
        return losses, self._status

    def take_status(self, status: PendingGradientStatus) -> None:
        """Report this status of a step whose updates passed no gate."""
        for gate in self._gates:
            gate.status = status

    def check_last_status(self) -> None:
        """Read the status of the last step that has ended.

        Raises:
            SchemaError: learning rates differed by rank in it.
            WaitError: another worker did not post.
        """
        refuse_rates(self._status.status.rate_fault, self._status.step)

    def resume_from(self, number: int) -> None:
        """Set the number of the next step, after another state was loaded."""
        for gate in self._gates:
            gate.resume_from(number)

    def give_up(self) -> None:
        """End the wait for others: the pipeline ends."""
        self._status.give_up()
