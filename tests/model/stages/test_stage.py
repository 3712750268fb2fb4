"""A stage behaves as a module should, whatever is done to its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from hocket.model.stages.cut import cut
from tests.model.support.small_models import bert, gpt2, mlp, vit
from tests.model.support.stages_by_hand import Case, even_cut, worst_difference


class Positions(nn.Module):
    """Adds a table that nothing in training changes, but a checkpoint may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.table.flip(0).expand(x.shape[0], -1)
        return y


class OutputsByMode(nn.Module):
    """Returns losses in training and a score in evaluation, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return {"size": y.square().mean(), "sum": y.sum()} if self.training else y


class AuxiliaryInTraining(OutputsByMode):
    """Returns a second output in training, as Inception networks do."""

    def forward(self, x: Tensor) -> Any:
        aux = torch.tanh(self.first(x))
        y = self.last(aux)
        return (y, aux) if self.training else {"logits": y}


@pytest.mark.parametrize("kind", [OutputsByMode, AuxiliaryInTraining])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_each_mode_has_an_output_of_its_own(
    kind: type[nn.Module], num_stages: int
) -> None:
    """The last stage put what evaluation returns into training's structure."""
    case = Case(kind(), (torch.randn(4, 4),)).double()

    assert worst_difference(case, case.capture(), num_stages) == 0.0


def test_other_weights_can_be_put_in() -> None:
    """As weight versions do, without touching the model's own."""
    for case in (mlp(), gpt2("sdpa")):
        case.model.eval()
        (stage,) = cut(case.capture(), ())
        leaves = [*case.args, *case.kwargs.values()]
        own = [leaves[i] for i in stage.batch_inputs]
        other = {name: p.detach() + 0.1 for name, p in stage.named_parameters()}

        got = torch.func.functional_call(stage, other, tuple(own))

        expected = torch.func.functional_call(case.model, other, case.args, case.kwargs)
        if not isinstance(got, Tensor):
            got, expected = got.logits, expected.logits
        assert torch.equal(got, expected)
        assert not torch.equal(got, stage(*own) if case.args else stage(*own).logits)


def test_a_copy_is_independent() -> None:
    """Other parameters, the same work, tied weights still tied."""
    for case in (mlp(), gpt2("sdpa")):
        (stage,) = cut(case.capture(), ())
        twin = copy.deepcopy(stage)

        assert [name for name, _ in twin.named_parameters()] == [
            name for name, _ in stage.named_parameters()
        ]
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert any(parameter.any() for parameter in stage.parameters())
        leaves = [*case.args, *case.kwargs.values()]
        out = twin.eval()(*(leaves[i] for i in twin.batch_inputs))
        assert not (out if isinstance(out, Tensor) else out.logits).any()


def test_what_is_kept_in_evaluation_serves_training() -> None:
    """Masks made in inference mode cannot be saved for a backward; ours can."""
    case = gpt2("eager")
    (stage,) = cut(case.capture(), ())
    with torch.inference_mode():
        stage.eval()(case.kwargs["input_ids"])
    stage._mode_runs[True].kept.update(stage._mode_runs[False].kept)

    stage.train()(case.kwargs["input_ids"]).logits.sum().backward()

    assert all(parameter.grad is not None for parameter in stage.parameters())


def test_a_loaded_buffer_is_heard() -> None:
    """What is kept is kept for these values of the buffers only."""
    model = Positions()
    x = torch.randn(3, 4)
    (stage,) = cut(capture(model, (x,)), ())
    assert torch.equal(stage(x), model(x))

    stage.load_state_dict({**stage.state_dict(), "table": torch.full((4,), 7.0)})

    assert torch.equal(stage(x), model(x))
    assert torch.equal(model.table, torch.full((4,), 7.0))


def test_few_numbers_of_samples_are_kept() -> None:
    """A loader with ever other sizes must not fill the memory."""
    (stage,) = cut(capture(Positions(), (torch.randn(3, 4),)), ())

    for num_samples in range(1, 50):
        assert stage(torch.zeros(num_samples, 4)).shape == (num_samples, 4)

    assert len(stage._mode_runs[True].kept) <= 8


def test_moving_a_stage_moves_what_it_makes() -> None:
    """Masks and positions are made on the stage's device, not on the capture's."""
    for case in (gpt2("eager"), bert("eager")):
        for stage in even_cut(case.capture(), 3):
            values = [torch.empty(value.shape, device="meta") for value in stage.inputs]
            leaves = [*case.args, *case.kwargs.values()]
            own = [leaves[i].to("meta") for i in stage.batch_inputs]

            out = stage.to("meta")(*values, *own)

            tensors = out if isinstance(out, tuple) else [out.logits]
            assert all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("make", [mlp, lambda: gpt2("sdpa"), lambda: vit("eager")])
def test_autocast_reaches_into_a_stage(make: Callable[[], Case]) -> None:
    """The same operators in bfloat16 as in the uncut model."""
    case = make()
    case.model.eval()
    (stage,) = cut(case.capture(), ())
    leaves = [*case.args, *case.kwargs.values()]
    with torch.autocast("cpu", torch.bfloat16):
        got = stage(*(leaves[i] for i in stage.batch_inputs))
        expected = case.model(*case.args, **case.kwargs)

    if not isinstance(got, Tensor):
        got, expected = got.logits, expected.logits
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


def test_a_traceback_shows_the_stage_s_own_line() -> None:
    """The functions are generated; their source can be read all the same."""
    (stage,) = cut(gpt2("sdpa").capture(), ())

    with pytest.raises(IndexError) as error:
        stage(torch.full((2, 8), 1000))

    entries = [str(entry.statement) for entry in error.traceback]
    assert any("torch.embedding" in entry for entry in entries)


def test_prints_its_place() -> None:
    """In a log one wants to know which stage this is."""
    stages = even_cut(vit("sdpa").capture(), 2)

    assert "1 of 2, receives 1, sends 0" in repr(stages[1])
