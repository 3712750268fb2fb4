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
from functools import partial
from typing import TypeAlias

from torch import Tensor

from hocket.errors import WaitError
from hocket.run.comm.step_header import ReplicaCheck
from hocket.run.data.loss import TokenMean
from hocket.run.data.step_batch import NetBatches, StepBatch, first_of, with_counts
from hocket.run.device.late import Late
from hocket.run.engine.sync.gate import Finish, Gate, LossSum, UpdateVerdict
from hocket.run.engine.sync.results import Results
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.gradients import Gradients, GradientStatus
from hocket.run.weights.live_rates import refuse_rates

NetLosses: TypeAlias = dict[str, dict[str, float]]  # by net and name


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

    def before_update(
        self, stage: int, work: StepBatch, finish: Finish
    ) -> UpdateVerdict:
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
        is_late: whether its losses may be read in the step behind it.
    """

    shares: dict[str, dict[int, float]] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    posted: set[str] = field(default_factory=set)
    is_late: bool = False


@dataclass(eq=False)
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

    runners: Mapping[int, StageRunner]
    ends: Mapping[int, str]
    results: Mapping[str, Results]
    replicas: ReplicaCheck | None
    gates: Sequence[Gate]
    gate_of: Mapping[int, Gate]
    everyone: Gradients | None
    norms: Norms

    def __post_init__(self) -> None:
        """Begin without a step."""
        self._steps: dict[int, _Step] = {}
        self._last = 0  # the last step that has ended
        self._status = Late(lambda: GradientStatus(0.0))  # its gradients
        self._losses: Late[NetLosses] = Late(dict)
        self.posts_early = any(gate.posts_early for gate in self.gates)

    def with_counts(self, batches: list[NetBatches]) -> list[NetBatches]:
        """Weight a step's microbatches, where the loss counts targets (`TokenMean`).

        Args:
            batches: all batches of the step.

        Raises:
            WaitError: another replica did not come as far.
        """
        for stage, net in self.ends.items():
            loss = self.runners[stage].loss.function
            if isinstance(loss, TokenMean):
                add_up = self.results[net].add_up
                batches = with_counts(batches, net, loss, add_up)
        return batches

    def begin(self, batches: NetBatches) -> None:
        """Begin a batch of each net, before its first op; a step may take several."""
        for net, work in batches.items():
            step = self._steps.setdefault(work.step.number, _Step())
            step.shares.setdefault(net, {}).update(work.shares())
            if self.replicas is not None:
                self.replicas.begin(work.step)

    def after_losses(self, stage: int, work: StepBatch) -> None:
        """See `NoSync.after_losses`; the losses begin their way.

        Raises:
            ModelError: microbatches' losses are not that of the batch.
        """
        if work.ends_step:
            losses = self.runners[stage].loss.values
            losses.begin_read()
            self._steps[work.step.number].unread.add(stage)
            if losses.is_read:
                self._read_losses(stage, work.step.number)

    def _read_losses(self, stage: int, number: int, step: _Step | None = None) -> None:
        """Read the losses of a step, and begin to add them up.

        Raises:
            NonFiniteError: a loss is not finite, and was not read before.
            ModelError: microbatches' losses are not that of the batch.
        """
        step, net = step or self._steps[number], self.ends[stage]
        if stage not in step.unread:
            return
        step.unread.remove(stage)
        losses, shares = self.runners[stage].loss.values.read(number), step.shares[net]
        if len(losses) < len(shares):  # one over the whole batch
            shares = dict.fromkeys(losses, sum(shares.values()))
        self.runners[stage].loss.compare(number)
        self.results[net].begin(number, losses, shares)

    def after_backwards(self, stage: int, work: StepBatch) -> None:
        """See `NoSync.after_backwards`; others may end the step before this worker."""
        net, number = self.ends.get(stage), work.step.number
        if net is None or number != min(self._steps):  # losses are posted in order
            return
        if self.runners[stage].loss.values.is_read:
            self._read_losses(stage, number)
            if self.results[net].is_ready(number):
                self._post_losses(stage, number)

    def _post_losses(self, stage: int, number: int) -> None:
        net, posted = self.ends[stage], self._steps[number].posted
        self._read_losses(stage, number)
        if net not in posted:
            self.results[net].post(number)
            posted.add(net)

    def after_gradients(self, stage: int, work: StepBatch) -> None:
        """See `NoSync.after_gradients`; the gate may post its norms early."""
        self.gate_of[stage].complete(stage, work.step.number)

    def before_update(
        self, stage: int, work: StepBatch, finish: Finish
    ) -> UpdateVerdict:
        """See `NoSync.before_update`.

        Raises:
            NonFiniteError: a loss or a gradient is not finite, of this step or, where
                a device has left its update out, of the step before.
            SchemaError: a replica had another batch, or learning rates differ by rank.
            WaitError: another worker did not come.
        """
        number, gate = work.step.number, self.gate_of[stage]
        if self.replicas is not None:
            self.replicas.finish(number)
        self._read_late(number)
        losses: LossSum | None = None
        if gate.masks:
            losses = self._sum_of_losses(number)
        elif stage in self.ends:
            self._post_losses(stage, number)
        finish(stage)
        return gate.enter(stage, number, finish, losses)

    def _read_late(self, number: int) -> None:
        """Read the losses of earlier steps, which may have been left for this one."""
        _ = self._losses.value
        for earlier, step in self._steps.items():
            if earlier < number and step.is_late:
                for stage in list(step.unread):
                    self._read_losses(stage, earlier)

    def _sum_of_losses(self, number: int) -> LossSum:
        """Return the sum of a step's losses on the device; they are read later.

        Those that were read are finite; those that are compared whole are read now.

        Raises:
            NonFiniteError: a loss that is read now is not finite.
            ModelError: microbatches' losses are not that of the batch.
        """
        step = self._steps[number]
        step.is_late = True
        total: LossSum = 0.0
        for stage in list(step.unread):
            own = self.runners[stage].loss.sum_on_device(number)
            if own is None:
                self._read_losses(stage, number)
            else:
                total = total + own
        return total

    def close(self, batches: NetBatches, finish: Finish) -> None:
        """See `NoSync.close`; workers without updates raise what all raise.

        Raises:
            NonFiniteError: a gradient is not finite; every worker raises it.
            WaitError: another worker did not come.
        """
        work = first_of(batches)
        if work.ends_step:
            for gate in self.gates:
                gate.close(work.step.number, finish)

    def end(self, number: int) -> tuple[Late[NetLosses], Late[GradientStatus]]:
        """End a step that is over on this worker; every worker calls it, step by step.

        Returns:
            The step's losses by net, and the status of its gradients.

        Raises:
            NonFiniteError: a loss is not finite, of this step or of a late one before.
            SchemaError: learning rates differed by rank in the step before.
            WaitError: another worker did not post.
        """
        _ = self._losses.value
        step = self._steps.pop(number)
        self._losses = Late(partial(self._finished, number, step))
        if not step.is_late:
            _ = self._losses.value
        norms = self.norms.pop(number, None)
        if self.everyone is None:
            (gate,) = self.gates
            self._status = gate.status
        else:
            # Read before the next is posted.
            refuse_rates(self._status.value.rate_fault, self._last)
            self._status = self.everyone.post(
                number, self.everyone.no_norms() if norms is None else norms
            )
        self._last = number
        return self._losses, self._status

    def _finished(self, number: int, step: _Step) -> NetLosses:
        for stage in list(step.unread):
            self._read_losses(stage, number, step)
        return {net: one.finish(number) for net, one in self.results.items()}

    def take_status(self, status: Late[GradientStatus]) -> None:
        """Report this status of a step whose updates pass no gate, and are made."""
        for gate in self.gates:
            gate.status = status
        for step in self._steps.values():
            step.is_late = True

    def check_last(self) -> None:
        """Raise what is wrong with the last step that has ended; waits for it.

        Raises:
            NonFiniteError: a loss or a gradient of it is not finite.
            SchemaError: learning rates differed by rank in it.
            WaitError: another worker did not post.
        """
        _ = self._losses.value
        for gate in self.gates:
            gate.check_last()
        refuse_rates(self._status.value.rate_fault, self._last)

    def resume_from(self, number: int) -> None:
        """Set the number of the next step, after another state was loaded."""
        for gate in self.gates:
            gate.resume_from(number)

    def give_up(self) -> None:
        """End the wait for others: the pipeline ends."""
        why = (
            f"the norm of step {self._last}'s gradients is unknown: the pipeline was "
            "closed before all workers had sent theirs"
        )
        self._status.give_up(WaitError(why))
