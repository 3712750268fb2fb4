"""What the workers of the failure tests do: train, until one of them has a fault.

Each worker's weights lie in a file that it maps, so that a test can look at them
whatever happened to the worker.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket import env
from hocket.errors import WorkerError
from hocket.run.cluster.launch import launch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from tests.run.support.forked import mark_fault
from tests.run.support.launched_workers import FAULTS
from tests.run.support.plainly import Batch, classified

LINGER: Final = "linger"  # no fault
LINGER_S: Final = 0.5

WIDTH: Final = 6
NUM_CLASSES: Final = 3
NUM_LAYERS: Final = 8
BATCH_SIZE: Final = 16


@dataclass
class Trap:
    """Sets a fault off when this worker comes to a place at some time.

    Args:
        place: an op (`1F2`), a wait in one (`wait in 1F2`), a part of the user's code,
            or nowhere.
        when: the step, or `start`, or `evaluate`.
        fault: what happens then, of `FAULTS`; or it lingers.
        folder: of the test.
        now: the time, set by the training loop.
        op: the newest in the ring.
    """

    place: str = ""
    when: str = ""
    fault: str = ""
    folder: str = ""
    now: str = "start"
    op: str = ""

    def at(self, place: str) -> None:
        """The worker comes to a place."""
        if (place, self.now) != (self.place, self.when):
            return
        if self.fault == LINGER:
            time.sleep(LINGER_S)
            return
        mark_fault(Path(self.folder), int(env.RANK.text()))
        FAULTS[self.fault]()


TRAP = Trap()


class Passage(nn.Module):
    """A layer of the user's that may have a fault in its forward and its backward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        """The same tensor."""
        TRAP.at(f"forward of layer {self.number}")
        passed: Tensor = _Passage.apply(x, self.number)  # type: ignore[no-untyped-call]
        return passed


class _Passage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        TRAP.at(f"backward of layer {ctx.number}")
        return grad, None


class Descent(torch.optim.SGD):
    """Plain gradient descent that may have a fault."""

    def step(self, closure: Any = None) -> Any:
        TRAP.at("optimizer")
        return super().step(closure)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Descent:
    """As in all these tests."""
    return Descent(parameters, lr=0.1)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, which may have a fault."""
    TRAP.at("loss")
    return F.cross_entropy(output, targets)


def make_model(seed: int = 1, width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    """Linear layers, each with a passage that may have a fault."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(WIDTH, width)]
    for number in range(NUM_LAYERS):
        layers += [Passage(number), nn.Tanh(), nn.Linear(width, width)]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES)).double()


def make_batches(
    num_batches: int, size: int = BATCH_SIZE, seed: int = 2
) -> list[Batch]:
    """Random vectors and classes."""
    return classified([size] * num_batches, WIDTH, NUM_CLASSES, seed=seed)


def make_pipeline(
    model: nn.Module, example: Batch, folder: str, **settings: Any
) -> hocket.Pipeline:
    """A pipeline of four microbatches; all tests share one profile."""
    profiles = Path(folder).parent / "profiles"
    settings = {"num_microbatches": 4, "profile_dir": profiles, **settings}
    return hocket.Pipeline(
        model,
        settings.pop("loss", loss),
        optimizer=settings.pop("optimizer", make_optimizer),
        example=example,
        **settings,
    )


def train(case: dict[str, Any], folder: str) -> list[float]:
    """Train some steps and evaluate; the case's rank has the case's fault."""
    torch.set_num_threads(1)
    rank = env.RANK.integer()
    _set_trap(case, rank, folder)
    TRAP.at("join")
    model = make_model()
    weights = keep_weights(model, Path(folder) / f"weights-{rank}")
    batches = make_batches(case.get("num_steps", 4))
    if "poison" in case:
        step, sample, value = case["poison"]
        batches[step][0][sample] = float(value)
    if "mislabel" in case:
        step, sample, label = case["mislabel"]
        batches[step][1][sample] = label
    losses = []
    with make_pipeline(model, batches[0], folder, **case["settings"]) as pipeline:
        endless = itertools.cycle(batches) if case.get("endless") else batches
        for result in pipeline.train(_noting(endless, weights, Path(folder), rank)):
            losses.append(result.loss)
            TRAP.at("between steps")
        TRAP.now = "evaluate"
        pipeline.evaluate(batches)
    return losses


def keep_weights(model: nn.Module, path: Path) -> Tensor:
    """Move a model's parameters into a file; returns all of them, flat."""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.from_file(str(path), shared=True, size=sum(sizes), dtype=torch.float64)
    flat.copy_(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


def _noting(
    batches: Iterable[Batch], weights: Tensor, folder: Path, rank: int
) -> Iterator[Batch]:
    """The batches; keeps a copy of the weights from before each step."""
    for step, batch in enumerate(batches):
        TRAP.now = str(step)
        TRAP.at("loader")
        weights.numpy().tofile(folder / f"weights-{rank}.before")
        yield batch


def _set_trap(case: dict[str, Any], rank: int, folder: str) -> None:
    """Let the trap know of each op and each wait that goes into the ring.

    Where a worker has its fault in a wait, the others see to it that it has to wait.
    """
    if "rank" not in case:
        return
    TRAP.place, TRAP.when, TRAP.fault = case["place"], case["when"], case["fault"]
    TRAP.folder = folder
    if case["rank"] != rank:
        TRAP.place = "forward of layer 0" if TRAP.place.startswith("wait") else ""
        TRAP.fault = LINGER
    begin, wait = FlightRecorder.begin, FlightRecorder.wait

    def begin_and_tell(recorder: FlightRecorder, op: str, step: int) -> None:
        begin(recorder, op, step)
        TRAP.op = op
        TRAP.at(op)

    def wait_and_tell(recorder: FlightRecorder, what: str, from_rank: int) -> None:
        wait(recorder, what, from_rank)
        TRAP.at(f"wait in {TRAP.op}")

    setattr(FlightRecorder, "begin", begin_and_tell)  # noqa: B010  (mypy knows the other one)
    setattr(FlightRecorder, "wait", wait_and_tell)  # noqa: B010


def main() -> None:
    """A user's script that trains until it is stopped."""
    folder = sys.argv[1]
    case: Any = {"endless": True, "settings": {}}
    try:
        launch(train, [case, folder], num_workers=2, run_dir=Path(folder))
    except (KeyboardInterrupt, WorkerError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(env.exit_code_of(error))


if __name__ == "__main__":
    main()
