"""Orders travel to torch.distributed.pipelining as CSV, and from there, and run.

Two real workers begin once, and play every file of both folders.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import hocket
from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.passes.add_messages import add_messages
from hocket.run.cluster.world import World
from hocket.run.data.batch import split_batch
from hocket.schedules import make_schedule
from tests.run.support.captured_once import captured_once
from tests.run.support.comparison import difference
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.optimizers import GRADIENTS, recorded
from tests.run.support.plain_loop import call_model
from tests.run.support.small_models import batches, classes, make_model
from tests.run.support.started import started

CPU: Final = torch.device("cpu")
MODEL: Final = "perceptron"
NUM_MICROBATCHES: Final = 4
CUTS: Final = {2: (4,), 4: (2, 4, 6)}  # where stages begin, by their number
WITH_MESSAGES: Final = ".messages.csv"

# torch's name of each schedule, and the stages of ranks 0 and 1.
TORCHS: Final[dict[str, tuple[Any, tuple[tuple[int, ...], ...]]]] = {
    "interleaved-1f1b": (pipelining.ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "looped-bfs": (pipelining.ScheduleLoopedBFS, ((0, 2), (1, 3))),
    "zb-h1": (pipelining.ScheduleInterleavedZeroBubble, ((0,), (1,))),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
    "dualpipe-v": (pipelining.ScheduleDualPipeV, ((0, 3), (1, 2))),
}

Gradients = dict[str, Tensor]


def exchange(folder: str) -> dict[str, dict[str, dict[str, float]]]:
    """Play all files of ours, and of each of torch's orders the one with messages.

    Returns:
        By folder and file, the difference of each gradient that this worker has,
        relative to its largest entry.
    """
    world = join()
    batch = batches(MODEL, 1, 2 * NUM_MICROBATCHES, 2 * NUM_MICROBATCHES)[0]
    expected = _plain(batch)
    ours, torchs = Path(folder) / "ours", Path(folder) / "torchs"
    if world.rank == 0:
        _write_torchs(torchs)
    world.barrier("torch's orders are written")
    found: dict[str, dict[str, dict[str, float]]] = {"ours": {}, "torchs": {}}
    for path in sorted(ours.iterdir()):
        found["ours"][path.name] = _far(_in_torch(path, world, batch), expected)
    with captured_once() as shelf:
        for path in sorted(torchs.glob(f"*{WITH_MESSAGES}")):  # as torch writes them
            model = shelf.model(MODEL, partial(make_model, MODEL))
            played = _in_hocket(path, world, batch, model)
            found["torchs"][path.name] = _far(played, expected)
    return found


def _plain(batch: Any) -> Gradients:
    model = make_model(MODEL)
    for part in split_batch(batch, NUM_MICROBATCHES):
        loss = classes(call_model(model, batch[0], part), part.targets)
        (loss / NUM_MICROBATCHES).backward()
    return _gradients(model)


def _in_torch(path: Path, world: World, batch: Any) -> Gradients:
    """One step of torch's runtime, which reads the order from the file."""
    program = hocket.Schedule.from_csv(path).program
    own = program.stages_on[world.rank]
    model = make_model(MODEL)
    assert isinstance(model, nn.Sequential)
    ends = (0, *CUTS[program.num_stages], len(model))
    stages = [_stage(model[ends[s] : ends[s + 1]], s, program.num_stages) for s in own]
    runtime = _PipelineScheduleRuntime(stages, NUM_MICROBATCHES, loss_fn=classes)
    with_messages = path.name.endswith(WITH_MESSAGES)
    runtime._load_csv(
        str(path), format="compute_comms" if with_messages else "compute_only"
    )
    inputs, targets = batch
    is_last = program.num_stages - 1 in own
    runtime.step(
        *((inputs,) if 0 in own else ()), target=targets if is_last else None, losses=[]
    )
    return {k: g for stage in stages for k, g in _gradients(stage.submod).items()}


