"""Send every worker the step's losses, which only the last stage has.

They are ready when the last forward has run, long before the step's end:

    last stage   ... F B F B ─┬─ B B U ─┬─ finish: to all devices
                              │         │
                              └─▶ over the replicas
                                post: to all devices at once, for those that end
                                their lanes before this one does

With them goes whether the job is asked to end (run/cluster/stop.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.run.cluster.group import GroupWork, WorkerGroup
from hocket.run.comm.schema import Schema, TensorSpec, message_tag
from hocket.run.comm.schema_exchange import wait_for_value
from hocket.run.comm.transport import Carries, Channel, Receiver, Sender
from hocket.run.engine.worker_context import WorkerContext

_KEY = "loss names"
_WHAT = "losses of the replicas"
_COUNT = "counted targets of the replicas"


@dataclass(eq=False)
class Results:
    """Sums the losses over microbatches and replicas, and hands them round.

    Args:
        net: the net whose losses they are.
        last_device: where the last stage lives.
        replicas: this worker and its replicas, where there are several.
        context: this worker's; the losses' names are published in its store, once.
    """

    net: str
    last_device: int
    replicas: InitVar[WorkerGroup | None]
    context: WorkerContext

    def __post_init__(self, replicas: WorkerGroup | None) -> None:
        """Open the channels; every worker must call this."""
        context, ranks = self.context, self.context.layout.ranks
        device, source = context.layout.device, ranks[self.last_device]
        self.group = replicas if device == self.last_device else None
        self._stop, self._store = context.world.stop, context.store
        self._key = f"{_KEY} of {self.net} from rank {source}"
        self._names: list[str] = []
        self._schema: Schema | None = None  # of a message, once the names are known
        self._sums: dict[int, Tensor] = {}  # of each step, until they are sent
        self._works: dict[int, GroupWork] = {}
        self._posted: dict[int, list[float]] = {}  # until they are asked for
        self._senders: list[Sender] = []
        self._receiver: Receiver | None = None
        self._channel = Channel(
            f"results of {self.net}>{device}",
            source,
            ranks[device],
            Carries.HOST,
        )
        for other, rank in enumerate(ranks):
            name = f"results of {self.net}>{other}"
            channel = Channel(name, source, rank, Carries.HOST)
            if other == self.last_device:
                continue
            if device == self.last_device:
                self._senders.append(context.transport.sender(channel))
            elif device == other:
                self._receiver = context.transport.receiver(channel)

    def begin(
        self,
        step: int,
        losses: Mapping[int, Mapping[str, float]],
        shares: Mapping[int, float],
    ) -> None:
        """Begin to add up the losses, when the step's last forward has run.

        Only the last stage calls this.

        Args:
            step: whose losses they are.
            losses: each microbatch's, by name.
            shares: each microbatch's share of the whole step.

        Raises:
            ModelError: the names are not the same for all microbatches and steps.
        """
        if not self._names:
            self._names = list(next(iter(losses.values())))
            self._store.set(self._key, json.dumps(self._names))
        names = self._names
        for microbatch, named in losses.items():
            if list(named) != names:
                raise ModelError(
                    f"the loss function named {', '.join(named)} for microbatch "
                    f"{microbatch}, and {', '.join(names)} before: it must name the "
                    "same scalars in the same order each time"
                )
        sums = self._sums[step] = torch.tensor(
            [
                *(
                    sum(shares[m] * named[name] for m, named in losses.items())
                    for name in names
                ),
                self._stop.looked(),
            ],
            dtype=torch.float64,
        )
        if self.group is not None:
            self._works[step] = self.group.all_reduce(sums, _WHAT)

    def add_up(self, own: float) -> float:
        """Add a number up over the last stage's replicas, and wait for it.

        Raises:
            WaitError: another replica's last stage did not come as far.
        """
        if self.group is None:
            return own
        total = torch.tensor(own, dtype=torch.float64)
        self.group.wait(self.group.all_reduce(total, _COUNT), _COUNT)
        return total.item()

    def is_ready(self, step: int) -> bool:
        """Whether `post` would not wait; only the last stage asks, after `begin`."""
        return self.group is None or bool(self._works[step].is_completed())

    def post(self, step: int) -> None:
        """Send the losses to all others, before `finish` would.

        Only the last stage calls this, after `begin`.

        Raises:
            WaitError: another replica's last stage did not come as far.
        """
        sums = self._sums.pop(step)
        if self.group is not None:
            self.group.wait(self._works.pop(step), _WHAT)
        for sender in self._senders:
            schema = self._made_schema()
            sender.send(message_tag(schema, step, 0), (sums,), schema)
        self._posted[step] = sums.tolist()

    def finish(self, step: int) -> dict[str, float]:
        """On every worker, at the end of its lane: the losses of the step."""
        if self._receiver is not None:
            sums = self._receive(step)
        else:
            if step in self._sums:
                self.post(step)
            sums = self._posted.pop(step)
        *values, num_asked = sums
        self._stop.is_agreed |= num_asked > 0
        return dict(zip(self._names, values, strict=True))

    def _made_schema(self) -> Schema:
        if self._schema is None:
            self._schema = Schema((TensorSpec((len(self._names) + 1,), "float64"),))
        return self._schema

    def _receive(self, step: int) -> list[float]:
        assert self._receiver is not None
        if not self._names:
            what = "the names of the losses"
            message = wait_for_value(
                self._store, self._channel, self._key, what, self.context.timeout_s
            )
            self._names = json.loads(message)
        schema = self._made_schema()
        tag = message_tag(schema, step, 0)
        self._receiver.expect([tag], schema)
        (sums,) = self._receiver.receive(tag)
        values: list[float] = sums.tolist()
        self._receiver.release(tag)
        return values
