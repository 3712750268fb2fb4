"""Reverse first-k over replicas ends with DistributedDataParallel's weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.timelines.timeline import Timeline
from hocket.run.cluster.world import World, join_world
from hocket.run.data.batch import split_batch
from hocket.run.data.loss import TOTAL, named_losses
from hocket.run.weights.reduce import Reducer
from tests.run.support.forked import answers_of
from tests.run.support.joined import join, said
from tests.run.support.plain_loop import in_one_stage, make_optimizer, uncut_stage
from tests.run.support.small_models import batches, make_model, specimen_of
from tests.run.support.started import started

NUM_STEPS = 20


class Seeded(nn.Module):
    """The uncut model, whose layers draw the numbers of a step and a microbatch."""

    def __init__(self, name: str, batch: Any, num_parts: int) -> None:
        super().__init__()
        self.model = make_model(name)
        self.stage = uncut_stage(self.model, batch, num_parts)

    def forward(self, part: Any, step: int, microbatch: int) -> Any:
        """Call the model on a part of a batch."""
        return in_one_stage(self.stage, part, step, microbatch)


def train_all(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train each case both ways; how far the weights are apart, by case."""
    with closing(join()) as world:
        return {name: _both(world, **case) for name, case in cases.items()}


def _both(
    world: World,
    model: str,
    *,
    schedule: str | dict[str, Any] = "reverse-first-k",
    batch_size: int = 12,
    last: int = 12,
    num_steps: int = NUM_STEPS,
    clip_norm: float | None = None,
    **settings: Any,
) -> dict[str, Any]:
    data = batches(model, num_steps, batch_size, last)
    with started(
        make_model(model),
        specimen_of(model).loss,
        make_optimizer,
        data[0],
        num_replicas=world.world_size,
        schedule=_order(schedule, world.world_size),
        world=world,
        clip_norm=clip_norm,
        **{"num_microbatches": 1, **settings},
    ) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
        state = pipeline.state_dict()
        order = pipeline.plan.schedule
        num_reduced = sum(r > 0 for r in pipeline.measured().link_bytes().values())
    expected = _torch(world, model, data, clip_norm)
    return {
        "difference": _difference(state, expected),
        "losses": losses,
        "num_buckets": order.program.num_stages,
        "overlaps": bool(order.body),
        "reduces": num_reduced,
    }


def _order(schedule: str | dict[str, Any], num_replicas: int) -> str | Schedule:
    if isinstance(schedule, str):
        return schedule
    return hocket.make_schedule(
        "reverse-first-k",
        num_devices=1,
        num_replicas=num_replicas,
        num_steps=1 if schedule.get("barrier") else 4,
        **{"num_microbatches": 1, **schedule},
    )


