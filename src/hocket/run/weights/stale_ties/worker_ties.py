"""All stale tied weights that one worker owns, or has a replica of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from hocket.run.weights.stale_ties.ends import TieOwner, TieReplica
from hocket.run.weights.stale_ties.stale_tie import StaleTie


class WorkerTies:
    """Exchanges gradients and values of one worker's stale ties.

    Args:
        stale_ties: the model's stale ties, in order of name.
        owners: the ties that this worker owns, by name.
        replicas: the ties that this worker has a replica of, by name.
        stages: this worker's stages.
    """

    def __init__(
        self,
        stale_ties: Sequence[StaleTie],
        owners: Mapping[str, TieOwner],
        replicas: Mapping[str, TieReplica],
        stages: Collection[int],
    ) -> None:
        self._weights: list[TieOwner | TieReplica] = []
        self._owners: defaultdict[int, list[TieOwner]] = defaultdict(list)
        self._replicas: defaultdict[int, list[TieReplica]] = defaultdict(list)
        self._read: defaultdict[int, list[TieReplica]] = defaultdict(list)
        for tie in stale_ties:
            if tie.name in owners:
                self._weights.append(owners[tie.name])
                self._owners[tie.stages[0]].append(owners[tie.name])
            if tie.name in replicas:
                weight = replicas[tie.name]
                own = [stage for stage in tie.stages if stage in stages]
                self._weights.append(weight)
                self._replicas[own[0]].append(weight)  # its backwards come last
                for stage in own:
                    self._read[stage].append(weight)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._weights)

    def before_forward(self, stage: int, step: int) -> None:
        """Receive the values that a stage reads in a step.

        Raises:
            WaitError: they did not come.
        """
        for weight in self._read[stage]:
            weight.read(step)

    def before_backward(self, stage: int, step: int) -> None:
        """Expect gradients; called when a backward of a stage is about to begin."""
        for weight in self._owners[stage]:
            weight.expect(step)

    def complete(self, stage: int, step: int) -> None:
        """Exchange gradients, when a stage's are complete on this device.

        Raises:
            WaitError: another device's did not come.
        """
        for owners in self._owners[stage]:
            owners.gather(step)
        for replicas in self._replicas[stage]:
            replicas.send_gradient(step)

    def after_update(self, stage: int) -> None:
        """Send the values of an updated stage."""
        for weight in self._owners[stage]:
            weight.send_values()

    def receive_pending(self) -> None:
        """Receive the newest values everywhere, when no step is in flight.

        Raises:
            WaitError: they did not come.
        """
        for weight in self._weights:
            weight.receive_pending()

    def resume_from(self, num_updates: int) -> None:
        """Set the number of updates, after other weights were loaded.

        Raises:
            WaitError: predicted values did not come.
        """
        for weight in self._weights:
            weight.resume_from(num_updates)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Exchange the averaged weights, if they are in place, for a while.

        Raises:
            WaitError: they did not come.
        """
        with ExitStack() as stack:
            for weight in self._weights:
                stack.enter_context(weight.averaged())
            yield
