"""Define the seconds and bytes that each op and each message costs.

Costs say nothing about order. They come from a profile, from formulas, or from
`Costs.uniform` for pictures and closed forms.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Final, assert_never

from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.errors import CostsError

MAX_JITTER: Final = 0.3  # a normal distribution's tail stays above zero up to here


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs, per microbatch unless said otherwise.

    A stage that recomputes keeps nothing between F and B but what it received, and runs
    its forward once more in B (or I). The numbers are those of a stage that does not:
    `recomputes` alone says what comes of them.

        keeps         F ├──────── activation_bytes ─────────┤ B
        recomputes    F ├┤        replay_bytes           ├──┤ B
               forward_work_bytes                    activation_bytes

    Args:
        forward_s: F.
        input_grad_s: I, as a part of B, which takes `input_grad_s + weight_grad_s`.
        weight_grad_s: W, as a part of B.
        loss_s: L, once per step.
        update_s: U, once per step.
        output_bytes: the message to each stage that reads the output.
        input_grad_bytes: the message back to each stage that the input came from.
        activation_bytes: held from F until B or I has ended.
        weight_grad_held_bytes: held from the end of I until W has ended: a part of what
            F left, and gradients of outputs; together they may be more than F left.
        weight_bytes: one version of the weights.
        gradient_bytes: the gradient buffer, and the size of a reduction.
        optimizer_bytes: the optimizer's state, and what else updates keep for the next.
        forward_work_bytes: the most at once in a forward that keeps nothing.
        backward_work_bytes: the most at once in B, beyond what F kept.
        input_grad_work_bytes: the most at once in I, beyond what F kept.
        weight_grad_work_bytes: the most at once in W, beyond what I held.
        update_work_bytes: the most at once in U.
        replay_bytes: what a stage that recomputes keeps beside its input, so that its
            forward runs the same again: the buffers that it changes.
        recomputes: whether B (or I) runs the stage's forward again.
        holds_input: whether W needs what the stage received; else I releases it.
        split_s: how much longer I and W take together than B; each takes its share of
            it in proportion.
        unshard_s: UNSHARD, from its begin until the weights are whole, where shards
            gather them; `weight_bytes` are then those of one shard.
        whole_bytes: what a gather holds until its RESHARD, and the size of it.
    """

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    loss_s: float = 0.0
    update_s: float = 0.0
    output_bytes: int = 0
    input_grad_bytes: int = 0
    activation_bytes: int = 0
    weight_grad_held_bytes: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    input_grad_work_bytes: int = 0
    weight_grad_work_bytes: int = 0
    update_work_bytes: int = 0
    replay_bytes: int = 0
    recomputes: bool = False
    holds_input: bool = True
    split_s: float = 0.0
    unshard_s: float = 0.0
    whole_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """What F leaves for B, beside what the stage received."""
        return self.replay_bytes if self.recomputes else self.activation_bytes

    @property
    def recompute_s(self) -> float:
        """What B (or I) spends on the forward that runs again."""
        return self.forward_s if self.recomputes else 0.0

    def seconds(self, kind: Kind) -> float:
        """Return how long an op keeps its lane busy; 0 for asynchronous ops."""
        match kind:
            case Kind.FORWARD:
                return self.forward_s
            case Kind.BACKWARD:
                return self.recompute_s + self.input_grad_s + self.weight_grad_s
            case Kind.BACKWARD_INPUT:
                return self.recompute_s + self._apart_s(self.input_grad_s)
            case Kind.BACKWARD_WEIGHT:
                return self._apart_s(self.weight_grad_s)
            case Kind.LOSS:
                return self.loss_s
            case Kind.UPDATE:
                return self.update_s
            case (
                Kind.GATHER
                | Kind.REDUCE
                | Kind.SEND_FORWARD
                | Kind.RECEIVE_FORWARD
                | Kind.SEND_BACKWARD
                | Kind.RECEIVE_BACKWARD
                | Kind.UNSHARD
                | Kind.RESHARD
            ):
                return 0.0
            case _:
                assert_never(kind)

    def step_s(self, num_microbatches: int) -> float:
        """Return the seconds of F, B and U of a step."""
        each_s = self.forward_s + self.seconds(Kind.BACKWARD)
        return num_microbatches * each_s + self.update_s

    def _apart_s(self, part_s: float) -> float:
        """Return what a part of B takes as an op of its own."""
        if not self.split_s:
            return part_s
        whole_s = self.input_grad_s + self.weight_grad_s
        return part_s * (1.0 + self.split_s / whole_s) if whole_s else 0.0

    def work_bytes(self, kind: Kind) -> int:
        """Return what an op holds while it runs, and no longer."""
        match kind:
            case Kind.FORWARD:
                return self.forward_work_bytes if self.recomputes else 0
            case Kind.BACKWARD:
                return self.backward_work_bytes
            case Kind.BACKWARD_INPUT:
                return self.input_grad_work_bytes
            case Kind.BACKWARD_WEIGHT:
                return self.weight_grad_work_bytes
            case Kind.REDUCE:
                return self.gradient_bytes  # packed into one message
            case Kind.UPDATE:
                return self.update_work_bytes
            case _:
                return 0


