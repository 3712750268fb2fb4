"""What a teacher adds to the memory of the order that it fills: no activations."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket.run.stage.runner import StageRunner
from tests.run.support.captured_once import captured_once
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.teacher_models import case_of, make_batches
from tests.run.support.teacher_workers import make_pipeline


def kept(folder: str) -> list[dict[str, Any]]:
    """Train with a frozen teacher, and with one that moves, over 1F1B.

    Returns:
        For each: the tensors that autograd saved in the forwards of each net, the most
        microbatches of the student that waited for their backward, and the number of
        tensors that were alive behind each step but the first and the last.
    """
    world = join()
    found = []
    with captured_once() as shelf:
        moving = case_of("momentum", "1f1b", delay=1) | {"cut": ["blocks.2"]}
        for case in (case_of("frozen", "1f1b"), moving):
            with make_pipeline(case, world, Path(folder), shelf) as pipeline:
                found.append(_count(pipeline))
    return found


def _count(pipeline: hocket.Pipeline) -> dict[str, Any]:
    saved, most, alive = Counter[str](), 0, list[int]()
    for runner in pipeline._executor.runners.values():
        saved[runner.net] += 0
        runner.forward = _counting(runner, saved)  # type: ignore[method-assign]
    students = [x for x in pipeline._executor.runners.values() if x.net == "model"]

    def note(function: Callable[..., Any], runner: StageRunner) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            result = function(*args, **kwargs)
            most = max(most, len(runner.live))
            return result

        return called

    for runner in students:
        runner.forward = note(runner.forward, runner)  # type: ignore[method-assign]
    batches = [make_batches(1)[0]] * 8
    for result in pipeline.train(batches):
        del result
        gc.collect()
        alive.append(sum(isinstance(x, Tensor) for x in gc.get_objects()))
    return {"saved": dict(saved), "most": most, "alive": alive[1:-1]}


def _counting(runner: StageRunner, saved: Counter[str]) -> Callable[..., Any]:
    forward = runner.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        def pack(x: Tensor) -> Tensor:
            saved[runner.net] += 1
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return forward(*args, **kwargs)

    return counted


@pytest.mark.timeout(120)
def test_a_teacher_saves_nothing_for_a_backward(tmp_path: Path) -> None:
    """And the student keeps as many microbatches as 1F1B does: p - j on device j.

    Nothing is left behind from step to step.
    """
    answers = answers_of(f"{__name__}:kept", str(tmp_path), folder=tmp_path)
    for device, worker in enumerate(answers):
        for found in worker:
            saved = found["saved"]
            assert saved.pop("model") > 0
            assert all(num == 0 for num in saved.values())
            assert found["most"] == 2 - device
            assert len(set(found["alive"])) == 1
    moving = [worker[1]["saved"] for worker in answers]
    assert all(list(saved) == ["teacher"] for saved in moving)
