"""One gate over all of a student's stages, though its teacher is a batch ahead."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.gates import flushes
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, HocketError
from hocket.run.cluster.world import World
from hocket.run.data.batch import split_batch
from hocket.run.engine.refusals import refuse_settings
from hocket.run.stage.net_output import TeacherOutputs
from hocket.run.weights.settings import TrainingConfig
from tests.run.support.forked import answers_of
from tests.run.support.fragile_workers import fragile_batches, make_fragile
from tests.run.support.joined import join
from tests.run.support.started import started
from tests.run.support.teacher_models import (
    distil,
    make_batches,
    make_student,
    make_teacher,
)

NUM_MICROBATCHES = 2


def near(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Return the classes' loss, and a finite share of the distance to the teacher."""
    read = teachers["teacher"].own.nan_to_num()
    return F.cross_entropy(output, targets) + (output - read).square().mean()


def teacher_of(net: nn.Module, delay: int | None) -> hocket.Teacher:
    """Make a teacher that moves with a delay, or a frozen one if there is none."""
    if delay is None:
        return hocket.Teacher(net)
    return hocket.Teacher(net, update=hocket.Momentum(0.5), delay=delay)


def train_fragile(delays: list[int | None], folder: str) -> list[list[Any]]:
    """Train until a gradient of step 4 is not finite.

    Returns:
        For each delay: the error's kind and words, the steps that were done, and
        whether this worker's weights are those behind step 3.
    """
    world = join()
    return [_fragile(world, delay, folder) for delay in delays]


def _fragile(world: World, delay: int | None, folder: str) -> list[Any]:
    model, net = make_fragile(), make_fragile()
    batches = fragile_batches(6, poisoned=4)
    pipeline = started(
        model,
        near,
        (lambda p: torch.optim.AdamW(p, lr=0.1)),
        batches[0],
        num_microbatches=NUM_MICROBATCHES,
        teachers={"teacher": teacher_of(net, delay)},
        profile_dir=Path(folder) / "profiles",
        world=world,
    )
    reported, num_done, before = ["", ""], 0, list[Tensor]()
    try:
        for result in pipeline.train(batches):
            before = [p.detach().clone() for p in model.parameters()]
            num_done = result.step + 1
    except HocketError as error:
        reported = [type(error).__name__, str(error)]
    after = [p.detach() for p in model.parameters()]
    return [*reported, num_done, all(map(torch.equal, before, after))]


