"""Timelines for the tests of pictures: simulated, and one that only looks measured."""

from __future__ import annotations

from dataclasses import replace

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Origin, Timeline
from hocket.schedules import make_schedule


def simulated(
    name: str = "1f1b",
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    num_steps: int = 1,
    num_replicas: int = 1,
    stages_per_device: int | None = None,
    costs: StageCost | None = None,
    message_s: float = 0.0,
) -> Timeline:
    """A schedule on equal devices; F, I and W take a second each if nothing is said."""
    schedule = make_schedule(
        name,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        num_steps=num_steps,
        num_replicas=num_replicas,
        stages_per_device=stages_per_device,
    )
    share = costs or StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    return simulate(
        schedule,
        Costs(
            (share,),
            is_device_share=True,
            link=Link(latency_s=message_s),
            reduce_link=Link(bytes_per_s=1e6),
        ),
    )


REAL = StageCost(
    forward_s=3e-3,
    input_grad_s=3e-3,
    weight_grad_s=2e-3,
    update_s=1e-3,
    output_bytes=1 << 20,
    input_grad_bytes=1 << 20,
    activation_bytes=64 << 20,
    weight_bytes=8 << 20,
    gradient_bytes=2000,
)


def measured(like: Timeline) -> Timeline:
    """Return the same work as measured: 5 % slower, on a clock that ran before."""
    late_s, slow = 1000.0, 1.05
    traffic = replace(
        like.traffic,
        start_s=late_s + slow * like.traffic.start_s,
        end_s=late_s + slow * like.traffic.end_s,
    )
    return replace(
        like,
        start_s=tuple(late_s + slow * start_s for start_s in like.start_s),
        end_s=tuple(late_s + slow * end_s for end_s in like.end_s),
        traffic=traffic,
        memory=tuple(
            replace(curve, time_s=late_s + slow * curve.time_s) for curve in like.memory
        ),
        origin=Origin.MEASURED,
    )


def teacher_and_student() -> Timeline:
    """Two nets; device 1 has two lanes, and the loss is over the whole batch."""
    nets = (Net("teacher", 2), Net("student", 2, batch_loss=True))
    stages = (
        Stage("teacher", 1, trainable=False, follows=(2,)),
        Stage("student", 0),
        Stage("student", 1),
    )
    program = Program(nets, stages, ((0, 2), (1, 2)))
    lanes = Schedule.parse(
        "d0  1F0 1F1 1B0 1B1 1U\nd1  2F0 2F1 2L 2B0 2B1 2U\nd1.1  0F0 0F1 0U",
    ).lanes
    seconds = StageCost(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, loss_s=0.5, update_s=0.5
    )
    costs = Costs((seconds,) * 3, lane_capacity=2.0)
    return simulate(Schedule(program, lanes), costs)