@dataclass(frozen=True, slots=True)
class Link:
    """A connection: a message takes `latency_s + bytes / bytes_per_s`.

    Messages on one link follow each other at its bandwidth; latencies overlap.

    Args:
        latency_s: from the last byte's leaving to its being usable.
        bytes_per_s: the bandwidth.
        name: pairs of devices whose links have the same name share one link (a
            network card, say). Without a name, each ordered pair has its own.
    """

    latency_s: float = 0.0
    bytes_per_s: float = inf
    name: str = ""

    def message_s(self, num_bytes: int) -> float:
        """Return how long a message takes on a link without others."""
        return self.latency_s + self.occupied_s(num_bytes)

    def occupied_s(self, num_bytes: int) -> float:
        """Return how long a message keeps others off the link."""
        return num_bytes / self.bytes_per_s

    def ring_s(self, num_bytes: int, num_members: int) -> float:
        """Return how long a ring all-reduce of `num_bytes` takes.

        Each member sends `2 (r - 1)` messages of `1 / r` of the bytes, one after
        another: half of them add up, the other half spread the sums.
        """
        sent_s = self.occupied_s(num_bytes) / num_members
        return 2 * (num_members - 1) * (self.latency_s + sent_s)

    def all_gather_s(self, num_bytes: int, num_members: int) -> float:
        """Return how long a ring all-gather of `num_bytes` from each member takes.

        Each member sends `r - 1` messages, one after another: its own bytes and those
        of all others but one.
        """
        return (num_members - 1) * self.message_s(num_bytes)


