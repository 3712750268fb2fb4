"""Point-to-point messages of one worker: their channels, order, tags and schemas.

Every value that a device makes and another one reads is one message, in a channel of
its stage and kind:

    device of stage a ──F a>b──▶ device of stage b
                      ◀─B b>a───

Each of the sender's lanes has a channel of its own, whose messages come in the lane's
order, so the receiver can have buffers ready before they are sent. What a message holds
(shapes and types) is agreed once per shape signature, through the store, and is part of
every tag, together with the step, the microbatch and a digest of the batch. The first
output of a step in each channel follows a header, by which workers with different
batches find out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from hocket.core.checker.links import check_queues
from hocket.core.dataflow import Fact
from hocket.core.gates import gates_of
from hocket.core.op import STEP_ENDS, Op
from hocket.core.plans.lane_plan import Message, OpPlan
from hocket.core.plans.message_order import Queue, ops_together, plan_queues
from hocket.core.program import Program
from hocket.errors import DeadlockError, RunError
from hocket.run.comm.step_header import Signature, StepHeader
from hocket.run.comm.transport import Carries, Channel, Post
from hocket.run.data.step_batch import Batches, NetBatches
from hocket.run.device.device import Device
from hocket.run.engine.lanes.channel_ends import (
    Incoming,
    LaneChannels,
    MicrobatchKey,
    Outgoing,
    Schemas,
    SharedReceivers,
    Sizing,
)
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion, PortionPlan
from hocket.run.engine.worker_context import WorkerContext

Route = tuple[Fact, int, int]  # fact, stage that makes it, device that reads it
Source = tuple[Fact, int, int]  # fact, stage that makes it, lane that sends it


class Orders(NamedTuple):
    """The order of a portion's messages.

    Args:
        arrivals: the places of each source's messages, in the order in which they come.
        groups: all messages of this device, in the order in which it posts them, if the
            transport needs it; those of a group together. Empty at the places of R and
            U.
    """

    arrivals: dict[Source, list[MicrobatchKey]]
    groups: list[list[tuple[Message, MicrobatchKey]]]


WHOLE_BATCH: Final = 0  # in the place of a microbatch: a value that is one per step
_LETTERS: Final = {Fact.OUTPUT: "F", Fact.INPUT_GRAD: "B", Fact.GATHERED: "G"}


@dataclass(eq=False)
class PointToPoint:
    """Sends and receives the values that cross devices.

    Args:
        plan: what is played; of all devices.
        context: this worker's.
        prefix: begins the names of channels; differs between training and evaluation.

    Raises:
        RunError: the transport needs an order of messages, and there is none.
    """

    plan: PlayPlan
    context: WorkerContext
    prefix: str = ""

    def __post_init__(self) -> None:
        """Open all channels; every worker must call this."""
        self._meanwhile: Callable[[], bool] | None = None
        context, ranks = self.context, self.context.layout.ranks
        self.device, self.transport = context.layout.device, context.transport
        if self.transport.needs_order:
            refuse_unordered(self.plan)
        self._nets = [stage.net for stage in self.plan.program.stages]
        schemas = Schemas(context.store, context.timeout_s)
        self._out: dict[tuple[Route, int], Outgoing] = {}
        self._in: dict[Source, Incoming] = {}
        shared = None
        if context.lanes is not None:
            check = partial(self._check, context.lanes)
            shared = SharedReceivers(threading.RLock(), check)
        for (fact, stage, to_device), message in _routes(self.plan):
            from_device, lane = message.from_device, message.from_lane
            (a, b), *_ = message.flows
            name = f"{self.prefix}{_LETTERS[fact]}{a}>{b}"
            if lane != self.plan.schedule.lanes_of(from_device)[0]:
                name += f" of lane {lane}"
            route = fact, stage, to_device
            sizing = Sizing(self._nets[stage], _signature(self.plan.program, route))
            ends = ranks[from_device], ranks[to_device]
            channel = Channel(name, *ends, Carries.PLANNED)
            if from_device == self.device:
                sender = self.transport.sender(channel)
                self._out[route, lane] = Outgoing(channel, sender, schemas, sizing)
            elif to_device == self.device:
                receiver = self.transport.receiver(channel)
                self._in[fact, stage, lane] = Incoming(
                    channel,
                    receiver,
                    schemas,
                    sizing,
                    shared,
                    in_order=self.transport.needs_order,
                )
        # Of what a stage makes in several lanes; filled by `incoming`.
        self._of_lanes: dict[tuple[Fact, int], LaneChannels] = {}

    def begin(self, steps: Mapping[str, StepHeader]) -> None:
        """Begin a batch: a header goes before its first output in each channel.

        Args:
            steps: each net's header.
        """
        for ((fact, stage, _), _lane), outgoing in self._out.items():
            if fact is Fact.OUTPUT:
                outgoing.begin(steps[self._nets[stage]])
        for (fact, stage, _), incoming in self._in.items():
            if fact is Fact.OUTPUT:
                incoming.begin(steps[self._nets[stage]])

    def orders_of(self, part: PortionPlan) -> Orders:
        """Return in which order the messages of a portion come to this worker.

        Args:
            part: the portion; its messages go through channels that are there.
        """
        found: dict[Source, list[MicrobatchKey]] = {key: [] for key in self._in}
        for lane in part.lanes:
            for op in lane:
                for message in op.sends:
                    value = message.value
                    if message.to_device == self.device:
                        place = _place(message, part)
                        found[value.fact, value.stage, message.from_lane].append(place)
        if not self.transport.needs_order:
            return Orders(found, [])
        queues = plan_messages(self.plan, part)
        groups = [
            []
            if isinstance(item, OpPlan)
            else [(message, _place(message, part)) for message in item]
            for item in queues[self.device]
            if not isinstance(item, OpPlan) or item.op.kind in STEP_ENDS
        ]
        return Orders(found, groups)

    def do_meanwhile(self, act: Callable[[], bool]) -> None:
        """Call this while a message is waited for, as long as it returns True."""
        self._meanwhile = act
        for incoming in self._in.values():
            incoming.meanwhile = act

    def outgoing(self, route: Route) -> dict[int, Outgoing]:
        """Return the channels of a route, by the lane that sends."""
        return {lane: end for (of, lane), end in self._out.items() if of == route}

    def incoming(self, fact: Fact, stage: int) -> Incoming | LaneChannels:
        """Return where the values of a stage of another device come in."""
        found = [end for key, end in self._in.items() if key[:2] == (fact, stage)]
        if len(found) == 1:
            return found[0]
        return self._of_lanes.setdefault((fact, stage), LaneChannels(self._nets[stage]))

    def expect(self, orders: Orders, first: int, batches: Batches) -> None:
        """Have buffers ready for a portion's messages, as far as shapes are agreed.

        A batch may have fewer microbatches than the schedule (the last one in
        evaluation); those that it has come in the schedule's order.

        Args:
            orders: the messages of the portion that is about to be played, as
                `orders_of` returns them.
            first: the step that the portion's step 0 is.
            batches: the batches under way, by step and net.
        """
        for source, incoming in self._in.items():
            places = orders.arrivals[source]
            incoming.expect(places, first, batches)
            if source[:2] in self._of_lanes:
                self._of_lanes[source[:2]].expect(incoming, places, first, batches)
        if orders.groups:
            groups = [
                [
                    self._post(message)
                    for message, (relative, microbatch) in group
                    if microbatch < len(self._sizes(message, batches[first + relative]))
                ]
                for group in orders.groups
            ]
            self.transport.plan(
                [
                    group
                    for group, planned in zip(groups, orders.groups, strict=True)
                    if group or not planned
                ]
            )

    def _post(self, message: Message) -> Post:
        fact, stage, *_ = message.value
        if message.from_device == self.device:
            return self._out[(fact, stage, message.to_device), message.from_lane].post()
        return self._in[fact, stage, message.from_lane].post()

    def _sizes(self, message: Message, batch: NetBatches) -> tuple[int, ...]:
        return batch[self._nets[message.value.stage]].step.sizes

    def _check(self, lanes: Device) -> None:
        lanes.check()
        if self._meanwhile is not None:
            self._meanwhile()

    def begin_step_end(self) -> None:
        """Receive what stands before an R or U: it may wait for other devices."""
        if self.transport.needs_order:
            self.transport.post_planned()

    def end_portion(self) -> None:
        """Receive what other devices send in this portion and a later one reads.

        Raises:
            WaitError: an earlier message took too long.
        """
        if self.transport.needs_order:
            self.transport.post_planned(rest=True)

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            WaitError: something did not leave within the timeout.
        """
        for outgoing in self._out.values():
            outgoing.flush(self.context.timeout_s)


