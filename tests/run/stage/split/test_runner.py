"""A stage's I and W leave the gradients of its backwards, bit for bit.

With several microbatches on their way, accumulation, dropout, BatchNorm, autocast, and
forwards that run once more.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from hocket.model.stages.splitter import MakeSplitter
from hocket.run.data.batch import Microbatch, split_batch
from hocket.run.stage.compiled.function import make_splitter
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.by_layers import ByLayers
from tests.in_turns import in_turns
from tests.run.support.comparison import difference
from tests.run.support.small_models import ZOO, batches, make_model
from tests.run.support.split_by_graph import ByGraph

CPU = torch.device("cpu")
NUM = 3


def parts_of(name: str) -> tuple[Microbatch, ...]:
    """Microbatches, the last one smaller."""
    (batch,) = batches(name, 1, 8, 8)
    return split_batch(batch, NUM)


def runner_of(
    name: str,
    make_splitter: MakeSplitter = make_splitter,
    *,
    recomputes: bool = False,
    precision: Precision = Precision.FLOAT32,
) -> StageRunner:
    """The whole model as one stage."""
    model, args = make_model(name), parts_of(name)[0].leaves
    if precision is not Precision.FLOAT32:
        model, args = model.float(), short(parts_of(name)[0]).leaves
    if name.startswith("tied"):
        captured = capture(
            model.train(), (), dict(zip(("tokens", "mask"), args, strict=False))
        )
    else:
        captured = capture(model.train(), args)
    (module,) = cut(captured, ())
    return StageRunner(
        0,
        module,
        ZOO[name].loss,
        device=CPU,
        seed=3,
        precision=precision,
        recomputes=recomputes,
        make_splitter=make_splitter,
    )


def short(part: Microbatch) -> Microbatch:
    """In float32, for autocast."""
    leaves = [x.float() if x.is_floating_point() else x for x in part.leaves]
    return Microbatch(tuple(leaves), part.targets, part.num_samples)


def grads_of(runner: StageRunner) -> dict[str, Tensor | None]:
    """By name."""
    return {name: p.grad for name, p in runner.parameters.items()}


def assert_close(a: StageRunner, b: StageRunner, tolerance: float = 0.0) -> None:
    """Gradients and buffers of `b` are those of `a`."""
    expected = grads_of(a)
    for name, grad in grads_of(b).items():
        other = expected[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert difference(grad, other) <= tolerance, name
    for x, y in zip(a.module.buffers(), b.module.buffers(), strict=True):
        assert difference(y, x) <= tolerance


@pytest.mark.parametrize(
    ("name", "recomputes", "make_splitter"),
    in_turns(["dropout", "resnet", "tied-dropout"], [False, True], [ByLayers, ByGraph]),
)
def test_three_microbatches_on_their_way(
    name: str, recomputes: bool, make_splitter: MakeSplitter
) -> None:
    """Twice, so that gradients add up to those that are there."""
    parts = parts_of(name)
    whole = runner_of(name)
    split = runner_of(name, make_splitter, recomputes=recomputes)
    for step in (0, 1):
        for m, part in enumerate(parts):
            whole.forward(step, m, part, (), 1 / NUM)
            split.forward(step, m, part, (), 1 / NUM, splits=m != 1)
        for m in range(NUM):
            whole.backward(step, m, ())
        split.input_gradients(step, 0, ())[1].finish()
        split.backward(step, 1, ())  # one of them whole
        split.input_gradients(step, 2, ())[1].finish()

    assert_close(whole, split)
    assert whole.loss.values.read() == split.loss.values.read()
    assert not split.live


@pytest.mark.parametrize("name", ["dropout", "resnet"])
def test_all_weights_at_the_end(name: str) -> None:
    """W in the order of the microbatches, though their backwards came otherwise."""
    parts = parts_of(name)
    whole, split = runner_of(name), runner_of(name)
    for runner in (whole, split):
        for m, part in enumerate(parts):
            runner.forward(0, m, part, (), 1 / NUM, splits=runner is split)
    for m in (0, 1, 2):
        whole.backward(0, m, ())
    left = {m: split.input_gradients(0, m, ())[1] for m in (2, 0, 1)}
    for m in range(NUM):
        left[m].finish()

    others = {n for n, p in split.parameters.items() if p.dim() == 1}
    expected, actual = grads_of(whole), grads_of(split)
    for path in expected.keys() - others:
        a, b = actual[path], expected[path]
        assert a is not None
        assert b is not None
        assert torch.equal(a, b), path


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["resnet", "tied-dropout"])
def test_hooks_hear_each_microbatch_once_with_all_of_it(
    name: str, recomputes: bool
) -> None:
    """Of a tied weight, too: what is added up so far, as autograd's hooks get it."""
    reported: list[dict[str, list[Tensor]]] = []
    for splits in (False, True):
        runner = runner_of(name, recomputes=recomputes)
        heard: dict[str, list[Tensor]] = {}
        for path, parameter in runner.parameters.items():
            note = partial(_note, heard.setdefault(path, []))
            parameter.register_post_accumulate_grad_hook(note)
        for m, part in enumerate(parts_of(name)):
            runner.forward(0, m, part, (), 1 / NUM, splits=splits)
        for m in range(NUM):
            if splits:
                runner.input_gradients(0, m, ())[1].finish()
            else:
                runner.backward(0, m, ())
        reported.append(heard)

    expected, actual = reported
    assert {len(grads) for grads in expected.values()} <= {0, NUM}
    for path, grads in expected.items():
        assert len(actual[path]) == len(grads), path
        assert all(map(torch.equal, actual[path], grads)), path


def _note(heard: list[Tensor], parameter: Tensor) -> None:
    assert parameter.grad is not None
    heard.append(parameter.grad.clone())


@pytest.mark.parametrize("name", ["dropout", "resnet"])
def test_under_autocast(name: str) -> None:
    """Weights in float32, everything else in bfloat16."""
    parts = [short(part) for part in parts_of(name)]
    whole = runner_of(name, precision=Precision.BFLOAT16)
    split = runner_of(name, precision=Precision.BFLOAT16)
    for m, part in enumerate(parts):
        whole.forward(0, m, part, (), 1 / NUM)
        split.forward(0, m, part, (), 1 / NUM, splits=True)
    left = []
    for m in range(NUM):
        whole.backward(0, m, ())
        left.append(split.input_gradients(0, m, ())[1])
    for waiting in left:
        waiting.finish()

    for path, grad in grads_of(whole).items():
        other = grads_of(split)[path]
        assert grad is not None
        assert other is not None
        assert torch.allclose(other, grad, rtol=1e-6, atol=1e-8), path


def test_a_stage_that_only_hands_gradients_on() -> None:
    """Nothing of it is trained, but what stands before it is."""
    model = make_model("perceptron")
    assert isinstance(model, nn.Sequential)
    model[3:].requires_grad_(requires_grad=False)
    part = parts_of("perceptron")[0]
    first, second = cut(capture(model.train(), part.leaves), (3,))
    loss = ZOO["perceptron"].loss
    front = StageRunner(0, first, None, device=CPU, seed=0)
    back = StageRunner(1, second, loss, device=CPU, seed=0)
    sent = front.forward(0, 0, part, (), 1.0, splits=True)
    back.forward(0, 0, part, sent, 1.0, splits=True)
    grads, left = back.input_gradients(0, 0, ())
    left.finish()
    _, left = front.input_gradients(0, 0, grads)
    left.finish()

    assert all(p.grad is None for p in back.parameters.values())
    assert all(p.grad is not None for p in front.parameters.values())
