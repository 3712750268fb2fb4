"""One worker's step beside a plain loop's, in turn; predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import torch

import hocket
from bench.gpu.checked import Checks, Row, Setting, exactly, synchronize
from bench.gpu.checks import check_spans
from bench.measure import alternate, paired_ratio, spread
from bench.models import Case, resnet, transformer
from hocket.run.cluster.world import single_process_world
from hocket.run.data.batch import split_batch

CASES: Final = {"wide": 1.01, "narrow": 1.03, "resnet": 1.01}  # the most that it costs
NUM_ROUNDS: Final = 20
NUM_PREDICTED: Final = 5  # steps that are compared with the prediction
_FULL: Final = {
    "wide": Case("wide", lambda: transformer(2048), (256, 2048), 4, 4),
    "narrow": Case("narrow", lambda: transformer(256), (128, 256), 16, 4),
    "resnet": Case("resnet", resnet, (3, 32, 32), 8, 128, classes=10),
}
_SMALL: Final = {
    "wide": Case("wide", lambda: transformer(64), (16, 64), 4, 2),
    "narrow": Case("narrow", lambda: transformer(32), (8, 32), 4, 2),
    "resnet": Case("resnet", resnet, (3, 8, 8), 2, 4, classes=10),
}


def measured(name: str, setting: Setting) -> Row:
    """The pipeline's step beside a plain loop over the same microbatches."""
    exactly()
    case = (_FULL if setting.is_full else _SMALL)[name]
    world = single_process_world(setting.device)
    batch = tuple(x.to(world.device) for x in case.batch())
    torch.manual_seed(0)
    with hocket.Pipeline(
        case.make().to(world.device),
        case.loss,
        optimizer=_sgd,
        example=batch,
        schedule="1f1b",
        num_microbatches=case.num_microbatches,
        world=world,
    ) as pipeline:

        def step() -> None:
            pipeline.step(batch)
            synchronize(world.device)

        step()
        peak_bytes = _peak_of(step, world.device)  # before there is a plain model
        seconds = alternate(
            {"plain": _plain_step(case, batch, world.device), "hocket": step},
            world,
            num_rounds=setting.size(NUM_ROUNDS, 3),
            num_warm=3,
        )
        spans = check_spans(pipeline, batch, world.world_size)
        makespans = []
        for _ in range(NUM_PREDICTED):
            step()
            makespans.append(pipeline.measured().makespan_s)
        predicted = pipeline.predicted
    predicted_bytes = predicted.peak_bytes(0)
    return {
        "hocket": spread(seconds["hocket"]),
        "plain": spread(seconds["plain"]),
        "hocket_over_plain": paired_ratio(seconds["hocket"], seconds["plain"]),
        "predicted_ms": round(predicted.makespan_s * 1e3, 4),
        "predicted_over_measured": predicted.makespan_s / median(makespans),
        "peak_bytes": peak_bytes,
        "predicted_bytes": predicted_bytes,
        "predicted_over_peak": predicted_bytes / peak_bytes if peak_bytes else None,
        "spans": spans,
    }


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def _plain_step(case: Case, batch: Any, device: torch.device) -> Callable[[], None]:
    parts = split_batch(batch, case.num_microbatches)
    torch.manual_seed(0)
    model = case.make().to(device)
    optimizer = _sgd(model.parameters())

    def step() -> None:
        for part in parts:
            loss = case.loss(model(*part.leaves), part.targets)
            (loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)

    return step


def _peak_of(step: Callable[[], None], device: torch.device) -> int | None:
    """Bytes allocated at the highest point of a step; not known on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device)


CHECKS: Final[Checks] = {
    f"one worker, {name}": partial(measured, name) for name in CASES
}
