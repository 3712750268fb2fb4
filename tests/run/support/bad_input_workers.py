"""What the workers of the input tests do: give the pipeline what it should refuse.

Each function makes several pipelines, one after the other, and returns what its user
raised each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.schedules import make_schedule
from tests.run.support.failing_workers import (
    loss,
    make_batches,
    make_model,
    make_pipeline,
)
from tests.run.support.joined import Reported, join, reported
from tests.run.support.plainly import Batch


def bad_settings(folder: str) -> dict[str, Reported]:
    """Pipelines that cannot be made."""
    world = join()
    [example] = make_batches(1)
    x, y = example

    def made(batch: Any = example, model: Any = None, **settings: Any) -> Reported:
        model = make_model() if model is None else model
        return reported(partial(_make, model, batch, folder, world=world, **settings))

    def unprofiled(loss: Any) -> Reported:
        return made(loss=loss, profile_dir=None)

    return {
        "no such cut": made(cut=["7.linear"]),
        "order of cuts": made(schedule="looped-bfs", cut=["9", "6", "12"]),
        "too few cuts": made(schedule="looped-bfs", cut=["9"]),
        "too few layers": made(model=_small(), schedule="looped-bfs"),
        "replicas": made(num_replicas=3),
        "microbatches": made(num_microbatches=0),
        "name of the schedule": made(schedule="1f2b"),
        "schedule for others": made(schedule=_one_f_one_b(3)),
        "delays": made(schedule=_delayed()),
        "forward only": made(schedule="forward-only"),
        **_without_flushes(made),
        "dropped weight gradient": made(schedule=_zb_h1_with(0)),
        "doubled weight gradient": made(schedule=_zb_h1_with(2)),
        "small example": made((x[:3], y[:3])),
        "no pair": made({"x": x}),
        "no tensor": made(("x", "y")),
        "sizes disagree": made((x, y[:5])),
        "loss per sample": unprofiled(nn.CrossEntropyLoss(reduction="none")),
        "loss is a number": unprofiled(lambda output, targets: 1.0),
        "output is None": made(model=nn.Sequential(make_model(), _Nothing())),
        "all is well": made(),
    }


def _without_flushes(made: Callable[..., Reported]) -> dict[str, Reported]:
    """What does not go with old weights."""
    shared = nn.Linear(6, 6)
    middle = [nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    tied = nn.Sequential(shared, *middle, shared, nn.Tanh(), nn.Linear(6, 3))
    v = make_schedule("wpipe", num_devices=2, num_microbatches=4, num_steps=6)
    one_delay = replace(
        v.program, stages=tuple(replace(x, delay=1) for x in v.program.stages)
    )
    return {
        "accumulate and wpipe": made(schedule="wpipe", accumulate=2),
        "float16 and wpipe": made(schedule="wpipe", precision="float16"),
        "max_delay and 1f1b": made(schedule="1f1b", max_delay=1),
        "clip and an early update": made(
            schedule=replace(v, program=one_delay), clip_norm=1.0
        ),
        "tied and a late one": made(
            model=tied.double(),
            schedule=Schedule.parse(LATER_BEHIND),
            num_microbatches=1,
            cut=["4"],
            profile_dir=None,
        ),
        "hook and wpipe": made(model=_hooked(), schedule="wpipe", profile_dir=None),
        "too few for wpipe": made(schedule="wpipe", num_microbatches=1),
        "too few for the overlapped": made(
            schedule="wpipe-overlapped", num_microbatches=1
        ),
    }


LATER_BEHIND: Final = """\
steps 3
replicas 1
net model microbatches=1
stage 0 net=model device=0
stage 1 net=model device=1 delay=1
flow 0>1
d0  |: 0F0 0B0 0U :| 0F0@1 0B0@1 0U@1 0F0@2 0B0@2 0U@2
d1  1F0 1B0 |: 1F0@1 1U 1B0@1 :| 1F0@2 1U@1 1B0@2 1U@2
"""


def _hooked() -> nn.Module:
    """A user looks at the first weight's gradient."""
    model = make_model()
    next(model.parameters()).register_hook(lambda grad: grad)
    return model


def _make(*args: Any, **settings: Any) -> None:
    make_pipeline(*args, **settings).close()


class _Nothing(nn.Module):
    """Forgets to return."""

    def forward(self, x: Tensor) -> None:
        """None."""


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()


def _one_f_one_b(num_devices: int) -> Schedule:
    return make_schedule("1f1b", num_devices=num_devices, num_microbatches=4)


def _zb_h1_with(times: int) -> Schedule:
    """ZB-H1 whose second device does one weight gradient so many times."""
    schedule = make_schedule("zb-h1", num_devices=2, num_microbatches=4)
    first, second = schedule.lanes
    ops = [x for op in second.ops for x in [op] * (times if str(op) == "1W2" else 1)]
    return replace(schedule, lanes=(first, replace(second, ops=tuple(ops))))


def _delayed() -> Schedule:
    """1F1B of a program whose first stage asks for the weights of a step before."""
    program = Program.chain([0, 1], 4, delays=[1, 0])
    return replace(_one_f_one_b(2), program=program)


