"""LSTMs in a compiled step: as steps in time, and as the device's fused kernels."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

import hocket
from hocket.core.footprint import plan_memory
from hocket.core.op import Kind
from hocket.passes.serial import serial
from hocket.run.outoforder.capture.captured_step import capture_variants
from hocket.run.outoforder.capture.lstm import (
    FUSED_LSTM,
    RnnTracing,
    lstm,
    lstm_backward,
)
from hocket.run.outoforder.capture.regions import RegionKey
from tests.run.outoforder.support.played_orders import (
    TrainedByHand,
    checked_device,
    free_device,
    random_order,
)
from tests.run.outoforder.support.small_steps import (
    OPTIMIZERS,
    Specimen,
    batches_of,
    loss,
    train_compiled,
    train_eagerly,
)

NUM_STEPS: Final = 6
ROUNDING: Final = 1e-5  # of float32, after some steps
FUSED_ROUNDING: Final = 8 * torch.finfo(torch.float32).eps


class Tagger(nn.Module):
    """Two layers of LSTM on the batch itself, in both directions, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, dropout=dropout, bidirectional=True)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of each step in time."""
        out: Tensor = self.last(self.lstm(x)[0])
        return out


def sequences() -> tuple[Any, Any]:
    """Four steps in time of five samples."""
    return torch.randn(4, 5, 8), torch.randint(0, 4, (4, 5))


SPECIMEN: Final = Specimen(lambda: Tagger(0.3), sequences)


def tagger(dropout: float = 0.3) -> nn.Module:
    """In float32, for which a CPU has fused kernels."""
    torch.manual_seed(1)
    return Tagger(dropout)


@pytest.mark.parametrize("batch_first", [False, True])
def test_kernels_compute_what_eager_mode_computes(*, batch_first: bool) -> None:
    """The fused ones within some units in the last place; the steps within rounding.

    On processors without AVX-512 the fused ones do not give the same bits.
    """
    torch.manual_seed(0)
    net = nn.LSTM(5, 7, 2, batch_first=batch_first, bidirectional=True)
    x = torch.randn(4, 3, 5, requires_grad=True)

    def gradients() -> list[Tensor]:
        y, (h, c) = net(x)
        value = y.sin().sum() + h.cos().sum() + c.square().sum()
        return [y.detach(), *torch.autograd.grad(value, [x, *net.parameters()])]

    expected = gradients()
    with RnnTracing(fuses=True):
        fused = gradients()
    with RnnTracing(fuses=False):
        stepped = gradients()
    for found, other in zip(fused, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=FUSED_ROUNDING, atol=1e-7)
    for found, other in zip(stepped, expected, strict=True):
        torch.testing.assert_close(found, other)


def test_a_fused_layer_is_one_operator_forwards_and_one_backwards() -> None:
    """No W is split off from an I; the first layer needs no dx, and has W alone."""
    model, batch = tagger(0.0), sequences()
    plain, fused = capture_variants(
        model, loss, OPTIMIZERS["AdamW"]([*model.parameters()]), batch
    )
    assert (plain.kernels, fused.kernels) == ("plain", "fused LSTM")
    graph = fused.regions.step.graph
    backward = torch.ops.hocket.lstm_backward.default
    for target in (FUSED_LSTM, backward):
        assert len(graph.find_nodes(op="call_function", target=target)) == 4
        assert not plain.regions.step.graph.find_nodes(
            op="call_function", target=target
        )
    for place, nodes in fused.regions.nodes.items():
        if any(node.target is backward for node in nodes):
            wanted = Kind.BACKWARD_WEIGHT if place.unit < 2 else Kind.BACKWARD_INPUT
            assert place.kind is wanted
    assert fused.regions.program.num_stages == 5
    assert set(fused.updates) == set(range(5))
    assert RegionKey(Kind.BACKWARD_WEIGHT, 0) in plain.regions.nodes


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.long), 1])
def test_measures_both_and_trains_what_eager_mode_trains(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Each one's serial order is a candidate; here each of them is played."""
    monkeypatch.setattr(
        "hocket.run.outoforder.captured_orders.faster_kernels",
        lambda chosen, device: place,
    )
    batches = batches_of(SPECIMEN, NUM_STEPS)
    model, make = tagger(0.0), OPTIMIZERS["SGD"]
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        losses = train_compiled(step, batches)
        tried = {(one.name, one.kernels) for one in step.candidates}
        assert step.candidates[0].kernels == ("plain", "fused LSTM")[place]
    assert tried >= {("serial", "plain"), ("serial", "fused LSTM")}
    assert losses == pytest.approx(expected, rel=ROUNDING)
    for found, other in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(found, other)


