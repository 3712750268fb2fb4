"""What all samples share is whole in each microbatch, in whatever way it is run.

A (T, T) mask was refused without its name; where T was the batch's size, it was cut
without a word, and the weights were 3.5 % off. NumPy arrays went to every microbatch
whole, 5 to 12 % off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

import hocket
from tests.run.support import shared_input_workers as own
from tests.run.support.forked import answers_of

pytestmark = pytest.mark.timeout(120)
TOLERANCE: Final = 1e-10
ENTRY: Final = "shared_input_workers:train"


@pytest.mark.parametrize("name", own.CASES)
def test_one_worker_trains_as_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Also where its values are others in each batch."""
    found = own.train(str(tmp_path), name)

    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("name", own.CASES)
@pytest.mark.parametrize(
    "options", [{"cuts": True}, {"num_replicas": 2}], ids=["stages", "replicas"]
)
def test_two_workers_train_as_the_plain_loop(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """With a stage on each, and as replicas."""
    for found in answers_of(ENTRY, str(tmp_path), name, options, folder=tmp_path):
        assert max(found.values()) <= TOLERANCE, found


def test_a_teacher_gets_it_too(tmp_path: Path) -> None:
    """Its forwards are over the same microbatches, or others."""
    found = own.train(str(tmp_path), "mask", {"teacher": True})

    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("name", ["mask", "structure", "class_weights"])
def test_compile_step_gives_the_values(name: str) -> None:
    """Nothing is cut there."""
    case = own.made(name)
    with hocket.compile_step(
        case.net, case.loss, own.sgd, example=case.batches[0], num_lanes=1
    ) as step:
        for batch in case.batches:
            step(batch)
        step.synchronize()

    assert own.apart(case.net.state_dict(), own.plain(own.made(name))) <= TOLERANCE


def test_outputs_and_emulation() -> None:
    """Where batches are cut, too."""
    case, expected = own.made("mask"), own.made("mask")
    outputs = own.call(expected.net, own.given(case.batches[0][0]))
    schedule = hocket.make_schedule("1f1b", num_devices=1, num_microbatches=4)
    with hocket.Pipeline(
        case.net, case.loss, optimizer=own.sgd, example=case.batches[0]
    ) as pipeline:
        found = pipeline.outputs(case.batches[:1])
    hocket.emulate(schedule.program, case.net, case.loss, own.sgd, case.batches)

    assert torch.allclose(found, outputs.detach(), rtol=0, atol=1e-12)
    assert own.apart(case.net.state_dict(), own.plain(expected)) <= TOLERANCE


def test_a_plan_for_another_number_of_samples() -> None:
    """The mask does not grow with the batch."""
    case = own.made("mask")
    plan = hocket.plan(
        case.net.float(),
        (
            (
                torch.randn(8, 8, 4),
                hocket.Shared(torch.ones(8, 8)),
                hocket.Shared(torch.ones(1, 8)),
            ),
            torch.randn(8, 8, 3),
        ),
        case.loss,
        num_devices=2,
        hardware="a100-80g",
        links="nvlink",
        batch_size=32,
    )

    assert plan.rows()