def bad_batches(folder: str) -> dict[str, Any]:
    """Batches that are refused, and then good ones, which train as if nothing were."""
    world = join()
    good = make_batches(2)
    x, y = good[0]
    with make_pipeline(make_model(), good[0], folder, world=world) as pipeline:
        answers: dict[str, Any] = {
            name: reported(partial(pipeline.step, batch))
            for name, batch in {
                "too small": (x[:3], y[:3]),
                "no pair": x,
                "three": (x, y, y),
                "no values": (x, y.to("meta")),
                "no tensor": ("x", "y"),
                "sizes disagree": (x, y[:5]),
                "another type": (x.float(), y),
                "another shape": (x[:, :5], y),
                "another structure": ((x, x), y),
                "by name": ({"x": x}, y),
            }.items()
        }
        small = DataLoader(TensorDataset(*make_batches(1, 18)[0]), batch_size=16)
        answers["last batch"] = reported(partial(list, pipeline.train(small)))
        answers["losses"] = [pipeline.step(batch).loss for batch in good]
    with make_pipeline(make_model(), good[0], folder, world=world) as pipeline:
        answers["expected"] = [result.loss for result in pipeline.train(good)]
    return answers


def bad_losses(folder: str) -> dict[str, list[Reported]]:
    """Losses that turn bad in the second step, and what comes of the pipeline then."""
    world = join()
    batches = make_batches(2)
    answers = {}
    for name, bad in {
        "per sample": nn.CrossEntropyLoss(reduction="none"),
        "a number": lambda output, targets: 1.0,
        "detached": lambda output, targets: loss(output.detach(), targets),
        "other names": lambda out, y: {"loss": loss(out, y), "more": out.mean()},
    }.items():
        turning = _Turning(bad)
        with make_pipeline(
            make_model(), batches[0], folder, world=world, loss=turning
        ) as pipeline:
            pipeline.step(batches[0])
            turning.turned = True
            answers[name] = [
                reported(partial(pipeline.step, batches[1])),
                reported(partial(pipeline.step, batches[1])),
                reported(partial(pipeline.evaluate, batches)),
                reported(pipeline.state_dict),
                reported(pipeline.measured),
            ]
    return answers


class _Turning:
    """A good loss function, then another."""

    def __init__(self, bad: Any) -> None:
        self.bad, self.turned = bad, False

    def __call__(self, output: Any, targets: Any) -> Any:
        """As a loss function."""
        return (self.bad if self.turned else loss)(output, targets)


def different_data(
    folder: str, names: list[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """The last worker is given other data: what all raise, and which trained.

    Some fail and others wait then, so each time they begin a job of their own.
    """
    good = make_batches(2)
    answers: dict[str, Any] = {}
    for name in names:
        for does in (_train, _evaluate):
            world = join(attempt=len(answers))
            last = world.rank == world.world_size - 1
            model = make_model()
            before = _weights(model)
            answers[f"{name}, {does.__name__.strip('_')}"] = [
                reported(
                    partial(
                        does,
                        model,
                        good[0],
                        folder,
                        _other_data(name, good) if last else good,
                        world=world,
                        **settings,
                    )
                ),
                torch.equal(_weights(model), before),
            ]
            world.close()
    return answers


def _other_data(name: str, good: list[Batch]) -> Any:
    x, y = good[0]
    return {
        "order": good[::-1],
        "targets": [(x, y.roll(1)), good[1]],
        "batch sizes": make_batches(2, 12),
        "lengths": good[:1],
    }[name]


def _train(
    model: nn.Module, example: Batch, folder: str, loader: Any, **settings: Any
) -> None:
    with make_pipeline(model, example, folder, **settings) as pipeline:
        for _ in pipeline.train(loader):
            pass


def _evaluate(
    model: nn.Module, example: Batch, folder: str, loader: Any, **settings: Any
) -> None:
    with make_pipeline(model, example, folder, **settings) as pipeline:
        pipeline.evaluate(loader)


def _weights(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def different_pipelines(folder: str) -> dict[str, Reported]:
    """Workers that would not make the same pipeline."""
    world = join()
    [example], [bigger] = make_batches(1), make_batches(1, 20)
    answers = {}
    others: dict[str, dict[str, Any]] = {
        "width": {"model": make_model(width=7)},
        "weights": {"model": make_model(seed=2)},
        "schedule": {"schedule": "gpipe"},
        "stages": {"schedule": "looped-bfs"},
        "microbatches": {"num_microbatches": 8},
        "cut": {"cut": ["12"]},
        "seed": {"seed": 1},
        "example": {"example": bigger},
        "learning rate": {"optimizer": partial(torch.optim.SGD, lr=0.02)},
        "warm-up": {"scheduler": partial(LinearLR, start_factor=0.5)},
        "nothing": {},
    }
    for name, other in others.items():
        mine = {"model": make_model(), "example": example, "cut": ["9"]}
        mine |= other if world.rank else {}
        if name == "stages":
            mine.pop("cut")
        answers[name] = reported(partial(_make, folder=folder, world=world, **mine))
    return answers
