"""The owner of a stale tied weight: updates it, and sends it to the replicas."""

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
    """Receives the other devices' gradients, and sends the updated values.

    Args:
        name: the weight's name.
        parameter: the parameter that is updated.
        versions: the versions of the stage's weights.
        gradients: receivers from each other device that holds it.
        values: senders to these devices.
        predicts: whether forwards read predicted values.
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
        self._expected = -1  # the newest step whose gradients are expected

    def expect(self, step: int) -> None:
        """Expect the other devices' gradients of a step, at its first backward.

        Calling it again changes nothing.
        """
        if step == self._expected:
            return
        self._expected = step
        for receiver in self._gradients:
            receiver.expect([self._gradient_tag(step)], self._gradient_schema)

    def gather(self, step: int) -> None:
        """Add the other devices' gradients to this device's.

        Raises:
            WaitError: a gradient did not come.
        """
        tag, parameter = self._gradient_tag(step), self._parameter
        for receiver in self._gradients:
            grad, is_there = receiver.receive(tag)
            if is_there.item():
                own = parameter.grad
                parameter.grad = grad.clone() if own is None else _sum(own, grad)
            receiver.release(tag)

    def send_values(self, why: SendReason = SendReason.UPDATED) -> None:
        """Send the present values.

        Raises:
            WaitError: another device did not take earlier ones.
        """
        values = [self._parameter.detach()]
        if self._predicts:
            values.append(self._versions.newest(self.name))
        tag = message_tag(self._values_schema, self._versions.num_updates, why)
        for sender in self._values:
            sender.send(tag, values, self._values_schema)

    def receive_pending(self) -> None:
        """Do nothing: the replicas receive what was sent."""

    def resume_from(self, _: int) -> None:
        """Send the predicted values after other weights were loaded."""
        self._expected = -1
        if self._predicts:
            self.send_values(SendReason.LOADED)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Send the averaged weights, which are in place here."""
        self.send_values(SendReason.AVERAGED)
        yield

    def _gradient_tag(self, step: int) -> int:
        return message_tag(self._gradient_schema, step, 0)


def _sum(own: Tensor, other: Tensor) -> Tensor:
    """Add two gradients, either of which may be sparse."""
    return other.add(own) if own.is_sparse else own.add_(other)
