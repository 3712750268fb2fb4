"""What the workers of the tests of old weights in checkpoints do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hocket
from hocket.run.cluster.world import World
from tests.run.checkpoint.jobs import make_pipeline
from tests.run.support.exactness import weight_digests
from tests.run.support.joined import join
from tests.run.support.small_models import batches

NUM_STEPS = 8
SAVED_AT = 4


def data_of(case: dict[str, Any]) -> list[Any]:
    """The batches of the run."""
    return batches(case["model"], NUM_STEPS, 12, 12)


def save_and_load(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Of each case what a run comes to: whole, saved on the way, and resumed."""
    world = join()
    return [
        _save_and_load(world, x, Path(folder) / f"{i}") for i, x in enumerate(cases)
    ]


def _save_and_load(world: World, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    data = data_of(case)
    reported: dict[str, Any] = {}
    with make_pipeline(world, case) as pipeline:
        reported["whole"] = _trained(pipeline, data)
        cut = list(pipeline.plan.stage_names[1:])
    case = case | {"cut": cut}
    with make_pipeline(world, case) as pipeline:
        losses = _trained(pipeline, data[:SAVED_AT])["losses"]
        pipeline.save(folder, data={"next": SAVED_AT})
        after = _trained(pipeline, data[SAVED_AT:])
        reported["saved"] = after | {"losses": losses + after["losses"]}
    with make_pipeline(world, case | {"seed": 3}) as pipeline:
        list(pipeline.train(data[:2]))  # so that there is something to replace
        number = pipeline.load(folder)["next"]
        reported["read"] = _read(pipeline, number)
        after = _trained(pipeline, data[number:])
        reported["resumed"] = after | {"losses": losses + after["losses"]}
    if "other" in case:
        with make_pipeline(world, case | {"schedule": case["other"]}) as pipeline:
            pipeline.load(folder)
            reported["other"] = _trained(pipeline, data[SAVED_AT:])
    return reported


def _trained(pipeline: hocket.Pipeline, data: Sequence[Any]) -> dict[str, Any]:
    """Train with several steps in flight; losses, and bits of the weights."""
    losses = [result.losses for result in pipeline.train(data)]
    with pipeline._executor.averaged():
        copies = weight_digests(pipeline)
    return {
        "copies": copies,
        "losses": losses,
        "weights": bits(pipeline.state_dict()),
        "averaged": bits(pipeline.state_dict(ema=True)),
        "evaluated": pipeline.evaluate(data[-2:]).loss,
    }


def _read(pipeline: hocket.Pipeline, step: int) -> list[dict[str, int]]:
    """Bits of what a step reads, in each stage of this worker."""
    found = []
    for runner in pipeline._executor.runners.values():
        if runner.versions is not None:
            runner.versions.put(step)
        found.append(bits({n: x.detach() for n, x in runner.parameters.items()}))
        if runner.versions is not None:
            runner.versions.take_out()
    return found


def bits(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """A number for each tensor, that every bit has a part in."""
    return {name: zlib.crc32(x.numpy().tobytes()) for name, x in state.items()}