@dataclass(frozen=True, slots=True)
class Costs:
    """What every op and message of a program costs.

    Args:
        stages: one per stage of the program; or exactly one together with
            `is_device_share`.
        is_device_share: the one cost given is a device's whole share of the model,
            which its stages split evenly.
        link: between any two devices that `links` does not name.
        links: `(from_device, to_device, link)` for single pairs.
        reduce_link: between a device and its replicas, or the devices of copies of its
            stages, for ops R (ring all-reduce) and G (ring all-gather).
        shard_link: between the shards of a stage, for R (ring reduce-scatter) and
            UNSHARD; `reduce_link` when not given.
        handling: what a lane itself spends on each message it sends or receives.
        op_s: what a lane spends on each op besides the work (the host's overhead).
        jitter: how much an op's seconds differ from one time to the next: their
            standard deviation over their mean. Lanes that wait for each other at every
            op lose by it, though the means stay.
        lane_capacity: how many lanes' worth of work a device does per second while
            several of its lanes are busy: 1 is plain time sharing, 2 means that two
            lanes do not disturb each other.
        accumulates: whether the gradients of an earlier batch are there when the step
            begins, to be added to.
    """

    stages: tuple[StageCost, ...]
    is_device_share: bool = False
    link: Link = field(default_factory=Link)
    links: tuple[tuple[int, int, Link], ...] = ()
    reduce_link: Link = field(default_factory=Link)
    shard_link: Link | None = None
    handling: Link = field(default_factory=Link)
    op_s: float = 0.0
    jitter: float = 0.0
    lane_capacity: float = 1.0
    accumulates: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.is_device_share and len(self.stages) != 1:
            raise CostsError(
                f"is_device_share takes exactly one cost, got {len(self.stages)}"
            )
        if self.lane_capacity < 1:
            raise CostsError(f"lane_capacity is {self.lane_capacity}, below 1")
        if not 0 <= self.jitter <= MAX_JITTER:
            raise CostsError(
                f"jitter is {self.jitter:g}, not between 0 and {MAX_JITTER}: it is a "
                "standard deviation over a mean"
            )

    @classmethod
    def uniform(
        cls,
        *,
        forward_s: float = 1.0,
        input_grad_s: float = 1.0,
        weight_grad_s: float = 1.0,
        message_s: float = 0.0,
        update_s: float = 0.0,
        activation_bytes: int = 1,
    ) -> Costs:
        """Make equal devices: all have the same share of the model.

        A device with several stages splits its share evenly among them. A message
        takes `message_s` from any device to any other and keeps no other off the link.
        """
        share = StageCost(
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            update_s=update_s,
            activation_bytes=activation_bytes,
        )
        return cls((share,), is_device_share=True, link=Link(latency_s=message_s))

    def of(self, program: Program) -> tuple[StageCost, ...]:
        """Return the cost of each stage of `program`.

        Raises:
            CostsError: the costs are of another number of stages.
        """
        if not self.is_device_share:
            if len(self.stages) != program.num_stages:
                raise CostsError(
                    f"costs of {len(self.stages)} stages do not fit a program of "
                    f"{program.num_stages}"
                )
            return self.stages
        counts = [len(program.stages_on[stage.device]) for stage in program.stages]
        parts = {number: _split(self.stages[0], number) for number in set(counts)}
        return tuple(parts[number] for number in counts)

    def mean_share(self, program: Program) -> StageCost:
        """Return the seconds of F, I and W per device, the mean over devices.

        Raises:
            CostsError: the costs are of another number of stages.
        """
        stages, num = self.of(program), program.num_devices
        return StageCost(
            forward_s=sum(x.seconds(Kind.FORWARD) for x in stages) / num,
            input_grad_s=sum(x.seconds(Kind.BACKWARD_INPUT) for x in stages) / num,
            weight_grad_s=sum(x.seconds(Kind.BACKWARD_WEIGHT) for x in stages) / num,
        )

    def reduce_s(self, stage: int, program: Program) -> float:
        """Return how long R takes.

        A ring all-reduce over replicas and copies; where stages are sharded, a ring
        reduce-scatter over the shards (half of it), and an all-reduce of each part over
        the replicas.
        """
        num_bytes = self.of(program)[stage].gradient_bytes
        num_shards, num_members = program.num_shards, program.num_members(stage)
        shards, replicas = self.shard_link or self.reduce_link, self.reduce_link
        parts_s = shards.ring_s(num_bytes, num_shards) / 2
        own_bytes = num_bytes // num_shards
        return parts_s + replicas.ring_s(own_bytes, num_members // num_shards)

    def link_between(self, from_device: int, to_device: int) -> Link:
        """Return the link that messages between two devices take."""
        for a, b, link in self.links:
            if (a, b) == (from_device, to_device):
                return link
        return self.link


def with_recompute(costs: Costs, program: Program, stages: Collection[int]) -> Costs:
    """Return the same costs where these stages recompute, and no others.

    Args:
        costs: the costs of the program's stages.
        program: the program.
        stages: the numbers of the stages.
    """
    flagged = tuple(
        replace(cost, recomputes=number in stages)
        for number, cost in enumerate(costs.of(program))
    )
    return replace(costs, stages=flagged, is_device_share=False)


def _split(share: StageCost, num_stages: int) -> StageCost:
    """Divide a device's share evenly among its stages; messages keep their size."""
    changes: dict[str, Any] = {}
    for quantity in fields(share):
        name, amount = quantity.name, getattr(share, quantity.name)
        if name.endswith("_s"):
            changes[name] = amount / num_stages
        elif name.endswith("_bytes") and name not in _MESSAGES:
            changes[name] = amount // num_stages
    return replace(share, **changes)


_MESSAGES: Final = ("output_bytes", "input_grad_bytes")


# Change costs: a slower device, another link. "What would a faster link bring?".
def with_slow_device(
    costs: Costs, program: Program, device: int, factor: float
) -> Costs:
    """Return costs where all ops of one device take `factor` times as long.

    Args:
        costs: the costs of the program.
        program: says which stages the device has.
        device: the device.
        factor: above 1 is slower, below 1 faster.

    Raises:
        CostsError: the program has no such device, or the factor is not above 0.
    """
    _check_device(program, device)
    if not factor > 0:
        raise CostsError(f"device {device}: a factor of {factor:g} is not above 0")
    stages = tuple(
        _slowed(cost, factor) if stage.device == device else cost
        for stage, cost in zip(program.stages, costs.of(program), strict=True)
    )
    return replace(costs, stages=stages, is_device_share=False)


def with_bandwidth(
    costs: Costs, program: Program, ends: tuple[int, int], bytes_per_s: float
) -> Costs:
    """Return costs where the link between two devices has another bandwidth.

    Both directions change; latencies stay.

    Args:
        costs: the costs of the program.
        program: says which devices there are.
        ends: the two devices.
        bytes_per_s: the bandwidth.

    Raises:
        CostsError: the program has no such device, or the bandwidth is not above 0.
    """
    for device in ends:
        _check_device(program, device)
    if not bytes_per_s > 0:
        raise CostsError(f"a bandwidth of {bytes_per_s:g} bytes/s is not above 0")
    a, b = ends
    links = {(x, y): link for x, y, link in reversed(costs.links)}
    for pair in ((a, b), (b, a)):
        old = costs.link_between(*pair)
        links[pair] = replace(old, bytes_per_s=bytes_per_s, name="")
    return replace(costs, links=tuple((x, y, link) for (x, y), link in links.items()))


def _check_device(program: Program, device: int) -> None:
    if not 0 <= device < program.num_devices:
        raise CostsError(
            f"there is no device {device}: the schedule has devices 0 to "
            f"{program.num_devices - 1}"
        )


def _slowed(cost: StageCost, factor: float) -> StageCost:
    names = [field.name for field in fields(cost) if field.name.endswith("_s")]
    names.remove("unshard_s")  # the link's time, as a reduction's
    changed: dict[str, float] = {name: getattr(cost, name) * factor for name in names}
    return replace(cost, **changed)  # type: ignore[arg-type]