def large(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Any:
    """Return losses whose scaled gradients float16 cannot hold at first."""
    named = distil(output, targets, teachers)
    return {name: 200.0 * value for name, value in named.items()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer whose steps are proportional to the gradients."""
    return torch.optim.SGD(parameters, lr=2e-4)


def train_in_float16(delays: list[int | None], folder: str) -> list[dict[str, Any]]:
    """Train with a loss scale that is too large for the first steps.

    Returns:
        For each delay: the steps that were skipped, here and in a loop with torch's
        `GradScaler`; and the largest difference of a weight.
    """
    world = join()
    return [_in_float16(world, delay, folder) for delay in delays]


def _in_float16(world: World, delay: int | None, folder: str) -> dict[str, Any]:
    kind = "frozen" if delay is None else "momentum"
    student, net = make_student().float(), make_teacher(kind).float()
    loop = _Loop(copy.deepcopy(student), copy.deepcopy(net), delay)
    batches = [(x.float(), y) for x, y in make_batches()] * 2
    with started(
        student,
        large,
        sgd,
        batches[0],
        num_microbatches=NUM_MICROBATCHES,
        precision="float16",
        teachers={"teacher": teacher_of(net, delay)},
        profile_dir=Path(folder) / "profiles",
        world=world,
    ) as pipeline:
        skipped = [result.skipped for result in pipeline.train(batches)]
        state = pipeline.state_dict()
    expected = [loop.step(batch) for batch in batches]
    return {
        "skipped": skipped,
        "expected": expected,
        "off": max(
            float((state[name] - x).abs().max())
            for name, x in loop.student.state_dict().items()
        ),
    }


class _Loop:
    """A plain loop with torch's scaler, whose teacher may be some updates behind."""

    def __init__(self, student: nn.Module, net: nn.Module, delay: int | None) -> None:
        self.student, self._net, self._delay = student.train(), net, delay or 0
        self._moves = delay is not None
        self._net.train(self._moves)
        self._versions = [self._weights()]
        self._optimizer = sgd(student.parameters())
        self._scaler = torch.amp.GradScaler("cpu")

    def _weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._net.parameters()]

    def _put(self, weights: list[Tensor]) -> None:
        for p, value in zip(self._net.parameters(), weights, strict=True):
            p.detach().copy_(value)

    def step(self, batch: tuple[Tensor, Tensor]) -> bool:
        """Train a step; return whether its update was skipped."""
        self._put(self._versions[max(0, len(self._versions) - 1 - self._delay)])
        for part in split_batch(batch, NUM_MICROBATCHES):
            with torch.autocast("cpu", torch.float16):
                with torch.no_grad():
                    read = self._net(part.leaves[0])
                found = large(
                    self.student(part.leaves[0]),
                    part.targets,
                    {"teacher": TeacherOutputs("teacher", read)},
                )
                share = part.num_samples / len(batch[0])
            self._scaler.scale(sum(found.values()) * share).backward()
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        is_skipped = self._scaler.get_scale() < before
        newest = self._versions[-1]
        if self._moves and not is_skipped:
            named = dict(self.student.named_parameters())
            names = [name for name, _ in self._net.named_parameters()]
            newest = [
                0.5 * x + 0.5 * named[name].detach()
                for name, x in zip(names, newest, strict=True)
            ]
        self._versions.append(newest)
        return is_skipped


DELAYS = [None, 0, 1, 2]  # None: a frozen teacher


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_no_stage_is_updated_from_a_step_with_a_bad_gradient(
    num_workers: int, tmp_path: Path
) -> None:
    """As in the order that was filled: all workers stop, with the same error.

    The gradient of stage 0 alone is not finite, and complete after that of stage 1.
    """
    for worker in answers_of(
        f"{__name__}:train_fragile",
        DELAYS,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    ):
        for kind, words, num_done, is_same in worker:
            assert kind == "NonFiniteError"
            assert re.fullmatch(
                "the losses of step 4 are finite, its gradients are not: the first "
                r"at fault is that of 0\.weight, stage \d; no weights were updated "
                "from it",
                words,
            )
            assert num_done == 4
            assert is_same


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_workers", "delays"), [(1, DELAYS[::2]), (2, DELAYS)])
def test_a_loss_scale_goes_with_a_teacher_ahead(
    num_workers: int, delays: list[int | None], tmp_path: Path
) -> None:
    """Skips the steps that torch's scaler skips, and no teacher moves in them.

    Whether step k overflowed is known before the student begins with step k + 1; the
    teacher's forwards, which began, do not depend on the loss scale.
    """
    for worker in answers_of(
        f"{__name__}:train_in_float16",
        delays,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    ):
        for answer in worker:
            assert answer["skipped"] == answer["expected"]
            assert 0 < sum(answer["skipped"]) < len(answer["skipped"])
            assert answer["off"] < 1e-3


# A filled order whose first device has nothing that is trained.
FROZEN_DEVICE = """steps 3
repeats 2
net t microbatches=1
net s microbatches=1
stage 0 net=t device=0 trainable=no
stage 1 net=s device=0 trainable=no
stage 2 net=s device=1
flow 1>2
flow 0>2
d0  0F0 |: 1F0 0F0@1 1F0@1 0F0@2 :| 1F0@2
d1  |: 2F0 2B0 2U 2F0@1 2B0@1 2U@1 :| 2F0@2 2B0@2 2U@2"""


def test_a_device_without_gradients_knows_no_loss_scale() -> None:
    """It works for the next batch before it could hear of an overflow."""
    schedule = Schedule.parse(FROZEN_DEVICE)
    assert flushes(schedule)
    settings = TrainingConfig(optimizer=torch.optim.AdamW, precision="float16")
    with pytest.raises(ConfigError, match="device 0 has no stage that is trained"):
        refuse_settings(settings, schedule)
    refuse_settings(replace(settings, precision="bfloat16"), schedule)
