"""Every flush-free run equals the single-process emulator of its delays.

Design, section 4: after 20 steps in float64, or a few where another run of the same
order has 20; with AdamW, and SGD with momentum; with BatchNorm and dropout; on 1 to 4
workers, and with replicas; with a smaller last batch. `make test-long` has 20 steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import hocket
from hocket.run.data.batch import count_samples
from hocket.schedules import make_schedule
from tests.run.support.captured_once import captured_once
from tests.run.support.comparison import (
    TOLERANCE,
    case,
    check_alike,
    check_evaluation,
    difference,
    in_few_steps,
    of_four,
    quick_and_all,
)
from tests.run.support.exactness import optimizer_of
from tests.run.support.forked import answers_of
from tests.run.support.fragile_workers import (
    FRAGILE_CUT,
    POISONED,
    fragile_batches,
    make_fragile_stages,
)
from tests.run.support.optimizers import make_scheduler
from tests.run.support.plain_loop import data_of
from tests.run.support.small_models import make_model, specimen_of


def given(name: str, p: int, m: int, *, late: bool = False) -> str:
    """An order as text, as users may write one down."""
    order = make_schedule(
        name, num_devices=p, num_microbatches=m, num_steps=6, late_updates=late
    )
    return str(order)


FEW_STEPS = 7  # prologue, body more than once, epilogue; two drains of three steps
FIRST = {
    2: [
        case("resnet", "wpipe", 3, scheduler=True),
        of_four("tied-dropout", "pipedream-2bw", 3, clip_norm=0.05),
    ]
}
RELATIVES = {
    1: [
        case("perceptron", "pipedream-2bw", 3),
        case("dropout", "wpipe", 2, recompute="all"),
        of_four("resnet", "wpipe-overlapped", 2, optimizer="momentum"),
        of_four("tied", "wpipe", 2),
    ],
    2: [
        case("perceptron", "pipedream", 1, batch_size=6),
        case("resnet", "pipedream-2bw", 4, optimizer="momentum", transport="torch"),
        case("dropout", "wpipe", 4, recompute="all"),
        case("dropout", "wpipe", 4, clip_norm=0.05),
        case("dropout", "wpipe-overlapped", 3, evaluate_after=(2, 4, 9)),
        case("perceptron", "wpipe", 2, by_step=True, num_steps=6),
        case("perceptron", given("wpipe", 2, 3), 3),
        case("perceptron", given("pipedream-2bw", 2, 3, late=True), 3),
        case("tied", "wpipe", 4, clip_norm=0.05, scheduler=True),
        of_four(
            "tied-dropout", "wpipe-overlapped", 3, optimizer="momentum", drain_every=3
        ),
        of_four("tied", "wpipe", 2, transport="torch", drain_every=3),
    ],
}
OTHERS = {
    2: [
        case("perceptron", "pipedream-2bw", 2),
        case("perceptron", "wpipe", 2),
        case("perceptron", "wpipe-overlapped", 4, optimizer="momentum"),
        case("perceptron", "pipedream-2bw", 4, clip_norm=0.05, optimizer="momentum"),
        case("perceptron", "wpipe", 3, drain_every=3),
        case("tied", "pipedream-2bw", 4),
        case("tied", "pipedream", 1, batch_size=4, last=3, recompute="all"),
    ],
    3: [
        case("perceptron", "pipedream-2bw", 4, scheduler=True),
        case("dropout", "wpipe", 3),
        case("perceptron", "pipedream", 1, batch_size=6),
        case("dropout", "pipedream-2bw", 3, clip_norm=0.05, drain_every=7),
    ],
    4: [
        case("perceptron", "wpipe", 2, num_replicas=2),
        case("dropout", "pipedream-2bw", 3, num_replicas=2, optimizer="momentum"),
        case("perceptron", "wpipe-overlapped", 2, num_replicas=2, clip_norm=0.05),
        case("perceptron", "pipedream-2bw", 3, num_replicas=2, clip_norm=0.05),
        case("deep", "wpipe", 4),
        case("tied", "pipedream-2bw", 2, num_replicas=2),
        case("tied", "wpipe", 2, num_replicas=2),
    ],
}
QUICK, JOBS = quick_and_all(FIRST, RELATIVES, OTHERS, num_steps=FEW_STEPS)

MANY = {
    2: [
        case("gpt2", "wpipe", 2),
        case("gpt2", "wpipe-overlapped", 3, optimizer="momentum", clip_norm=0.05),
        case("t5", "wpipe", 2),
    ],
    3: [
        case("tied", "pipedream", 1, batch_size=6, optimizer="momentum"),
        case("tied", "wpipe", 4),
    ],
    4: [
        case("tied", "pipedream", 1, batch_size=6),
        case("tied", "wpipe", 4, optimizer="momentum"),
        case("tied-dropout", "wpipe-overlapped", 6, clip_norm=0.05),
        case("tied", "wpipe-overlapped", 4, num_replicas=2, clip_norm=0.05),
    ],
    6: [case("perceptron", "wpipe", 3, num_replicas=2, scheduler=True)],
    8: [
        case("deep", "wpipe", 4, num_replicas=2),
        case("deep", "pipedream-2bw", 4, num_replicas=2, optimizer="momentum"),
        case("deep-dropout", "wpipe-overlapped", 6, num_replicas=2, last=13),
    ],
}


@pytest.mark.parametrize("num_workers", sorted(QUICK))
@pytest.mark.timeout(200)
def test_each_kind_equals_the_emulator(num_workers: int, tmp_path: Path) -> None:
    """Weights, buffers, the losses of each step, in order; and on each worker."""
    _check_all(QUICK[num_workers], num_workers, tmp_path, whole_s=180.0)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", sorted(JOBS))
@pytest.mark.timeout(200)
def test_equals_the_emulator(num_workers: int, tmp_path: Path) -> None:
    """Weights, buffers, the losses of each step, in order; and on each worker."""
    _check_all(JOBS[num_workers], num_workers, tmp_path, whole_s=180.0)


ORDERED = {
    2: in_few_steps(
        case("perceptron", "wpipe", 3, drain_every=3),
        case("dropout", "wpipe-overlapped", 3, evaluate_after=(2, 9)),
        case("tied", "wpipe", 4, clip_norm=0.05),
        num_steps=11,  # an evaluation, and the epilogue behind it
    ),
    4: in_few_steps(
        case("perceptron", "wpipe-overlapped", 2, num_replicas=2, clip_norm=0.05),
        num_steps=FEW_STEPS,
    ),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_workers", sorted(ORDERED))
def test_equals_the_emulator_over_ordered_wires(
    num_workers: int, tmp_path: Path
) -> None:
    """Messages keep the planned order: bodies, pauses, evaluations and epilogues.

    Past bug: a rank waited for the norms of another, and had not posted a receive that
    stood before its update.
    """
    _check_all(
        ORDERED[num_workers],
        num_workers,
        tmp_path,
        whole_s=180.0,
        entry="ordered_workers:train",
    )


@pytest.mark.long
@pytest.mark.parametrize("num_workers", sorted(MANY))
@pytest.mark.timeout(600)
def test_many_workers_equal_the_emulator(num_workers: int, tmp_path: Path) -> None:
    """The same, with two replicas of three and four devices."""
    _check_all(MANY[num_workers], num_workers, tmp_path, whole_s=500.0)


def _check_all(
    cases: list[dict[str, Any]],
    num_workers: int,
    tmp_path: Path,
    *,
    whole_s: float,
    entry: str = "exactness:train_all",
) -> None:
    answers = answers_of(
        entry,
        cases,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
        whole_s=whole_s,
    )
    with captured_once() as shelf:
        for i, run in enumerate(cases):
            reported = [worker[i] for worker in answers]
            model = shelf.model(run["model"], partial(make_model, run["model"]))
            _check(run, model, reported, load_file(tmp_path / f"{i}.st"))


def _check(
    run: dict[str, Any],
    model: nn.Module,
    reported: list[dict[str, Any]],
    state: dict[str, Tensor],
) -> None:
    expected, history, norms = _emulated(run, model, reported[0])
    assert sorted(state) == sorted(expected)
    far = {name: difference(state[name], value) for name, value in expected.items()}
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= TOLERANCE, f"{run}: {worst} is off by {far[worst]:.1e}"
    sizes = [count_samples(batch) for batch in data_of(run)]
    for worker in reported:
        assert worker["steps"] == list(range(run["num_steps"]))
        assert worker["sizes"] == sizes
        assert worker["losses"] == reported[0]["losses"]
        assert worker["norms"] == reported[0]["norms"]
        for name in history[0]:
            losses = [named[name] for named in worker["losses"]]
            assert losses == pytest.approx([x[name] for x in history], rel=1e-9), run
    if "clip_norm" not in run:  # the emulator's optimizers see clipped gradients
        assert reported[0]["norms"] == pytest.approx(norms, rel=1e-9), run
    check_alike(run, reported)
    check_evaluation(run, expected, reported)
    _check_copies(run, reported)


def _emulated(
    run: dict[str, Any], model: nn.Module, reported: dict[str, Any]
) -> tuple[dict[str, Tensor], list[dict[str, float]], list[float]]:
    """Weights and buffers; of each step the losses, and the norm of all gradients."""
    squares: list[list[float]] = []  # of each stage that has an optimizer, by step

    def noting(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = optimizer_of(run)(parameters)
        squares.append(own := [])
        optimizer.register_step_pre_hook(lambda *_: own.append(_square(parameters)))
        return optimizer

    history = hocket.emulate(
        hocket.Program.chain(
            range(len(reported["delays"])),
            run["num_microbatches"],
            num_replicas=run["num_replicas"],
            delays=reported["delays"],
        ),
        model,
        specimen_of(run["model"]).loss,
        noting,
        data_of(run),
        cut_at=reported["stage_names"][1:],
        schedulers=make_scheduler if run.get("scheduler") else None,
        clip_norm=run.get("clip_norm"),
    )
    norms = [sum(stages) ** 0.5 for stages in zip(*squares, strict=True)]
    return model.state_dict(), history, norms


def _square(parameters: Any) -> float:
    """Of the norm of all gradients."""
    return sum(p.grad.square().sum().item() for p in parameters if p.grad is not None)


def _check_copies(run: dict[str, Any], reported: list[dict[str, Any]]) -> None:
    """A stage of delay d holds d copies more, and no other holds any.

    Of a weight that stages share, as many as the largest delay of these; stages of one
    device hold it together.
    """
    sizes = {n: p.nbytes for n, p in make_model(run["model"]).named_parameters()}
    devices = reported[: len(reported) // run["num_replicas"]]
    per_device = len(devices[0]["held"])
    stages = [(device, i) for i in range(per_device) for device in devices]
    most: dict[str, int] = {}
    for delay, (device, i) in zip(reported[0]["delays"], stages, strict=True):
        for name in device["held"][i]:
            most[name] = max(delay, most.get(name, 0))
    for device, i in stages:
        held = device["held"][i]
        counted = set(held).difference(*device["held"][:i])
        expected = sum(most[name] * sizes[name] for name in counted)
        own = sum(sizes[name] for name in held)
        assert device["old_copies"][i] == pytest.approx(expected / own), run


def test_wpipe_holds_one_and_a_half_copies() -> None:
    """And PipeDream-2BW two: stages of equal size, by the checker's own count."""
    copies = {}
    for name in ("wpipe", "pipedream-2bw"):
        order = make_schedule(name, num_devices=4, num_microbatches=4, num_steps=6)
        versions = hocket.check(order).num_versions
        copies[name] = sum(versions) / len(versions)
    assert copies == {"wpipe": 1.5, "pipedream-2bw": 2.0}


def test_a_gradient_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    """Its worker names it before it updates; the other one hears of that and ends."""
    reported, other = answers_of("fragile_workers:flush_free", folder=tmp_path)
    kind, message, weights = reported
    assert kind == "NonFiniteError"
    assert (
        "gradients are not: the first at fault on this worker is that of 0.weight"
        in message
    )
    assert f"step {POISONED}" in message
    assert other[0] == "WaitError"
    assert "rank 0 is gone" in other[1]

    model = make_fragile_stages()
    hocket.emulate(
        hocket.Program.chain(range(4), 2, delays=[1, 1, 0, 0]),
        model,
        F.cross_entropy,
        partial(torch.optim.SGD, lr=0.1),
        fragile_batches(8, POISONED)[:POISONED],
        cut_at=FRAGILE_CUT,
    )
    expected = model.get_parameter("0.weight").detach()  # of the steps before
    found = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
