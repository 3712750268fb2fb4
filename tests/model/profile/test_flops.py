"""Counting without running: closed forms of FLOPs and bytes, at every batch size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from examples.zoo.text import Gpt
from hocket.core.hardware import load_catalogue
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import Captured
from hocket.model.profile.flops import count_layers
from hocket.model.profile.measure import profile
from hocket.model.profile.work import counted_work, layer_weights
from hocket.planner.work import LayerOps
from hocket.recipes.models.make import Blocks
from hocket.run.stage.split.by_layers import ByLayers

WIDTH = 32


def mlp() -> nn.Sequential:
    """Two linear layers with a ReLU between."""
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
    )


def gpt() -> Gpt:
    """Small, with everything that a GPT has."""
    return Gpt(window_bytes=16, blocks=Blocks(WIDTH, 2, 4, 4 * WIDTH))


def counted(captured: Captured, precision: str = "float32") -> tuple[LayerOps, ...]:
    """The layers' operators."""
    weights = layer_weights(captured, {})
    return count_layers(captured, weights, precision=precision)


@pytest.mark.parametrize("num_samples", [1, 3, 100])
def test_linear_layers_have_their_closed_form(num_samples: int) -> None:
    """2 B I O forward, as much for each gradient; the first layer has no input's."""
    captured = capture(mlp(), (torch.randn(4, WIDTH),))
    layers = counted(captured)
    one = 2 * num_samples * WIDTH * 2 * WIDTH
    assert sum(x.forward.total_flops(num_samples) for x in layers) == 2 * one
    assert sum(x.backward.total_flops(num_samples) for x in layers) == 3 * one
    assert sum(x.input_grad.total_flops(num_samples) for x in layers) == one


def test_counts_are_torchs_own() -> None:
    """Of a whole GPT, but for attention, which it does not know on CPUs."""
    model = gpt()
    batch = torch.randint(0, 256, (4, 16))
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    layers = counted(capture(model, (batch,)))
    ours = sum(x.forward.total_flops(4) + x.backward.total_flops(4) for x in layers)
    attention = 2 * 4 * 14 * 16 * 16 * WIDTH  # blocks, samples; 4 forward, 10 back
    assert ours == counter.get_total_flops() + attention


def test_any_batch_size_lies_on_the_line() -> None:
    """What is counted at 4 and 5 samples foretells 11."""
    model = gpt()
    few = counted(capture(model, (torch.randint(0, 256, (4, 16)),)))
    many = counted(capture(model, (torch.randint(0, 256, (11, 16)),)))
    for a, b in zip(few, many, strict=True):
        assert a.name == b.name
        assert a.backward.total_flops(11) == pytest.approx(b.backward.total_flops(11))
        assert a.activation_bytes.at(11) == b.activation_bytes.at(11)
        assert a.received_bytes.at(11) == b.received_bytes.at(11)


def test_memory_is_what_a_real_run_keeps() -> None:
    """Activations and messages of every layer, byte for byte."""
    model = gpt()
    batch = torch.randint(0, 256, (4, 16))
    captured = capture(model, (batch,))
    real = profile(
        captured, (batch,), device=torch.device("cpu"), make_splitter=ByLayers
    )
    for ours, theirs in zip(counted(captured), real.layers, strict=True):
        assert ours.activation_bytes.at(4) == theirs.activation_bytes
        assert ours.kept_input_bytes.at(4) == theirs.kept_input_bytes
        assert ours.received_bytes.at(4) == theirs.received_bytes
        assert ours.received_grad_bytes.at(4) == theirs.received_grad_bytes


def test_half_precision_halves_messages_and_keeps_flops() -> None:
    """Under autocast; the residual stream of a transformer stays in float32."""
    captured = capture(mlp(), (torch.randn(4, WIDTH),))
    whole, half = counted(captured), counted(captured, "bfloat16")
    assert half[1].received_bytes.at(4) * 2 == whole[1].received_bytes.at(4)
    for a, b in zip(whole, half, strict=True):
        assert a.forward.total_flops(4) == b.forward.total_flops(4)


def test_nothing_is_run_or_changed() -> None:
    """Neither weights nor gradients nor statistics, nor the next random number."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
    )
    captured = capture(model, (torch.randn(4, 8),))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    counted(captured)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
        assert type(x) is Tensor


def test_a_model_without_memory_is_counted() -> None:
    """On the meta device: ten thousand times too large for this test otherwise."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**17, 2**17), nn.Linear(2**17, 2**17))
    captured = capture(model, (torch.randn(2, 2**17, device="meta"),))
    layers = counted(captured)
    assert sum(x.forward.total_flops(1) for x in layers) == 4 * 2**34
    assert layers[0].weights[0].num_bytes == 4 * 2**34


def test_the_loss_is_part_of_the_last_layer() -> None:
    """And where it cannot do without data, the sum of the outputs stands for it."""
    captured = capture(mlp(), (torch.randn(4, WIDTH),))
    weights = layer_weights(captured, {})

    def square(output: Tensor, size: int) -> Tensor:
        return functional.mse_loss(output, torch.zeros(size, WIDTH))

    def looks(output: Tensor, size: int) -> Tensor:
        return output.sum() if float(output.detach().sum()) > 0 else output.mean()

    plain = count_layers(captured, weights)
    squared = count_layers(captured, weights, finish=square)
    looking = count_layers(captured, weights, finish=looks)
    assert squared[-1].forward.num_bytes.sum() > plain[-1].forward.num_bytes.sum()
    assert looking[-1].forward.num_bytes.sum() == plain[-1].forward.num_bytes.sum()


def test_a_faster_device_is_faster() -> None:
    """And none is faster than its host starts operators."""
    captured = capture(gpt(), (torch.randint(0, 256, (4, 16)),))
    known = load_catalogue()
    seconds = []
    for name in ("titan-xp", "v100-16g", "a100-40g", "h100"):
        work = counted_work(captured, known.device(name), {})
        seconds.append(sum(x.forward_s + x.backward_s for x in work.layers(4096)))
    assert seconds == sorted(seconds, reverse=True)
    work = counted_work(captured, known.device("h100"), {})
    num_ops = sum(layer.forward.flops.shape[1] for layer in work.ops)
    assert sum(x.forward_s for x in work.layers(1)) == pytest.approx(
        num_ops * known.device("h100").op_s, rel=0.05
    )