def _in_hocket(path: Path, world: World, batch: Any, model: nn.Module) -> Gradients:
    """One step of a pipeline, which reads the order from the file."""
    num_stages = hocket.Schedule.from_csv(path).program.num_stages
    pipeline = started(
        model,
        classes,
        recorded,
        batch,
        schedule=str(path),
        num_microbatches=NUM_MICROBATCHES,
        cut=[str(child) for child in CUTS[num_stages]],
        profile_dir=path.parent.parent / "profiles",
        world=world,
    )
    GRADIENTS.clear()  # those of measuring the update
    pipeline.step(batch)
    pipeline.close()
    return {name: g for of_stage in GRADIENTS for name, g in of_stage.items()}


def _write_torchs(folder: Path) -> None:
    """Orders as torch's own schedules make them, in both forms."""
    folder.mkdir()
    for name, (kind, (own, _)) in TORCHS.items():
        num_stages = 2 * len(own)
        stages = [_stage(nn.Identity(), s, num_stages) for s in own]
        schedule = kind(stages, NUM_MICROBATCHES)
        schedule._dump_csv(str(folder / f"{name}.csv"), "compute_only")
        schedule._dump_csv(str(folder / f"{name}{WITH_MESSAGES}"))


def _stage(module: nn.Module, number: int, num_stages: int) -> pipelining.PipelineStage:
    return pipelining.PipelineStage(module, number, num_stages, CPU)


def _gradients(module: nn.Module) -> Gradients:
    return {k: p.grad for k, p in module.named_parameters() if p.grad is not None}


def _far(found: Gradients, expected: Gradients) -> dict[str, float]:
    return {name: difference(grad, expected[name]) for name, grad in found.items()}


OURS: Final = (
    "1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "interleaved-zb",
    "zb-v",
    "dualpipe-v",
    "ooo-fast-forward",
)
TOLERANCE: Final = 1e-10

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("torch exchange")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With our orders, in both forms."""
    folder = tmp_path_factory.mktemp("exchange")
    (folder / "ours").mkdir()
    for name in OURS:
        order = make_schedule(name, num_devices=2, num_microbatches=NUM_MICROBATCHES)
        order.to_csv(folder / "ours" / f"{name}.csv")
        add_messages(order).to_csv(folder / "ours" / f"{name}{WITH_MESSAGES}")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    """Of both workers, when they have played all."""
    return answers_of(
        f"{__name__}:exchange", str(folder), folder=folder / "workers", whole_s=180.0
    )


@pytest.mark.parametrize("form", [".csv", WITH_MESSAGES])
@pytest.mark.parametrize("name", OURS)
def test_torch_runs_our_order(
    answers: list[dict[str, Any]], name: str, form: str
) -> None:
    """With the plain loop's gradients, whether it adds the messages or we do."""
    check_gradients([answer["ours"][name + form] for answer in answers])


@pytest.mark.parametrize("name", TORCHS)
def test_we_run_torchs_order(answers: list[dict[str, Any]], name: str) -> None:
    """From the file that torch writes of it by default."""
    check_gradients([answer["torchs"][name + WITH_MESSAGES] for answer in answers])


@pytest.mark.parametrize("form", [".csv", WITH_MESSAGES])
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.usefixtures("answers")
def test_torchs_order_is_a_schedule_like_any(
    folder: Path, name: str, form: str
) -> None:
    """It passes the check, can be simulated, and is ours, whichever file it is in."""
    order = Schedule.from_csv(folder / "torchs" / f"{name}{form}")

    check(order)
    assert simulate(order, Costs.uniform()).makespan_s > 3 * NUM_MICROBATCHES
    assert order == make_schedule(
        name, num_devices=2, num_microbatches=NUM_MICROBATCHES
    )


def check_gradients(workers: list[dict[str, float]]) -> None:
    """Each parameter's gradient is on one worker, and the plain loop's."""
    found = [name for worker in workers for name in worker]
    assert sorted(found) == sorted(dict(make_model(MODEL).named_parameters()))
    worst = max(far for worker in workers for far in worker.values())
    assert worst <= TOLERANCE
