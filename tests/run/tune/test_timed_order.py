"""Orders made for what was measured: alike on every worker, and within the memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.errors import FitError, HocketError
from hocket.run.cluster.world import World, join_world
from hocket.schedules.v_min import RepeatingBubbleWarning
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.started import started

MODULE = "tests.run.tune.test_timed_order"
WIDTH = 48
MESSAGE = 8 * WIDTH * 4  # bytes of a microbatch between two layers


class Slow(nn.Module):
    """Many operators, and no weight but those of a norm: its W takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        for _ in range(24):
            x = torch.sin(x)
        y: Tensor = self.norm(x)
        return y


def linear() -> nn.Sequential:
    """Eight equal layers, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def slow() -> nn.Sequential:
    """Eight layers whose backward is all I."""
    torch.manual_seed(0)
    return nn.Sequential(*(Slow() for _ in range(8)))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples."""
    return nn.functional.mse_loss(output, targets)


def batch(num_samples: int = 32) -> tuple[Tensor, Tensor]:
    """The same on every worker."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    return x, torch.randn(num_samples, WIDTH, generator=generator)


def make(world: World, schedule: str, model: Any = None, **more: Any) -> Any:
    """A pipeline of the linear layers, or of others."""
    return started(
        linear() if model is None else model,
        loss,
        (lambda p: torch.optim.SGD(p, 1e-3)),
        batch(),
        schedule=schedule,
        world=world,
        **{"num_microbatches": 4, **more},
    )


def train(schedule: str, more: dict[str, Any]) -> dict[str, Any]:
    """One step; a worker's entry."""
    torch.set_num_threads(1)
    with make(join_world(), schedule, **more) as pipeline:
        plan = pipeline.plan
        made = str(plan.schedule)
        result = pipeline.step(batch())
        peaks = [pipeline.predicted.peak_bytes(device) for device in (0, 1)]
        return {
            "order": made,
            "name": plan.schedule_name,
            "num_stages": plan.schedule.program.num_stages,
            "loss": result.loss,
            "peaks": peaks,
            "halves_s": [
                [cost.input_grad_s, cost.weight_grad_s] for cost in plan.costs.stages
            ],
            "held": [cost.weight_grad_held_bytes for cost in plan.costs.stages],
        }


def trained(folder: Path, schedule: str, **more: Any) -> dict[str, Any]:
    """What both workers answer, who must agree; the step is that of the plain loop."""
    first, second = answers_of(f"{MODULE}:train", schedule, more, folder=folder)
    assert first == second
    inputs, targets = batch()
    expected = float(loss(linear()(inputs), targets).detach())
    assert abs(first["loss"] - expected) < 1e-6
    return dict(first)


def assert_every_backward(order: str) -> None:
    """Whole or in halves, as measured: of layers as small as these, halves are dear.

    In the first stage, too, a W may stand apart from its I, where times say so.
    """
    for stage in "01":
        num_split = 4 - order.count(f"{stage}B")
        assert order.count(f"{stage}I") == order.count(f"{stage}W") == num_split


def test_zb_auto_is_made_for_what_was_measured(tmp_path: Path) -> None:
    """I and W of each stage, and what W holds; and all play the same."""
    found = trained(tmp_path, "zb-auto", cut=["4"])
    assert found["name"] == "zb-auto"
    assert_every_backward(found["order"])
    assert all(half_s > 0 for pair in found["halves_s"] for half_s in pair)
    # Four layers of a stage: four gradients, and the inputs of all but the first,
    # which on device 1 is a message, and on device 0 the batch.
    assert found["held"] == [7 * 8 * WIDTH * 4] * 2


def memory(recompute: str) -> list[Any]:
    """Refused, then made with the memory that the refusal names; a worker's entry."""
    world = join()
    how = {"recompute": recompute, "cut": ["4"]}
    try:
        make(world, "zb-auto", memory_bytes=1000, **how)
    except FitError as error:
        text, needed = str(error), error.needed_bytes
    # Times are measured again, and decide how many messages lie there at once.
    enough, less = needed + 4 * MESSAGE, needed - 4 * MESSAGE
    with make(world, "zb-auto", memory_bytes=enough, **how) as pipeline:
        peaks = [curve.peak for curve in pipeline.predicted.memory]
        pipeline.step(batch())
        order = str(pipeline.plan.schedule)
    try:
        make(world, "zb-auto", memory_bytes=less, **how)
    except FitError as error:
        return [text, needed, max(peaks), order, str(error)]
    raise AssertionError("an order was made that cannot fit")


