"""The program of a student and its teachers, and what its stages cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.costs import Costs, StageCost
from hocket.core.program import Net, Program
from hocket.model.profile.clock import clock_of
from hocket.model.stages.stage import StageModule
from hocket.planner.stages import add_layers
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.tune.teachers.stages import CutTeacher
from hocket.run.weights.follower import Follower, Pairs
from hocket.run.weights.momentum import FollowerUpdate

_NUM_REPEATS: Final = 3  # of a body, to predict a step's time among others


def joint_program(
    student: Program, cuts: Sequence[CutTeacher], *, whole_batch: bool
) -> Program:
    """Return the program of all nets: the teachers' stages come first.

    Args:
        student: the student's.
        cuts: the teachers' stages.
        whole_batch: whether the loss is over the whole batch (op L).
    """
    first = sum(len(cut.modules) for cut in cuts)
    last = first + student.num_stages - 1
    flows: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    whole: list[tuple[int, int]] = []
    begin = 0
    for cut in cuts:
        end = begin + len(cut.modules) - 1
        flows += [(stage, stage + 1) for stage in range(begin, end)]
        read.append((end, last))
        if cut.known.teacher.whole_batch and not whole_batch:
            whole.append((end, last))
        begin = end + 1
    teachers = [cut.known.teacher for cut in cuts]
    most = max(teacher.num_ahead for teacher in teachers)
    repeats = most or any(teacher.delay for teacher in teachers)
    return replace(
        student,
        nets=(
            *(Net(cut.name, cut.known.num_microbatches) for cut in cuts),
            *student.nets,
        ),
        stages=(*(x for cut in cuts for x in cut.stages(first)), *student.stages),
        flows=(*flows, *((first + a, first + b) for a, b in student.flows), *read),
        num_steps=most + _NUM_REPEATS if repeats else 1,
        copies=tuple(tuple(first + x for x in group) for group in student.copies),
        whole_batch_flows=frozenset(whole),
    )


def joint_costs(
    cuts: Sequence[CutTeacher], student: Costs, update_s: Sequence[float]
) -> Costs:
    """Put the costs of the teachers' stages before those of the student's.

    Args:
        cuts: the teachers' stages.
        student: the student's costs.
        update_s: the seconds of each teacher stage's update.
    """
    teachers = (cost for cut in cuts for cost in _stage_costs(cut))
    moving = [
        replace(cost, update_s=seconds)
        for cost, seconds in zip(teachers, update_s, strict=True)
    ]
    return replace(student, stages=(*moving, *student.stages))


def _stage_costs(cut: CutTeacher) -> list[StageCost]:
    layers = [layer.cost() for layer in cut.known.profile.layers]
    edges = (0, *cut.places.boundaries, len(layers))
    output = pytree.tree_leaves(cut.known.output)
    costs = []
    for i, module in enumerate(cut.modules):
        following = layers[edges[i + 1]] if i + 1 < len(cut.modules) else None
        cost = add_layers(layers[edges[i] : edges[i + 1]], following)
        if following is None:
            num_bytes = sum(x.nbytes for x in output if isinstance(x, Tensor))
            cost = replace(cost, output_bytes=num_bytes)
        state = [*module.parameters(), *module.buffers()]
        costs.append(replace(cost, weight_bytes=sum(x.nbytes for x in state)))
    return costs


def measure_teacher_updates(
    cuts: Sequence[CutTeacher], context: WorkerContext
) -> list[float]:
    """Measure the updates of the teachers' stages, each on the worker that holds it.

    Every worker must call this.

    Args:
        cuts: the teachers' stages.
        context: this worker's context.
    """
    own: dict[str, float] = {}
    stages = [
        (cut, place, module)
        for cut in cuts
        for place, module in zip(cut.places.devices, cut.modules, strict=True)
    ]
    for number, (cut, place, module) in enumerate(stages):
        if cut.known.teacher.update is not None and place == context.layout.device:
            device = context.world.device
            own[str(number)] = _measured_s(cut.known.teacher.update, module, device)
    found = [0.0] * len(stages)
    for part in context.world.gather_json(own, "costs of the teachers' updates"):
        assert isinstance(part, dict)
        for stage, seconds in part.items():
            found[int(stage)] = max(found[int(stage)], float(seconds))
    return found


def _measured_s(
    update: FollowerUpdate, module: StageModule, device: torch.device
) -> float:
    """Return the seconds of a second update, of copies of a stage's weights."""
    copies = {n: x.detach().to(device).clone() for n, x in module.named_parameters()}
    followed = {name: torch.ones_like(x) for name, x in copies.items()}
    follower = Follower(update, Pairs(copies, followed))
    clock, seconds = clock_of(device), 0.0
    for step in range(2):
        begin = clock()
        follower.update(step)
        seconds = clock() - begin
    return seconds
