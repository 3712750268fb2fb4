"""A weight that a stage of this device updates, and other devices read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn

from hocket.run.comm.schema import message_tag
from hocket.run.comm.transport import Receiver, Sender
from hocket.run.stage.versions import WeightVersions
from hocket.run.weights.stale_ties.stale_tie import (
    SendReason,
    gradient_schema,
    values_schema,
)


class TieOwner:
    """Takes the other devices' gradients, and sends what the updates make.

    Args:
        name: of the weight.
        parameter: that is updated.
        versions: of the stage.
        gradients: from each other device that holds it.
        values: to these.
        predicts: whether forwards read other values than the newest weights.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        versions: WeightVersions,
        gradients: Sequence[Receiver],
        values: Sequence[Sender],
        *,
        predicts: bool,
    ) -> None:
        self.name: Final = name
        self._parameter = parameter
        self._versions = versions
        self._gradients = gradients
        self._values = values
        self._predicts = predicts
        self._gradient_schema = gradient_schema(parameter)
        self._values_schema = values_schema(parameter, predicts=predicts)
        self._expected = -1  # the newest step whose gradients are

    def expect(self, step: int) -> None:
        """The stage's backwards of a step have begun: let the others' gradients come.

        Calling it again changes nothing.
        """
        if step == self._expected:
            return
        self._expected = step
        for receiver in self._gradients:
            receiver.expect([self._gradient_tag(step)], self._gradient_schema)

    def gather(self, step: int) -> None:
        """Add the others' gradients to the complete one of this device.

        Raises:
            WaitError: one did not come.
        """
        tag, parameter = self._gradient_tag(step), self._parameter
        for receiver in self._gradients:
            grad, is_there = receiver.receive(tag)
            if is_there.item():
                own = parameter.grad
                parameter.grad = grad.clone() if own is None else _sum(own, grad)
            receiver.release(tag)

    def send_values(self, why: SendReason = SendReason.UPDATED) -> None:
        """Send the values that are in place.

        Raises:
            WaitError: another holder did not take earlier ones.
        """
        values = [self._parameter.detach()]
        if self._predicts:
            values.append(self._versions.newest(self.name))
        tag = message_tag(self._values_schema, self._versions.num_updates, why)
        for sender in self._values:
            sender.send(tag, values, self._values_schema)

    def settle(self) -> None:
        """Nothing is left to do: others take what was sent."""

    def resume_from(self, _: int) -> None:
        """Other weights were put in place: have what they predict everywhere."""
        self._expected = -1
        if self._predicts:
            self.send_values(SendReason.LOADED)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While the averaged weights are in place here, have them everywhere."""
        self.send_values(SendReason.AVERAGED)
        yield

    def _gradient_tag(self, step: int) -> int:
        return message_tag(self._gradient_schema, step, 0)


def _sum(own: Tensor, other: Tensor) -> Tensor:
    """An embedding's may be sparse."""
    return other.add(own) if own.is_sparse else own.add_(other)