def _place(message: Message, part: PortionPlan) -> MicrobatchKey:
    value = message.value
    microbatch = WHOLE_BATCH if value.microbatch is None else value.microbatch
    return value.step - part.shift, microbatch


def _signature(
    program: Program, route: Route
) -> Callable[[NetBatches, int], Signature]:
    """Return a function that returns what the shapes of a message follow from.

    These are those of the net that makes an output, and of the nets that read a
    gradient of theirs.
    """
    fact, stage, device = route
    net = program.stages[stage].net
    if fact is Fact.GATHERED:
        return lambda batch, _: batch[net].step.shapes(batch[net].step.num_samples)
    if fact is Fact.INPUT_GRAD:
        readers = [program.stages[source] for source in program.sources[stage]]
        read = [x.net for x in readers if x.device == device and x.trainable]
        net, *others = dict.fromkeys(read)
        if others:
            return partial(_sizes_of, (net, *others))
    return partial(_size_of, net)


def _size_of(net: str, batch: NetBatches, microbatch: int) -> Signature:
    step = batch[net].step
    return step.shapes(step.sizes[microbatch])


def _sizes_of(nets: Sequence[str], batch: NetBatches, microbatch: int) -> Signature:
    sizes = [batch[net].step.sizes for net in nets]
    own = tuple(x[microbatch] if microbatch < len(x) else 0 for x in sizes)
    return batch[nets[0]].step.shapes(own)