def _torch(
    world: World, name: str, data: list[Any], clip_norm: float | None
) -> Mapping[str, Tensor]:
    """Train as torch's users do: one process per replica, each with its part."""
    own = Seeded(name, data[0], world.world_size).train()
    parallel = DistributedDataParallel(own, find_unused_parameters=True)
    optimizer = make_optimizer(own.model.parameters())
    for step, batch in enumerate(data):
        part = split_batch(batch, world.world_size)[world.rank]
        share = part.num_samples * world.world_size / len(batch[1])
        output = parallel(part, step, world.rank)
        loss = named_losses(specimen_of(name).loss(output, part.targets))[TOTAL]
        (loss * share).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(own.model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return own.model.state_dict()


def _difference(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference relative to the largest weight of a tensor."""
    assert state.keys() == expected.keys()
    return max(
        float((state[name] - x).abs().max()) / max(1e-30, float(x.abs().max()))
        for name, x in expected.items()
        if x.is_floating_point() and "running" not in name
    )


def refused(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return what the pipeline says to bad input, by case."""
    with closing(join()) as world:
        return {
            name: said(partial(_make, world, settings))
            for name, settings in cases.items()
        }


def _make(world: World, settings: dict[str, Any]) -> None:
    given = {"num_replicas": world.world_size, "model": "perceptron", **settings}
    name = given.pop("model")
    schedule = _order(given.pop("schedule", "reverse-first-k"), world.world_size)
    started(
        make_model(name),
        specimen_of(name).loss,
        make_optimizer,
        batches(name, 1, 12, 12)[0],
        schedule=schedule,
        world=world,
        **{"num_microbatches": 1, **given},
    )


def resumed(folder: str) -> dict[str, Any]:
    """Return the weights after 6 steps, and after 3, a checkpoint and 3 more.

    Reductions seem to end only when an update waits for them. For the 6 steps, say of
    each bucket's reductions whether they ended later than the next step began.
    """
    torch.set_num_threads(1)
    late: dict[str, list[bool]] = {}
    data = batches("tied-dropout", 6, 12, 12)
    found = []
    never = patch.object(Reducer, "is_done", return_value=False)
    with closing(join_world()) as world, never:
        for stops in (False, True):
            parts = [data[:3], data[3:]] if stops else [data]
            for number, part in enumerate(parts):
                with started(
                    make_model("tied-dropout"),
                    specimen_of("tied-dropout").loss,
                    make_optimizer,
                    data[0],
                    num_replicas=world.world_size,
                    num_microbatches=1,
                    schedule=_order({"stages_per_device": 5, "k": 3}, 2),
                    cut=["layers.0", "layers.1", "layers.2", "layers.3"],
                    world=world,
                ) as pipeline:
                    if number:
                        pipeline.load(folder)
                    for _ in pipeline.train(part):
                        pass
                    if stops and not number:
                        pipeline.save(folder)
                    if not stops:
                        late = _end_late(pipeline.measured())
                    state = pipeline.state_dict()
            found.append({name: x.flatten().tolist() for name, x in state.items()})
    return {"weights": found, "late": late}


def _end_late(timeline: Timeline) -> dict[str, list[bool]]:
    """Return by bucket, for each step but the last, whether R went on in the next."""
    ops = timeline.schedule.lanes[0].ops
    begins = {
        op.step: timeline.start_s[0][i]
        for i, op in enumerate(ops)
        if op.kind is Kind.FORWARD and op.stage == 0
    }
    late: dict[str, list[bool]] = {}
    for i, op in enumerate(ops):
        if op.kind is Kind.REDUCE and op.step + 1 in begins:
            is_late = bool(timeline.end_s[0][i] > begins[op.step + 1])
            late.setdefault(str(op.stage), []).append(is_late)
    return late


RESIDUALS: Final = ["2", "4", "6"]
BLOCKS: Final = ["blocks.0", "blocks.2", "blocks.4"]
LAYERS: Final = ["layers.0", "layers.1", "layers.2", "layers.3"]


def case(model: str, cut: list[str], k: int, **more: Any) -> dict[str, Any]:
    """Buckets that begin at these modules, and the first k of them last."""
    keys = {"num_microbatches", "barrier"} & more.keys()
    order = {"stages_per_device": len(cut) + 1, "k": k, **{x: more[x] for x in keys}}
    settings = {key: more[key] for key in more if key != "barrier"}
    return {"model": model, "schedule": order, "cut": cut, **settings}


# Two replicas with equal shares: bit for bit.
EQUAL: Final[dict[str, dict[str, Any]]] = {
    "normalized": case("resnet", BLOCKS, 2),
    "all of them reversed": case("resnet", BLOCKS, 4),
    "dropout": case("dropout", RESIDUALS, 3),
    "tied": case("tied-dropout", LAYERS, 3),
    "none reversed": case("tied", LAYERS, 0),
    "with a barrier": case("tied", LAYERS, 2, barrier=True),
    "clipped by the norm of all": case("perceptron", RESIDUALS, 3, clip_norm=0.1),
    "found": {"model": "resnet"},
    "found, with given buckets": {"model": "tied-dropout", "cut": LAYERS},
}
# The order in which gradients are added up differs.
CLOSE: Final[dict[str, dict[str, Any]]] = {
    "uneven last batch": case("dropout", RESIDUALS, 3, last=7),
    "two microbatches": case("perceptron", RESIDUALS, 2, num_microbatches=2),
}


# Of these the first has 20 steps, too; the order's body has four.
FEW: Final = ("normalized", "tied", "clipped by the norm of all", "uneven last batch")
FEW_STEPS: Final = 6


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "all_of_them", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_equals_ddp(all_of_them: bool, tmp_path: Path) -> None:
    """After 20 steps of AdamW in float64, or a few; on both of two workers."""
    cases = EQUAL | CLOSE
    if not all_of_them:
        few = {name: {**cases[name], "num_steps": FEW_STEPS} for name in FEW[1:]}
        cases = {FEW[0]: cases[FEW[0]], **few}
    for answer in answers_of(
        f"{__name__}:train_all", cases, folder=tmp_path, whole_s=220.0
    ):
        differences = {name: found["difference"] for name, found in answer.items()}
        assert {n: d for n, d in differences.items() if n in EQUAL and d} == {}
        assert {n: d for n, d in differences.items() if d > 1e-10} == {}
        overlapping = {name for name, found in answer.items() if found["overlaps"]}
        assert answer.keys() - overlapping == cases.keys() & {"with a barrier"}


def test_equals_ddp_on_three(tmp_path: Path) -> None:
    """With unequal shares of a batch, too."""
    cases = {
        "normalized": case("normed", BLOCKS, 2, num_steps=FEW_STEPS),
        "tied": case(
            "tied-dropout", LAYERS, 4, batch_size=13, last=8, num_steps=FEW_STEPS
        ),
    }
    for answer in answers_of(
        f"{__name__}:train_all", cases, num_workers=3, folder=tmp_path
    ):
        assert {n: x for n, x in answer.items() if x["difference"] > 1e-10} == {}


REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "one replica": ({"num_replicas": 1}, "num_replicas=2 on as many workers"),
    "number of buckets": ({"stages_per_device": 3}, "name with cut= the modules"),
    "memory": ({"memory_bytes": 100}, "The smallest memory_bytes that works is "),
    "float16": ({"precision": "float16"}, 'schedule="1f1b"'),
    "accumulate": ({"accumulate": 2}, "take larger batches"),
    "tied": (case("tied", LAYERS, 5), "a k of at most 4 works"),
}


def test_refuses(tmp_path: Path) -> None:
    """Every worker, with the numbers and a way out."""
    for answer in answers_of(
        f"{__name__}:refused",
        {name: settings for name, (settings, _) in REFUSED.items()},
        folder=tmp_path,
    ):
        for name, (_, words) in REFUSED.items():
            assert words in answer[name], name


def test_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    """Weights are equal bit for bit after a checkpoint in the middle.

    Measured reductions last until they were waited for, also where that is in the next
    step: that of bucket 1 until behind the forward of bucket 0.
    """
    for answer in answers_of(
        f"{__name__}:resumed", str(tmp_path / "run"), folder=tmp_path / "job"
    ):
        straight, resumed = answer["weights"]
        assert straight == resumed
        assert answer["late"]["1"] == [True] * 5
        assert not any(answer["late"]["0"])
