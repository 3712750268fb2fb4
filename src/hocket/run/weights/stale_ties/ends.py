"""The ends of a stale tied weight: the owner updates it, and sends it to the replicas.

Stages of a replica's device read it. There a version lives in the message that brought
it, as long as it is read. Each step reads a leaf of its own in that memory, and so has
a gradient of its own:

    version 4      leaf of step 5 ─ gradient ▶ sent     delay 1
    version 5 ═══ parameter
    version 6      on its way
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.run.comm.schema import message_tag
from hocket.run.comm.transport import Receiver, Sender
from hocket.run.stage.versions import WeightVersions
from hocket.run.weights.stale_ties.stale_tie import (
    SendReason,
    gradient_schema,
    values_schema,
)


@dataclass(frozen=True, slots=True)
class _Version:
    """The weight after some update.

    Args:
        weight: its values.
        tag: the tag of the message that holds them; None if they are not in one.
    """

    weight: Tensor
    tag: int | None = None


@dataclass(eq=False)
class TieReplica:
    """Receives a weight from its owner, and sends gradients there.

    Args:
        name: the weight's name.
        delay: how many updates behind the newest it is read.
        parameter: this device's parameter, with the newest values received.
        gradients: the sender to the owner.
        values: the receiver from the owner.
    """

    name: str
    delay: int
    parameter: nn.Parameter
    gradients: Sender
    values: Receiver

    def __post_init__(self) -> None:
        """Begin with the weight as it is."""
        self._gradient_schema = gradient_schema(self.parameter)
        self._values_schema = values_schema(self.parameter)
        self._newest = 0  # the version that has come last
        self._num_coming = 0
        self._known = {0: _Version(self.parameter.data)}
        self._leaves: dict[int, Tensor] = {}  # the leaves of steps in flight

    def read(self, step: int) -> Tensor:
        """Return the leaf of a step, waiting for its values if need be.

        Raises:
            WaitError: they did not come.
        """
        if step not in self._leaves:
            version = max(0, step - self.delay)
            while self._newest < version:
                self._take()
            known = self._known[max(version, min(self._known))]
            self._leaves[step] = known.weight.detach().requires_grad_()
        return self._leaves[step]

    def send_gradient(self, step: int) -> None:
        """Send the complete gradient of a step, and expect the next values.

        Raises:
            WaitError: the owner did not take earlier ones.
        """
        while self._num_coming and self.values.ready(self._tag(self._newest + 1)):
            self._take()
        self._forget_before(min(self._newest, step + 1 - self.delay))
        grad = self._leaves.pop(step).grad
        is_there = self.parameter.new_full((1,), float(grad is not None))
        if grad is None:
            grad = torch.zeros_like(self.parameter)
        dense = grad.to_dense() if grad.is_sparse else grad
        schema = self._gradient_schema
        self.gradients.send(message_tag(schema, step, 0), (dense, is_there), schema)
        self.values.expect([self._tag(step + 1)], self._values_schema)
        self._num_coming += 1

    def receive_pending(self) -> None:
        """Receive all values in flight, when no step is.

        Raises:
            WaitError: they did not come.
        """
        while self._num_coming:
            self._take()
        self._forget_before(self._newest - self.delay)

    def set_old(self, old: Sequence[Tensor]) -> None:
        """Load other old versions; the parameter is the newest.

        Args:
            old: the values to read, the oldest first. Copied.
        """
        self._leaves.clear()
        newest = self._known[self._newest]
        self._forget_before(self._newest)
        begin = self._newest - len(old)
        for i, values in enumerate(old):
            self._known[begin + i] = _Version(values.detach().clone())
        self._known[self._newest] = _Version(self.parameter.data, newest.tag)

    def resume_from(self, num_updates: int) -> None:
        """Set the number of updates, after other weights were loaded."""
        further = num_updates - self._newest
        self._newest = num_updates
        self._known = {version + further: x for version, x in self._known.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Receive the averaged weights for a while.

        Raises:
            WaitError: they did not come.
        """
        kept, self.parameter.data = (
            self.parameter.data,
            self._received(SendReason.AVERAGED)[0],
        )
        try:
            yield
        finally:
            self.parameter.data = kept

    @property
    def num_bytes(self) -> int:
        """The bytes of all versions but the newest weights."""
        return sum(x.weight.nbytes for v, x in self._known.items() if v != self._newest)

    def _take(self) -> None:
        """Receive the next values, and put them in place."""
        tag = self._tag(self._newest + 1)
        (weight,) = self.values.receive(tag)
        self._num_coming -= 1
        self._newest += 1
        self._known[self._newest] = _Version(weight, tag)
        self.parameter.data = weight

    def _received(self, why: SendReason) -> list[Tensor]:
        """Receive values that are sent between steps; return copies."""
        tag = self._tag(self._newest, why)
        self.values.expect([tag], self._values_schema)
        found = [tensor.clone() for tensor in self.values.receive(tag)]
        self.values.release(tag)
        return found

    def _forget_before(self, version: int) -> None:
        for dead in [v for v in self._known if v < version]:
            tag = self._known.pop(dead).tag
            if tag is not None:
                self.values.release(tag)

    def _tag(self, version: int, why: SendReason = SendReason.UPDATED) -> int:
        return message_tag(self._values_schema, version, why)


@dataclass(eq=False)
class TieOwner:
    """Receives the other devices' gradients, and sends the updated values.

    Args:
        name: the weight's name.
        parameter: the parameter that is updated.
        versions: the versions of the stage's weights.
        gradients: receivers from each other device that holds it.
        values: senders to these devices.
    """

    name: str
    parameter: nn.Parameter
    versions: WeightVersions
    gradients: Sequence[Receiver]
    values: Sequence[Sender]

    def __post_init__(self) -> None:
        """Begin without messages."""
        self._gradient_schema = gradient_schema(self.parameter)
        self._values_schema = values_schema(self.parameter)
        self._expected = -1  # the newest step whose gradients are expected

    def expect(self, step: int) -> None:
        """Expect the other devices' gradients of a step, at its first backward.

        Calling it again changes nothing.
        """
        if step == self._expected:
            return
        self._expected = step
        for receiver in self.gradients:
            receiver.expect([self._gradient_tag(step)], self._gradient_schema)

    def gather(self, step: int) -> None:
        """Add the other devices' gradients to this device's.

        Raises:
            WaitError: a gradient did not come.
        """
        tag, parameter = self._gradient_tag(step), self.parameter
        for receiver in self.gradients:
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
        values = [self.parameter.detach()]
        tag = message_tag(self._values_schema, self.versions.num_updates, why)
        for sender in self.values:
            sender.send(tag, values, self._values_schema)

    def receive_pending(self) -> None:
        """Do nothing: the replicas receive what was sent."""

    def resume_from(self, _: int) -> None:
        """Expect the next step's gradients, after other weights were loaded."""
        self._expected = -1

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
