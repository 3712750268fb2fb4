"""A loss that is a module with weights and buffers is trained as a part of the net.

Its weights once stayed as they were, while their gradients piled up from step to step;
and where the optimizer got them, they were updated with the sums of all steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import MetricsError, ModelError
from tests.conformance.script import batches, chain, mse
from tests.run.support.forked import answers_of
from tests.run.support.started import started

NUM_STEPS = 4


class Centred(nn.Module):
    """A layer of its own, and a running centre."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.project = nn.Linear(3, 3).double()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss; move the centre, assigning the buffer anew."""
        found = self.project(output)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * targets.mean(0)
        return (found - targets).square().mean() + self.project.weight.square().sum()


class Apart(Centred):
    """Compares samples with each other: a loss over the whole batch."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss."""
        found = self.project(output)
        return (found.T @ found / len(found) - torch.eye(3)).square().sum()


LOSSES: dict[str, Any] = {
    "centred": Centred,
    "whole": lambda: hocket.WholeBatch(Apart()),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    """It has a state of its own for each weight."""
    return torch.optim.AdamW(parameters, 0.01)


def pipeline(kind: str, options: dict[str, Any]) -> hocket.Pipeline:
    """A pipeline of a net of five layers, in float64."""
    settings = {"num_microbatches": 2, "schedule": "1f1b", **options}
    net, loss = chain().double(), LOSSES[kind]()
    return hocket.Pipeline(net, loss, optimizer=adam, example=batches()[0], **settings)


def state_of(run: hocket.Pipeline, *, ema: bool = False) -> dict[str, Any]:
    """Its weights and buffers."""
    return {name: x.tolist() for name, x in run.state_dict(ema=ema).items()}


def train(kind: str, options: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Train four steps; save after two of them."""
    with pipeline(kind, options) as run:
        for number, batch in enumerate(batches()):
            if folder and number == NUM_STEPS // 2:
                run.save(folder)
            run.step(batch)
        averages = {}
        if "ema_decay" in options:
            averages = {f"ema {n}": x for n, x in state_of(run, ema=True).items()}
        return {**state_of(run), **averages}


def resume(kind: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train the rest, from a checkpoint."""
    with pipeline(kind, options) as run:
        run.load(folder)
        for batch in batches()[NUM_STEPS // 2 :]:
            run.step(batch)
        return state_of(run)


def train_all(cases: list[Any]) -> list[dict[str, Any]]:
    """Train several cases on the same workers."""
    return [train(*given) for given in cases]


def refused_metrics() -> str:
    """Evaluate with a metric that reads all weights; then train."""
    net = chain().double()

    def metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"size": torch.stack([p.norm() for p in net.parameters()]).sum()}

    with hocket.Pipeline(
        net, mse, optimizer=adam, example=batches()[0], num_microbatches=2
    ) as run:
        try:
            run.evaluate(batches()[:1], metrics)
        except MetricsError as error:
            run.step(batches()[0])
            return str(error)
    return ""


WORKERS = __name__


def both(net: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    """The state of a net, and of its loss."""
    own = {f"loss.{name}": x for name, x in loss.state_dict().items()}
    return net.state_dict() | own


def plain(
    kind: str, *, clip: float | None = None, accumulate: int = 1, parts: int = 2
) -> dict[str, Tensor]:
    """The loop over microbatches, with the weights of both in one optimizer."""
    net, loss = chain().double(), Centred() if kind == "centred" else Apart()
    parameters = [*net.parameters(), *loss.parameters()]
    optimizer = adam(parameters)
    averages = [p.detach().clone() for p in parameters]
    for step, (x, y) in enumerate(batches()):
        for own_x, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss(net(own_x), own_y) / parts / accumulate).backward()
        if (step + 1) % accumulate:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averages, [p.detach() for p in parameters], 0.5)
    state = both(net, loss)
    named = zip([n for n in state if n != "loss.centre"], averages, strict=True)
    return state | {f"ema {name}": x for name, x in named}


def assert_equal(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """All that was found, and everything of the state, to rounding."""
    assert found.keys() >= {n for n in expected if not n.startswith("ema ")}
    for name in found.keys() & expected.keys():
        own = torch.tensor(found[name], dtype=torch.float64)
        torch.testing.assert_close(own, expected[name], rtol=1e-10, atol=1e-12)


def test_is_trained_clipped_and_averaged_on_several_workers(tmp_path: Path) -> None:
    """Two stages; two replicas, whose buffers are of their own rows; accumulated."""
    cases = [
        ("centred", {"clip_norm": 0.1, "ema_decay": 0.5}),
        ("centred", {"schedule": "zb-h1", "recompute": "all"}),
        ("centred", {"num_microbatches": 1, "num_replicas": 2}),
        ("whole", {"schedule": "gpipe"}),
        ("whole", {"schedule": "gpipe", "num_replicas": 2, "num_microbatches": 2}),
    ]
    answers = answers_of(f"{WORKERS}:train_all", cases, folder=tmp_path)
    expected = [
        plain("centred", clip=0.1),
        plain("centred"),
        plain("centred"),
        plain("whole", parts=1),
        plain("whole", parts=1),
    ]
    for worker in answers:
        for number, (found, wanted) in enumerate(zip(worker, expected, strict=True)):
            if number == 2:  # the first replica's buffer
                wanted.pop("loss.centre", None)
                found.pop("loss.centre", None)
            assert_equal(found, wanted)


def test_a_checkpoint_holds_them_for_any_number_of_workers(tmp_path: Path) -> None:
    """Saved by one worker, resumed by two, and by one: as if it had never stopped."""
    folder = str(tmp_path / "saved")
    assert_equal(train("centred", {}, folder), plain("centred"))
    assert_equal(resume("centred", {}, folder), plain("centred"))
    for found in answers_of(
        f"{WORKERS}:resume", "centred", {}, folder, folder=tmp_path
    ):
        assert_equal(found, plain("centred"))


def test_old_weights_are_those_of_the_last_stage() -> None:
    """Under 2BW all weights are one update old, those of the loss too."""
    found = train("centred", {"schedule": "pipedream-2bw", "num_microbatches": 4})
    net, loss = chain().double(), Centred()
    parameters = [*net.parameters(), *loss.parameters()]
    optimizer = adam(parameters)
    old: list[Tensor] = []
    for x, y in batches():
        newest = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, value in zip(parameters, old or newest, strict=True):
                p.copy_(value)
        for own_x, own_y in zip(x.chunk(4), y.chunk(4), strict=True):
            (loss(net(own_x), own_y) / 4).backward()
        with torch.no_grad():
            for p, value in zip(parameters, newest, strict=True):
                p.copy_(value)
        old = newest
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(found, both(net, loss))


def test_the_emulator_trains_it_too() -> None:
    """With old weights, and buffers."""
    schedule = hocket.make_schedule(
        "pipedream-2bw", num_devices=2, num_microbatches=4, num_steps=4
    )
    net, loss = chain().double(), Centred()
    hocket.emulate(schedule.program, net, loss, adam, batches(), cut_at=["2"])
    found = train("centred", {"schedule": "pipedream-2bw", "num_microbatches": 4})
    assert_equal(found, both(net, loss))


def test_a_parameter_that_only_a_function_holds() -> None:
    """It is found by the function's code; where weights are old, it is refused."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    net = chain().double()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(scale * output, targets)

    with hocket.Pipeline(
        net, loss, optimizer=adam, example=batches()[0], num_microbatches=2
    ) as run:
        run.step(batches()[0])
        assert run.state_dict()["loss.scale"] != 1.0
    with (
        pytest.raises(ModelError, match=r"let a torch\.nn\.Module hold it"),
        started(
            chain().double(),
            loss,
            adam,
            batches()[0],
            num_microbatches=4,
            schedule="pipedream-2bw",
        ) as refused,
    ):
        refused.step(batches()[0])


def test_constants_of_a_loss_are_not_saved() -> None:
    """The weights of classes are no state: `model.load_state_dict` takes it all."""

    class OfClasses(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]).double())

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return ((output - targets).square() * self.weight).mean()

    net = chain().double()
    with hocket.Pipeline(
        net, OfClasses(), optimizer=adam, example=batches()[0], num_microbatches=2
    ) as run:
        run.step(batches()[0])
        net.load_state_dict(run.state_dict())


def test_a_metric_that_reads_weights_is_refused_on_several_workers(
    tmp_path: Path,
) -> None:
    """Every worker raises it, and can go on."""
    for found in answers_of(f"{WORKERS}:refused_metrics", folder=tmp_path):
        assert "the metrics function reads 0.weight" in found


def test_a_module_that_keeps_tensors_is_named() -> None:
    """Its second forward reads the graph of the first, whose backward has run."""

    class Recurrent(nn.Linear):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            kept = 0.0 if self.state is None else self.state.mean(0)
            self.state = super().forward(x + kept)
            return self.state

    net = chain(nn.Linear(6, 6), Recurrent(6, 6), nn.Linear(6, 8)).double()
    with pytest.raises(ModelError, match=r"It keeps 1\.state from one forward"):
        hocket.Pipeline(
            net, mse, optimizer=adam, example=batches()[0], num_microbatches=2
        )