def test_fused_orders_equal_their_serial_order_and_keep_the_predicted_memory() -> None:
    """Bit for bit, with dropout between the layers; what the backward keeps counts."""
    one = TrainedByHand(
        tagger(), OPTIMIZERS["AdamW"], batches_of(SPECIMEN, 3), fuses_lstm=True
    )
    expected = one.play(serial(one.program), free_device(1))
    for seed in range(3):
        order = random_order(one.program, Random(seed))
        found = one.play(order, checked_device(len(order.lanes), seed))
        assert all(torch.equal(found[x], expected[x]) for x in expected), seed
    plan = plan_memory(serial(one.program), one.footprint())
    assert one.allocated_bytes(plan) == pytest.approx(plan.peak_bytes, rel=0.05)


def test_a_model_without_lstm_is_captured_once() -> None:
    """And so is one whose numbers have no fused kernels here: float64 on a CPU."""
    plain = nn.Linear(8, 4)
    (step,) = capture_variants(
        plain, loss, torch.optim.SGD(plain.parameters()), sequences()
    )
    assert step.kernels == "plain"
    double, (x, y) = tagger().double(), sequences()
    assert (
        len(
            capture_variants(
                double, loss, OPTIMIZERS["SGD"](double.parameters()), (x.double(), y)
            )
        )
        == 1
    )


def test_packed_sequences_are_not_fused() -> None:
    """Torch calls the same function with other arguments."""
    torch.manual_seed(0)
    net = nn.LSTM(8, 6)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 8), torch.randn(2, 8)])
    expected, _ = net(packed)
    with RnnTracing(fuses=True):
        found, _ = net(packed)
    torch.testing.assert_close(found.data, expected.data)


def test_an_error_of_the_fused_kernels_leaves_the_steps_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says what it was."""

    def failing(*_: object) -> None:
        raise IndexError("no such kernel")

    monkeypatch.setattr("hocket.run.outoforder.capture.lstm._fused", failing)
    model = tagger(0.0)
    (step,) = capture_variants(
        model, loss, OPTIMIZERS["SGD"](model.parameters()), sequences()
    )
    assert step.kernels == "plain"
    assert "not tried, capturing them failed: " in caplog.text
    assert "IndexError: no such kernel" in caplog.text


def test_a_gpu_gets_one_call_for_all_layers_and_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With arguments of the types that torch's cuDNN operators take, on no GPU."""
    calls: list[str] = []

    def checked(operator: OpOverload, results: Any) -> Any:
        types = {x.name: str(x.type) for x in operator._schema.arguments}

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(operator._schema.name)
            by_place = dict(zip(types, args, strict=False))  # the first ones
            assert types.keys() == by_place.keys() | kwargs.keys()
            assert by_place.keys().isdisjoint(kwargs)
            for name, given in {**by_place, **kwargs}.items():
                assert _fits(types[name], given), name
            return results

        return call

    like = nn.LSTM(8, 6, 2, bidirectional=True)
    shapes = [weight.shape for weight in like.parameters()]
    with FakeTensorMode(), torch.no_grad():  # autograd's streams would need a GPU
        gpu = torch.device("cuda")
        x = torch.empty(7, 5, 8, device=gpu)
        state = [torch.zeros(4, 5, 6, device=gpu) for _ in range(2)]
        weights = [torch.empty(s, device=gpu) for s in shapes]
        with RnnTracing(fuses=True):
            y, h, c = torch.lstm(
                x,
                state,
                weights,
                True,
                2,
                0.0,
                True,
                True,
                False,
            )
        assert (y.shape, h.shape, c.shape) == ((7, 5, 12), (4, 5, 6), (4, 5, 6))
        made = [y, h, c]
        saved = [x.new_empty(9, dtype=torch.uint8), x.new_empty(9)]
        aten = torch.ops.aten
        backward = [x, *state, [weight.clone() for weight in weights]]
        cudnn = SimpleNamespace(
            _cudnn_rnn=checked(aten._cudnn_rnn.default, [*made, *saved]),
            _cudnn_rnn_backward=checked(aten._cudnn_rnn_backward.default, backward),
        )
        flatten = checked(aten._cudnn_rnn_flatten_weight.default, saved[1])
        monkeypatch.setattr("hocket.run.outoforder.capture.lstm._aten", cudnn)
        monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten)
        given = x, *state, weights, True
        assert lstm._init_fn(*given)[3] == saved
        assert len(lstm_backward._init_fn(*given, made, saved, made)) == 3 + len(shapes)
    assert calls == [
        "aten::_cudnn_rnn_flatten_weight",
        "aten::_cudnn_rnn",
        "aten::_cudnn_rnn_backward",
    ]


def _fits(kind: str, given: Any) -> bool:
    """Return whether a value is of a type of torch's schemas."""
    if kind.startswith("Optional["):
        return given is None or _fits(kind[9:-1], given)
    if kind.startswith("List["):
        return isinstance(given, list) and all(_fits(kind[5:-1], x) for x in given)
    types = {"Tensor": Tensor, "int": int, "SymInt": int, "float": float, "bool": bool}
    is_bool = isinstance(given, bool)
    return isinstance(given, types[kind]) and is_bool == (kind == "bool")
