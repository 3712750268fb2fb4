"""What cannot be compiled runs as it is, and a warning says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.model.stages.stage import StageModule
from hocket.run.data.batch import Microbatch
from hocket.run.stage.compiled.function import CompileWarning
from tests.run.stage.compiled.compiling import compile_one
from tests.run.support.small_models import classes

X = torch.randn(4, 6)
PART = Microbatch((X,), torch.tensor([0, 1, 2, 0]), 4)


class Layer(nn.Linear):
    """A linear layer that something is odd about."""

    def __init__(self, odd: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__(6, 6)
        self.odd = odd
        self.num_calls = 0
        self.terms: list[Tensor] = []
        self.means: dict[str, list[Tensor]] = {"all": []}
        self.hidden = (torch.zeros(6), 0)
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return self.odd(self, super().forward(x))


def dropped_at_random(_: Layer, x: Tensor) -> Tensor:
    """Python's own random numbers."""
    return x if random.random() < 0.9 else x * 0.0


def counted(layer: Layer, x: Tensor) -> Tensor:
    """Something else at each call."""
    layer.num_calls += 1
    return x * layer.num_calls


def averaged(layer: Layer, x: Tensor) -> Tensor:
    """A buffer that is another tensor after each call."""
    layer.mean = 0.5 * layer.mean + x.mean(0).detach()
    return x + layer.mean


def averaged_in_place(layer: Layer, x: Tensor) -> Tensor:
    """A buffer that is the same tensor after each call."""
    layer.mean.mul_(0.5).add_(x.mean(0).detach())
    return x + layer.mean


def appended(layer: Layer, x: Tensor) -> Tensor:
    """Terms for a loss to read."""
    layer.terms.append(x.square().mean())
    return x


def appended_inside(layer: Layer, x: Tensor) -> Tensor:
    """One list in another collection."""
    layer.means["all"].append(x.mean())
    return x


def handed_on(layer: Layer, x: Tensor) -> Tensor:
    """From each call to the next, in a tuple."""
    x = x + layer.hidden[0]
    layer.hidden = (x.mean(0).detach(), 0)
    return x


def branched(_: Layer, x: Tensor) -> Tensor:
    """What depends on the values."""
    return x if x.sum() > 0 else -x


def plain(_: Layer, x: Tensor) -> Tensor:
    """Nothing odd."""
    return x


def stage_with(odd: Callable[[Layer, Tensor], Tensor]) -> StageModule:
    """Modules that are run as they are, as the only stage."""
    model = nn.Sequential(Layer(odd), nn.Linear(6, 3))
    (stage,) = cut(capture(model.train(), (X,), capture="sequential"), ())
    return stage


def check_runs_as_it_is(stage: StageModule, why: str, loss: Any = classes) -> None:
    """One warning, the same code as before, and random numbers and notes untouched."""
    code, state = stage.training_code, random.getstate()
    layers = [x for x in stage.modules() if isinstance(x, Layer)]
    noted = [noted_by(x) for x in layers]
    with pytest.warns(
        CompileWarning, match=f"stage 0 is not compiled.*{why}"
    ) as raised:
        compile_one([stage], 0, loss, [PART])
    assert len(raised) == 1
    assert stage.training_code is code
    assert random.getstate() == state
    for before, layer in zip(noted, layers, strict=True):
        after = noted_by(layer)
        assert len(after) == len(before)
        assert all(x is y for x, y in zip(after, before, strict=True))
        assert layer.num_calls == 0
        assert not layer.mean.any()


def noted_by(layer: Layer) -> list[object]:
    """What a layer keeps, one by one."""
    return [*layer.terms, *layer.means["all"], *layer.hidden, layer.mean]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (dropped_at_random, "random numbers that are not torch's"),
        (counted, "Layer changes its own attribute 'num_calls'"),
        (branched, "DataDependent"),
        (averaged, "assigns a new tensor to 'mean', .*self.mean.copy_"),
        (appended, "Layer changes its own attribute 'terms'"),
        (appended_inside, "Layer changes its own attribute 'means'"),
        (handed_on, "Layer changes its own attribute 'hidden'"),
    ],
)
def test_code_that_does_not_always_do_the_same(
    odd: Callable[[Layer, Tensor], Tensor], why: str
) -> None:
    """A graph would do again what it did the first time."""
    check_runs_as_it_is(stage_with(odd), why)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_full_backward_pre_hook"]
)
def test_hooks_on_modules(hook: str) -> None:
    """A graph would not call them."""
    stage = stage_with(plain)
    layer = next(x for x in stage.modules() if isinstance(x, Layer))
    getattr(layer, hook)(lambda *_: None)
    check_runs_as_it_is(stage, "Layer has hooks")


@pytest.mark.timeout(300)
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a host without g++; nothing that was compiled before helps."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        check_runs_as_it_is(stage_with(plain), "compiler")


class TwoOutputs(nn.Module):
    """Of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From x_BW to twice logits_BC."""
        return self.a(x), self.b(x)


def test_a_loss_that_needs_data() -> None:
    """Which outputs it uses is not known then, and so not what must be compiled."""

    def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        scale = 1.0 / max(output[0].abs().max().item(), 1.0)
        return classes(output[0], targets) * scale

    captured = capture(TwoOutputs().train(), (X,), capture="export")
    (stage,) = cut(captured, ())
    check_runs_as_it_is(stage, "2 tensors that want a gradient, and which", loss)


def test_graphs_that_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared with the stage's own code before anybody relies on them."""

    def wrong(module: Any, mode: Any, *, is_backward: bool) -> Any:
        """Returns twice what the graph returns."""
        return lambda inputs: [2 * x for x in module(*inputs)]

    monkeypatch.setattr("hocket.run.stage.compiled.capture.lowered", wrong)
    check_runs_as_it_is(stage_with(plain), "computes something else")


def test_graphs_that_make_something_else_of_a_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is in them afterwards is compared, too, and they are left as they were."""

    def wrong(module: Any, mode: Any, *, is_backward: bool) -> Any:
        """Adds 1 to the first result."""

        def run(inputs: list[Tensor]) -> list[Tensor]:
            first, *others = module(*inputs)
            return [first + 1.0, *others]

        return run

    monkeypatch.setattr("hocket.run.stage.compiled.capture.lowered", wrong)
    monkeypatch.setattr("hocket.run.stage.compiled.lower.lowered", wrong)
    check_runs_as_it_is(stage_with(averaged_in_place), "computes something else")


def test_graphs_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile them would take longer than anybody waits."""
    monkeypatch.setattr("hocket.run.stage.compiled.capture._MOST_NODES", 10)
    check_runs_as_it_is(stage_with(plain), "operators, and compiling more than 10")
