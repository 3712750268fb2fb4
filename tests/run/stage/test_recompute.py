"""Stages that recompute their forwards come to the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import hocket
from hocket.model.capture.capture import capture
from hocket.model.profile.allocations import allocations
from hocket.model.stages.cut import cut
from hocket.run.data.batch import Microbatch
from hocket.run.data.loss import LossFunction
from hocket.run.stage.runner import StageRunner
from tests.run.support.comparison import case, check_run, in_few_steps
from tests.run.support.forked import answers_of
from tests.run.support.plain_loop import make_optimizer
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.support.started import started

CPU: Final = torch.device("cpu")


JOBS = {
    1: in_few_steps(case("resnet", "gpipe", 3), case("tied-dropout", "1f1b", 4)),
    2: [
        case("tied-dropout", "interleaved-1f1b", 4),
        *in_few_steps(
            case("resnet", "1f1b", 3),
            case("dropout", "looped-bfs", 4),
            case("tied", "gpipe", 2, num_replicas=2),
        ),
    ],
    4: in_few_steps(case("dropout", "1f1b", 4, num_replicas=2)),
}


@pytest.mark.parametrize("num_workers", sorted(JOBS))
@pytest.mark.timeout(240)
def test_is_exact(num_workers: int, tmp_path: Path) -> None:
    """Equal to the plain loop, and to the last bit to a run that keeps everything.

    With BatchNorm, dropout, tied weights, replicas and several stages per device.
    """
    cases = JOBS[num_workers]
    runs = [
        {**run, "recompute": recompute}
        for run in cases
        for recompute in ("none", "all")
    ]
    answers = answers_of(
        "exactness:train_all",
        runs,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
        whole_s=200.0,
    )

    for i in range(0, len(runs), 2):
        kept, again = ([worker[j] for worker in answers] for j in (i, i + 1))
        assert [a["losses"] for a in again] == [a["losses"] for a in kept]
        assert [a["boundaries"] for a in again] == [a["boundaries"] for a in kept]
        expected, actual = (load_file(tmp_path / f"{j}.st") for j in (i, i + 1))
        assert sorted(actual) == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), f"{runs[i]}: {name}"
        check_run(runs[i + 1], again, tmp_path / f"{i + 1}.st")


class Counting(nn.Module):
    """Its forward reads a buffer, and changes it: no two runs of it are the same."""

    count: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last.copy_(self.last / 2 + x.detach().mean(0))
        return torch.tanh(self.linear(x)) * self.count.clone() + self.last


class Deep(nn.Module):
    """Operators that have several kernels, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.lstm(x)[0])
        return found


def noisy(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that draws random numbers of its own."""
    return F.mse_loss(output + torch.randn_like(output), targets)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(Counting(), nn.Linear(5, 5), Counting()), (4, 5)),
        (Counting, (4, 5)),
        (lambda: nn.Sequential(Deep()), (3, 6, 8)),
    ],
)
def test_three_microbatches_on_their_way(make: Any, shape: tuple[int, ...]) -> None:
    """Each forward runs again as it ran, whatever ran in between."""
    results = []
    for recomputes in (False, True):
        torch.manual_seed(5)
        model = make()
        parts = [_part(shape, seed) for seed in range(3)]
        runner = make_runner(model, parts[0], noisy, recomputes=recomputes)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for m, part in enumerate(parts):
                runner.forward(0, m, part, (), 1 / 3)
            states = [torch.get_rng_state()]
            for m in (0, 2, 1):
                runner.backward(0, m, ())
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        results.append((runner, dict(model.named_buffers())))

    (kept, old), (again, new) = results
    for name, parameter in kept.parameters.items():
        assert parameter.grad is not None
        grad = again.parameters[name].grad
        assert grad is not None
        assert torch.equal(grad, parameter.grad), name
    assert old.keys() == new.keys()
    assert all(torch.equal(new[name], value) for name, value in old.items())
    assert again.loss.values.read() == kept.loss.values.read()


def test_statistics_are_updated_once() -> None:
    """A BatchNorm's running mean and count see each microbatch one time."""
    model = make_model("resnet")
    (batch,) = batches("resnet", 1, 8, 8)
    part = Microbatch((batch[0],), batch[1], 8)
    runner = make_runner(model, part, ZOO["resnet"].loss, recomputes=True)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]

    runner.forward(0, 0, part, (), 1.0)
    means = [norm.running_mean for norm in norms]
    values = [mean.clone() for mean in means if mean is not None]
    runner.backward(0, 0, ())

    for norm, mean, value in zip(norms, means, values, strict=True):
        assert norm.num_batches_tracked == 1
        assert norm.running_mean is mean
        assert mean is not None
        assert torch.equal(mean, value)


def test_a_forward_leaves_next_to_nothing() -> None:
    """Whatever it computes, it keeps less than its input between F and B."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in "abcd")
    )
    part = _part((256, 64), 0)
    left = {}
    for recomputes in (False, True):
        runner = make_runner(model, part, F.mse_loss, recomputes=recomputes)
        with allocations(CPU) as log, log.span():
            runner.forward(0, 0, part, (), 1.0)
        (left[recomputes],) = log.left

    assert left[False] >= 4 * part.leaves[0].nbytes
    assert left[True] < part.leaves[0].nbytes // 4


def test_a_stage_without_backward_runs_once() -> None:
    """Where nothing is trained and no gradient flows, there is nothing to recompute."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    part = _part((3, 4), 0)
    first, _ = cut(capture(model, part.leaves), (1,))
    runner = StageRunner(0, first, None, device=CPU, seed=0, recomputes=True)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))

    runner.forward(0, 0, part, (), 1.0)

    assert not runner.live
    assert runner.backward(0, 0, ()) == ()
    assert len(calls) == 1


def make_runner(
    model: nn.Module, part: Microbatch, loss: LossFunction, *, recomputes: bool
) -> StageRunner:
    """The whole model as one stage."""
    (module,) = cut(capture(model.train(), part.leaves), ())
    return StageRunner(0, module, loss, device=CPU, seed=3, recomputes=recomputes)


def _part(shape: tuple[int, ...], seed: int) -> Microbatch:
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=rng) for _ in "xy")
    return Microbatch((x,), y, shape[0])


def test_auto_fits_the_memory_it_is_given() -> None:
    """One worker: with room for everything nothing recomputes, with less all does."""
    (batch,) = batches("resnet", 1, 12, 12)
    peaks = {}
    for recompute in ("none", "all"):
        with _pipeline(batch, recompute=recompute) as pipeline:
            peaks[recompute] = int(pipeline.predicted.peak_bytes(0))

    for memory_bytes, recomputes in ((peaks["none"], False), (peaks["all"], True)):
        with _pipeline(batch, recompute="auto", memory_bytes=memory_bytes) as pipeline:
            (cost,) = pipeline.plan.costs.stages
            assert cost.recomputes is recomputes
            assert pipeline.predicted.peak_bytes(0) <= memory_bytes
    with pytest.raises(hocket.HocketError, match=rf"works is {peaks['all']}"):
        _pipeline(batch, recompute="auto", memory_bytes=peaks["all"] - 1)


def _pipeline(batch: Any, **settings: Any) -> hocket.Pipeline:
    return started(
        make_model("resnet"),
        ZOO["resnet"].loss,
        make_optimizer,
        batch,
        schedule="gpipe",
        num_microbatches=4,
        **settings,
    )