def test_a_memory_that_is_too_small_is_refused_with_the_smallest(
    tmp_path: Path,
) -> None:
    """On every worker; with that one an order is made, which keeps to it."""
    answers = answers_of(f"{MODULE}:memory", "none", folder=tmp_path)
    assert answers[0] == answers[1]
    text, needed, peak, order, less = answers[0]
    assert_every_backward(order)
    assert "zb-auto: device" in text
    assert f"The smallest that works is {needed}" in text
    assert peak <= 1.1 * needed  # by times in place, which are others
    assert f"memory_bytes is {needed - 4 * MESSAGE}" in less


def test_all_stages_recompute_where_nothing_else_fits(tmp_path: Path) -> None:
    """With `recompute="auto"` the smallest memory is that of recomputing stages."""
    answers = answers_of(f"{MODULE}:memory", "auto", folder=tmp_path)
    assert answers[0] == answers[1]
    _, needed, peak, order, _ = answers[0]
    assert peak <= 1.1 * needed  # by times in place, which are others
    assert_every_backward(order)


def test_ooo_modulo_chooses_its_groups(tmp_path: Path) -> None:
    """Whatever they are, all workers have the same; the user may say how many."""
    found = trained(tmp_path / "free", "ooo-modulo")
    assert found["num_stages"] in (2, 4, 6, 8)
    given = trained(tmp_path / "given", "ooo-modulo", stages_per_device=3)
    assert given["num_stages"] == 6


def bad_shapes() -> list[list[str]]:
    """Numbers of microbatches that schedules refuse; a worker's entry."""
    world = join()
    reported = []
    for schedule, number, more in (
        ("dualpipe-v", 3, {}),
        ("interleaved-1f1b", 5, {}),
        ("hanayo", 3, {}),
        ("zb-auto", 4, {"stages_per_device": 2}),
    ):
        try:
            make(world, schedule, num_microbatches=number, **more).close()
        except HocketError as error:
            reported.append([type(error).__name__, str(error)])
    return reported


def test_numbers_that_a_schedule_cannot_take(tmp_path: Path) -> None:
    """Refused on every worker, with those that it takes."""
    answers = answers_of(f"{MODULE}:bad_shapes", folder=tmp_path)
    assert answers[0] == answers[1]
    kinds, texts = zip(*answers[0], strict=True)
    assert set(kinds) == {"ShapeError"}
    parts = (
        "dualpipe-v needs as many microbatches as stages, got num_microbatches=3",
        "interleaved-1f1b cannot cut num_microbatches=5 into 2 equal rounds",
        "hanayo takes whole rounds of num_devices=2 microbatches, got num_microbatch",
        "zb-auto puts one stage on each device, got stages_per_device=2",
    )
    assert all(part in text for part, text in zip(parts, texts, strict=True)), texts


def warned() -> list[Any]:
    """V-Min of a model whose W takes nothing; a worker's entry."""
    world = join()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make(world, "v-min", slow(), num_microbatches=8) as pipeline:
            timeline = simulate(pipeline.plan.schedule, pipeline.plan.costs)
            kinds = [op.kind for lane in timeline.schedule.lanes for op in lane.ops]
    texts = [
        str(one.message)
        for one in caught
        if issubclass(one.category, RepeatingBubbleWarning)
    ]
    return [texts, kinds.count(Kind.BACKWARD_INPUT)]


def test_v_min_is_warned_of_by_the_main_worker(tmp_path: Path) -> None:
    """With the measured numbers, where its bubble repeats."""
    (reported, num), (unreported, _) = answers_of(f"{MODULE}:warned", folder=tmp_path)
    assert num == 24  # of 32: whole where no op waits for I
    assert not unreported
    (text,) = reported
    assert "v-min repeats a bubble of" in text
    assert "on 2 devices, since forward (" in text
