"""Makes the weight versions of one worker's stages: own and shared ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hocket.core.program import Program
from hocket.run.cluster.layout import Layout
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.versions import VersionSource, WeightVersions
from hocket.run.weights.stale_ties.ends import TieOwner, TieReplica
from hocket.run.weights.stale_ties.stale_tie import StaleTie
from hocket.run.weights.stale_ties.worker_ties import WorkerTies


@dataclass(frozen=True, slots=True)
class SameDeviceSource:
    """Reads the leaves of another stage; gradients accumulate in them.

    Args:
        delay: how many updates behind the newest it is read.
        leaf: returns the leaf that a step reads.
    """

    delay: int
    leaf: Callable[[int], Tensor]

    def read(self, step: int) -> Tensor:
        """Return the leaf that both stages read."""
        return self.leaf(step)

    def set_old(self, old: Sequence[Tensor]) -> None:
        """Do nothing: the other stage loads them, too."""

    @property
    def num_bytes(self) -> int:
        """0: the other stage counts them."""
        return 0


def attach_versions(
    runners: Mapping[int, StageRunner],
    program: Program,
    stale_ties: Sequence[StaleTie],
    layout: Layout,
    transport: Transport,
) -> WorkerTies:
    """Make each stage's versions, if it reads old weights. Every worker must call this.

    Args:
        runners: the runners of this worker's stages.
        program: the program, with each stage's delay.
        stale_ties: all stale ties of the model, in order of name.
        layout: the ranks by device and replica.
        transport: carries gradients and values.

    Returns:
        This worker's stale ties.
    """
    ends: dict[str, tuple[list[Receiver], list[Sender]]] = {}
    replicas: dict[str, TieReplica] = {}
    for (
        tie
    ) in stale_ties:  # both ends of a channel are made in one order on all workers
        if layout.device == tie.devices[0]:
            ends[tie.name] = _owner_ends(tie, layout, transport)
        elif layout.device in tie.devices:
            replicas[tie.name] = _make_replica(tie, runners, layout, transport)
    owners: dict[str, TieOwner] = {}
    for number, runner in sorted(runners.items()):  # the owner comes first
        sources: dict[str, VersionSource] = {
            tie.name: _source(tie, number, runners, replicas.get(tie.name))
            for tie in stale_ties
            if number in tie.stages[1:]
        }
        stage = program.stages[number]
        delay = stage.delay if stage.moves else 0
        if not delay and not sources:
            continue
        versions = WeightVersions(
            runner.module, delay, sources, follows=bool(stage.follows)
        )
        runner.versions = versions
        for tie in stale_ties:
            if tie.stages[0] == number:
                owners[tie.name] = TieOwner(
                    tie.name,
                    runner.parameters[tie.name],
                    versions,
                    *ends[tie.name],
                )
    return WorkerTies(stale_ties, owners, replicas, runners.keys())


def _owner_ends(
    tie: StaleTie, layout: Layout, transport: Transport
) -> tuple[list[Receiver], list[Sender]]:
    """Return receivers from and senders to each of the other devices."""
    gradients, values = [], []
    for device in tie.devices[1:]:
        to_owner, from_owner = _channels(tie, layout, device)
        gradients.append(transport.receiver(to_owner))
        values.append(transport.sender(from_owner))
    return gradients, values


def _make_replica(
    tie: StaleTie,
    runners: Mapping[int, StageRunner],
    layout: Layout,
    transport: Transport,
) -> TieReplica:
    to_owner, from_owner = _channels(tie, layout, layout.device)
    stage = next(stage for stage in tie.stages if stage in runners)
    return TieReplica(
        tie.name,
        tie.delay,
        runners[stage].parameters[tie.name],
        transport.sender(to_owner),
        transport.receiver(from_owner),
    )


def _channels(tie: StaleTie, layout: Layout, device: int) -> tuple[Channel, Channel]:
    """Return the channels to the owner's device, from another one, and back."""
    owner, other = layout.ranks[tie.devices[0]], layout.ranks[device]
    return (
        Channel(f"gradient of {tie.name}", other, owner),
        Channel(f"values of {tie.name}", owner, other),
    )


def _source(
    tie: StaleTie,
    stage: int,
    runners: Mapping[int, StageRunner],
    replicas: TieReplica | None,
) -> VersionSource:
    """Return the source of a stage's weight; stages of one device share it."""
    if replicas is None:
        versions = runners[tie.stages[0]].versions
        assert versions is not None, "refuse_shared: it has a delay"
        return SameDeviceSource(tie.delay, partial(versions.read, tie.name))
    first = next(number for number in tie.stages if number in runners)
    return replicas if stage == first else SameDeviceSource(tie.delay, replicas.read)
