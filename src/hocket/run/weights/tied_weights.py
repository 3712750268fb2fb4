"""Weights that several stages share (tied embeddings), and equal initial weights.

Stages on one device share the parameter itself: its gradients accumulate, and the stage
that updates last steps it. Stages on different devices hold a copy each:

    stage 0, device 0   wte ──┐ gradients are added up over both before either
    stage 3, device 1   wte ──┘ updates, so that the copies stay equal

Where stages of different delays share a weight, one of them updates it for all
(`hocket.run.weights.stale_ties`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.model.trace.state import saved_tensors
from hocket.run.cluster.group import GroupMaker, WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.reduce import Reducer
from hocket.run.weights.stale_ties.stale_tie import StaleTie


@dataclass(frozen=True, slots=True)
class Tie:
    """One weight that stages on several devices hold.

    Args:
        name: the weight's name in the uncut model.
        devices: the devices that hold a copy, ascending.
    """

    name: str
    devices: tuple[int, ...]


def find_ties(shared: Mapping[str, Sequence[int]], schedule: Schedule) -> list[Tie]:
    """Return the shared weights that are on several devices.

    Args:
        shared: the stages that hold each shared weight.
        schedule: the schedule, with the stages' devices.
    """
    ties = []
    for name, stages in sorted(shared.items()):
        devices = sorted({schedule.program.stages[s].device for s in stages})
        if len(devices) > 1:
            ties.append(Tie(name, tuple(devices)))
    return ties


def tie_groups(
    ties: Sequence[Tie], layout: Layout, maker: GroupMaker
) -> dict[tuple[int, ...], WorkerGroup]:
    """Make this worker's groups of the devices that share weights.

    Every worker makes all groups, in the same order.
    """
    own: dict[tuple[int, ...], WorkerGroup] = {}
    for devices in dict.fromkeys(tie.devices for tie in ties):
        ranks = [
            tuple(layout.ranks_of(device)[pipeline] for device in devices)
            for pipeline in range(layout.num_pipelines)
        ]
        for group in maker.join(ranks):
            own[devices] = group
    return own


def owned_parameters(
    runners: Mapping[int, StageRunner],
    schedule: Schedule,
    device: int,
    stale_ties: Iterable[StaleTie] = (),
) -> dict[int, dict[str, nn.Parameter]]:
    """Return which of the device's stages updates which weight: exactly one each.

    A weight that several stages of the device hold belongs to the one that updates
    last, when all of them have added their gradients. A stale tied weight belongs to
    its owner, and to no stage of any other device.
    """
    owners = {tie.name: tie.stages[0] for tie in stale_ties}
    order = [
        op.stage
        for i in schedule.lanes_of(device)
        for op in schedule.lanes[i].ops
        if op.kind is Kind.UPDATE and op.stage in runners
    ]
    owned: dict[int, dict[str, nn.Parameter]] = {stage: {} for stage in runners}
    taken: set[int] = set()
    for stage in reversed(order):
        for name, parameter in runners[stage].parameters.items():
            if id(parameter) not in taken and owners.get(name, stage) == stage:
                taken.add(id(parameter))
                owned[stage][name] = parameter
    return owned


def add_up_ties(reducers: Sequence[Reducer]) -> None:
    """Sum each shared weight's gradients over the devices that hold it.

    All reductions start before any is waited for, in one order on every worker, so that
    devices whose stages update in different orders do not block each other.
    """
    for reducer in reducers:
        reducer.start()
    for reducer in reducers:
        reducer.finish()


def tie_reducers(
    ties: Sequence[Tie],
    groups: Mapping[tuple[int, ...], WorkerGroup],
    owned: Mapping[int, Mapping[str, nn.Parameter]],
) -> list[Reducer]:
    """Make one reducer per trained weight that this worker shares, in order of name."""
    parameters = {
        name: parameter
        for named in owned.values()
        for name, parameter in named.items()
        if parameter.requires_grad
    }
    return [
        Reducer(
            [parameters[tie.name]],
            groups[tie.devices],
            f"gradients of the shared weight {tie.name}",
        )
        for tie in ties
        if tie.devices in groups and tie.name in parameters
    ]


def equal_start(
    runners: Mapping[int, StageRunner],
    sharing: Mapping[int, StageRunner],
    layout: Layout,
    group: WorkerGroup | None,
    ties: Sequence[Tie],
    groups: Mapping[tuple[int, ...], WorkerGroup],
) -> None:
    """Broadcast the first replica's weights, and each shared weight's first copy.

    Args:
        runners: this worker's.
        sharing: those of the net whose stages share weights.
        layout: the ranks by device and replica.
        group: the workers of this device in all replicas.
        ties: the shared weights.
        groups: this worker's groups of the devices that share weights.
    """
    if group is not None:
        source = layout.ranks_of(layout.device)[0]
        for runner in runners.values():
            for tensor in saved_tensors(runner.module).values():
                group.broadcast(tensor.detach(), source, "weights of the first replica")
    for tie in ties:
        if tie.devices not in groups:
            continue
        source = layout.ranks[tie.devices[0]]
        held = [
            r.parameters[tie.name] for r in sharing.values() if tie.name in r.parameters
        ]
        what = f"the shared weight {tie.name}"
        groups[tie.devices].broadcast(held[0].data, source, what)
