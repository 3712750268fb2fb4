"""Compiled stages beside eager ones: forward and backward of one microbatch.

python -m bench.compiled.run [--cases transformer resnet] [--rounds 60]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.measure import alternate, paired_ratio, spread
from bench.split.run import CASES, CPU, Given, given, loss, measure_cases
from hocket.run.cluster.world import join_world
from hocket.run.stage.compiled.capture import RequiredGraphs
from hocket.run.stage.compiled.function import CompiledFunction
from hocket.run.stage.compiled.lower import settings
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner
from hocket.run.tune.compile_stages import CompileConfig, compile_stage

RESULTS = Path(__file__).parent / "results"
NAMES = ("transformer", "small transformer", "resnet")
TARGET = 1.0


def main() -> None:
    """Measure every model, and keep it as JSON."""
    measure_cases(__doc__, "bench.compiled.run:worker", list(NAMES), RESULTS)


def worker(cases: list[str], num_rounds: int) -> list[dict[str, Any]]:
    """What the one process does."""
    from torch._inductor.utils import fresh_cache

    torch.set_num_threads(1)
    world = join_world()
    rows = []
    for name in cases:
        eager, compiled = (given(CASES[name], "sequential") for _ in range(2))
        begin_s = perf_counter()
        with fresh_cache():
            _compile(compiled)
            compiling_s = perf_counter() - begin_s
            found = alternate(
                {**_steps(eager, "eager"), **_steps(compiled, "compiled")},
                world,
                num_rounds=num_rounds,
                num_warm=5,
            )
        rows.append(
            {
                "case": name,
                **{key: spread(seconds) for key, seconds in found.items()},
                "whole": paired_ratio(found["compiled whole"], found["eager whole"]),
                "split": paired_ratio(found["compiled split"], found["eager split"]),
                "compiling_s": round(compiling_s, 1),
                "target": TARGET,
            }
        )
    return rows


def _compile(work: Given) -> None:
    modules = [work.stage, work.stage]  # the first stands for what is not compiled
    needs = RequiredGraphs(whole=True, split=True)
    with settings():
        compile_stage(
            CompileConfig(modules, loss, CPU, Precision.FLOAT32), 1, needs, [work.part]
        )
    assert isinstance(work.stage.training_code.function, CompiledFunction)


def _steps(work: Given, kind: str) -> dict[str, Callable[[], object]]:
    runner = StageRunner(1, work.stage, loss, device=CPU, seed=0)
    return {
        f"{kind} whole": partial(_whole, runner, work),
        f"{kind} split": partial(_split, runner, work),
    }


def _whole(runner: StageRunner, work: Given) -> None:
    runner.forward(0, 0, work.part, work.received, 1.0)
    runner.backward(0, 0, ())
    runner.loss.values.clear()


def _split(runner: StageRunner, work: Given) -> None:
    runner.forward(0, 0, work.part, work.received, 1.0, splits=True)
    _, left = runner.input_gradients(0, 0, ())
    left.finish()
    runner.loss.values.clear()


if __name__ == "__main__":
    main()