def _routes(plan: PlayPlan) -> Iterator[tuple[Route, Message]]:
    """Every channel, in one order on all workers, with one of its messages."""
    found: dict[tuple[Route, int], Message] = {}
    for part in plan.portions.values():
        for lane in part.lanes:
            for op in lane:
                for message in op.sends:
                    value = message.value
                    route = value.fact, value.stage, message.to_device
                    found.setdefault((route, message.from_lane), message)
    letters = list(_LETTERS)
    for (route, _), message in sorted(
        found.items(),
        key=lambda one: (letters.index(one[0][0][0]), *one[0][0][1:], one[0][1]),
    ):
        yield route, message


# Each portion is planned by itself, since ranks do not know how often a body is played:
# what is sent in a portion is received in it. So no op may wait in a portion for what
# another device does in a later one.
def refuse_unordered(plan: PlayPlan) -> None:
    """Refuse what has no planned order of messages.

    Raises:
        RunError: a device has several lanes; or an update waits for gradients that
            another device makes in a later portion.
    """
    num_devices = plan.program.num_devices
    if len(plan.schedule.lanes) > num_devices:
        raise RunError(
            f"this schedule has {len(plan.schedule.lanes)} lanes on {num_devices} "
            "devices, and NCCL needs one order of a device's messages: choose a "
            "schedule with one lane for each device, or send by way of the host "
            "(HOCKET_BACKEND=gloo)"
        )
    played: set[Op] = set()
    for portion in (Portion.PROLOGUE, Portion.BODY):
        if portion not in plan.portions:
            return
        ops = [one for lane in plan.portions[portion].lanes for one in lane]
        played.update(one.op for one in ops)
        for one in ops:
            for other in one.follows:
                if other not in played:
                    raise _refusal(f"{one.op} waits for {other} of a later portion")


def plan_messages(plan: PlayPlan, part: PortionPlan) -> dict[int, Queue]:
    """Plan and prove the order of a portion's messages.

    An update may wait for gradients that another device reduces only in its own update
    (replicas, shared weights). The plan assumes this of every update first. If that
    deadlocks, the plan assumes that gradients are complete after their backwards.

    Raises:
        RunError: replicas reduce gradients, and no order ends with updates that wait.
        DeadlockError: no order ends, even if updates wait for no other device.
        ScheduleError: the planned order differs at the two ends of a pair.
    """
    devices = [lane.device for lane in plan.schedule.lanes]
    gates = gates_of(plan.schedule, clips=True)
    together = ops_together(plan.program, gates)
    try:
        queues = plan_queues(part.lanes, devices, together)
    except DeadlockError as error:
        if plan.program.num_pipelines > 1 and plan.gates == gates:
            raise _refusal(str(error)) from error
        together = ops_together(plan.program)
        queues = plan_queues(part.lanes, devices, together)
    check_queues(queues, together)
    return queues


def _refusal(reason: str) -> RunError:
    return RunError(
        "updates of this schedule wait for gradients of other devices, and no order of "
        f"messages over NCCL is proved to end ({reason}): do not clip by the norm, or "
        "send by way of the host (HOCKET_BACKEND=gloo)"
    )
