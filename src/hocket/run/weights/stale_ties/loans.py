"""All weights that one worker lends and borrows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from hocket.run.weights.stale_ties.borrowed import Borrowed
from hocket.run.weights.stale_ties.lent import Lent
from hocket.run.weights.stale_ties.loan import Loan


class Loans:
    """What one worker does about them, at some points of its lane.

    Args:
        loans: of the model, in order of name.
        lent: of these, by name.
        borrowed: likewise.
        stages: of this worker.
    """

    def __init__(
        self,
        loans: Sequence[Loan],
        lent: Mapping[str, Lent],
        borrowed: Mapping[str, Borrowed],
        stages: Collection[int],
    ) -> None:
        self._weights: list[Lent | Borrowed] = []
        self._lent: defaultdict[int, list[Lent]] = defaultdict(list)
        self._borrowed: defaultdict[int, list[Borrowed]] = defaultdict(list)
        self._read: defaultdict[int, list[Borrowed]] = defaultdict(list)
        for loan in loans:
            if loan.name in lent:
                self._weights.append(lent[loan.name])
                self._lent[loan.stages[0]].append(lent[loan.name])
            if loan.name in borrowed:
                weight = borrowed[loan.name]
                own = [stage for stage in loan.stages if stage in stages]
                self._weights.append(weight)
                self._borrowed[own[0]].append(weight)  # its backwards come last
                for stage in own:
                    self._read[stage].append(weight)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._weights)

    def before_forward(self, stage: int, step: int) -> None:
        """Have what a stage reads in a step.

        Raises:
            WaitError: it did not come.
        """
        for weight in self._read[stage]:
            weight.read(step)

    def before_backward(self, stage: int, step: int) -> None:
        """A backward of a stage is about to begin."""
        for weight in self._lent[stage]:
            weight.expect(step)

    def complete(self, stage: int, step: int) -> None:
        """The gradients of a stage are complete on this device: have them together.

        Raises:
            WaitError: another holder's did not come.
        """
        for lent in self._lent[stage]:
            lent.gather(step)
        for borrowed in self._borrowed[stage]:
            borrowed.give_back(step)

    def after_update(self, stage: int) -> None:
        """A stage has been updated."""
        for weight in self._lent[stage]:
            weight.lend()

    def settle(self) -> None:
        """Have the newest values everywhere, when no step is under way.

        Raises:
            WaitError: they did not come.
        """
        for weight in self._weights:
            weight.settle()

    def go_on_from(self, num_updates: int) -> None:
        """Other weights were put in place, after so many updates.

        Raises:
            WaitError: what they predict did not come.
        """
        for weight in self._weights:
            weight.go_on_from(num_updates)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the averaged weights everywhere, where they are in place.

        Raises:
            WaitError: they did not come.
        """
        with ExitStack() as stack:
            for weight in self._weights:
                stack.enter_context(weight.averaged())
            yield
