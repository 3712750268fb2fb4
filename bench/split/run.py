"""The whole backward beside I and W, and beside torch's own split.

    python -m bench.split.run

All of a model but its first layer as one stage, and one microbatch; the forward is
included, for what a split costs it pays in both:

    whole     F  B                  autograd's own backward
    layers    F  I  W               the weights of some layers wait (the runtime's way)
    graph     F  I  W               autograd's graph is split (the fallback)
    torch     F  I  W               torch.distributed.pipelining._backward

Each model once as captured code, and once as modules run as they are.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)

import hocket
from bench.measure import alternate, environment, paired_ratio, spread, write_result
from bench.models import resnet, transformer
from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.model.stages.stage import StageModule
from hocket.run.cluster.world import join_world
from hocket.run.data.batch import Microbatch
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.by_layers import ByLayers
from tests.run.support.split_by_graph import ByGraph

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
NUM_WORDS = 1000
TARGET = 1.03
How: TypeAlias = Literal["export", "sequential"]
HOWS: tuple[How, How] = ("export", "sequential")


class Recurrent(nn.LSTM):
    """Layers of LSTM that return what they say at every word."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """From x_BTW to x_BTW."""
        said: Tensor = super().forward(x)[0]
        return said


def lstm(width: int) -> nn.Sequential:
    """Words, two layers of LSTM, and the next word."""
    return nn.Sequential(
        nn.Embedding(NUM_WORDS, width),
        Recurrent(width, width, num_layers=2, batch_first=True),
        nn.Linear(width, NUM_WORDS),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A model with one microbatch.

    Args:
        make: builds the model.
        inputs: draws its input.
    """

    make: Callable[[], nn.Sequential]
    inputs: Callable[[], Tensor]


CASES = {
    "transformer": Case(lambda: transformer(256), lambda: torch.randn(2, 64, 256)),
    "small transformer": Case(
        lambda: transformer(128), lambda: torch.randn(1, 32, 128)
    ),
    "resnet": Case(resnet, lambda: torch.randn(8, 3, 32, 32)),
    "lstm": Case(lambda: lstm(256), lambda: torch.randint(NUM_WORDS, (8, 32))),
}


def main() -> None:
    """Measure every model, and keep it as JSON."""
    measure_cases(__doc__, "bench.split.run:worker", list(CASES), RESULTS)


def measure_cases(
    what: str | None, entry: str, names: list[str], results: Path
) -> None:
    """Let one worker measure the cases that the command line names, and keep its rows.

    Args:
        what: is measured, for `--help`.
        entry: the worker's: called with names of cases and the number of rounds.
        names: of all cases.
        results: where rows are kept.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cases", nargs="+", default=names, choices=names)
    parser.add_argument("--output", type=Path, default=results / "cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the worker does; `environment` reports it
    with tempfile.TemporaryDirectory() as folder:
        (rows,) = hocket.launch(
            entry,
            [arguments.cases, arguments.rounds],
            num_workers=1,
            run_dir=Path(folder),
        )
    for row in rows:
        print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(cases: list[str], num_rounds: int) -> list[dict[str, Any]]:
    """What the one process does."""
    torch.set_num_threads(1)
    world = join_world()
    rows = []
    for name in cases:
        for how in HOWS:
            steps = contestants(given(CASES[name], how))
            found = alternate(steps, world, num_rounds=num_rounds, num_warm=5)
            rows.append(
                {
                    "case": name,
                    "how": how,
                    **{key: spread(seconds) for key, seconds in found.items()},
                    **{
                        f"{key}_over_whole": paired_ratio(found[key], found["whole"])
                        for key in ("layers", "graph", "torch")
                    },
                    "target": TARGET,
                }
            )
    return rows


@dataclass(frozen=True, slots=True)
class Given:
    """What every contestant works on.

    Args:
        stage: all of the model but its first layer.
        received: what the first layer makes of the inputs.
        part: the microbatch.
    """

    stage: StageModule
    received: tuple[Tensor, ...]
    part: Microbatch


def given(case: Case, how: How) -> Given:
    """The same for everyone."""
    torch.manual_seed(0)
    x = case.inputs()
    captured = capture(case.make().train(), (x,), capture=how)
    first, stage = cut(captured, (1,))
    part = Microbatch((x,), None, x.shape[0])
    with torch.no_grad():
        received = first(x)
        part = replace(part, targets=torch.randn_like(run(stage, received, part)))
    for parameter in stage.parameters():  # as for every microbatch but the first
        parameter.grad = torch.zeros_like(parameter)
    return Given(stage, received, part)


def run(stage: StageModule, received: Sequence[Tensor], part: Microbatch) -> Tensor:
    """The stage's output."""
    output: Tensor = stage(*received, *(part.leaves[i] for i in stage.batch_inputs))
    return output


def contestants(work: Given) -> dict[str, Callable[[], object]]:
    """One microbatch's forward and backward, in four ways."""
    whole, layers, graph = (
        StageRunner(0, work.stage, loss, device=CPU, seed=0, make_splitter=make)
        for make in (ByLayers, ByLayers, ByGraph)
    )
    return {
        "whole": partial(_whole, whole, work),
        "layers": partial(_halves, layers, work),
        "graph": partial(_halves, graph, work),
        "torch": partial(_torch, work),
    }


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """As short as a loss can be."""
    return F.mse_loss(output, targets)


def _whole(runner: StageRunner, work: Given) -> None:
    runner.forward(0, 0, work.part, work.received, 1.0)
    runner.backward(0, 0, ())
    runner.loss.values.clear()


def _halves(runner: StageRunner, work: Given) -> None:
    runner.forward(0, 0, work.part, work.received, 1.0, splits=True)
    _, left = runner.input_gradients(0, 0, ())
    left.finish()
    runner.loss.values.clear()


def _torch(work: Given) -> None:
    leaves = [x.detach().requires_grad_() for x in work.received]
    found = loss(run(work.stage, leaves, work.part), work.part.targets)
    found.item()  # as the runner does
    weights: Sequence[nn.Parameter] = list(work.stage.parameters())
    _, groups = stage_backward_input([found], None, leaves, iter(weights))
    stage_backward_weight(iter(weights), groups)


if __name__ == "__main__":
    main()
