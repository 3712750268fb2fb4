"""Models as others have written them, compiled, against their eager step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.core.footprint import plan_memory
from hocket.passes.serial import serial
from tests.run.outoforder.support.played_orders import TrainedByHand
from tests.run.outoforder.support.small_steps import (
    TOLERANCE,
    Language,
    Specimen,
    batches_of,
    difference,
    loss,
    model_of,
    tokens,
    train_compiled,
    train_eagerly,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_STEPS: Final = 20
SIZE: Final = 32  # pixels


def images() -> tuple[Tensor, Tensor]:
    """Images of ten classes."""
    x = torch.randn(8, 3, SIZE, SIZE, dtype=torch.float64)
    return x, torch.randint(0, 10, (8,))


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return what makes a small net of torchvision."""

    def make() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(num_classes=10, **options)
        return model

    return make


class Bert(nn.Module):
    """Two layers of BERT, and their predictions of tokens."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        config = BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=8,
        )
        self.net = BertForMaskedLM(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.net(input_ids=x).logits
        return out


class Gpt(nn.Module):
    """Two layers of GPT-2, with a tied embedding."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2
        )
        self.net = GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.net(input_ids=x, use_cache=False).logits
        return out


def deep() -> nn.Module:
    """Sixteen linear layers."""
    layers = [nn.Linear(16, 16) for _ in range(16)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), *layers)


MODELS: Final = {
    "densenet, growth 12": Specimen(
        vision("DenseNet", growth_rate=12, block_config=(2, 3, 3, 2), drop_rate=0.1),
        images,
    ),
    "densenet121": Specimen(vision("densenet121"), images),
    "mobilenet_v3_small": Specimen(vision("mobilenet_v3_small"), images),
    "mobilenet_v3_large": Specimen(vision("mobilenet_v3_large"), images),
    "resnet18": Specimen(vision("resnet18"), images),
    "resnet50": Specimen(vision("resnet50"), images),
    "bert": Specimen(Bert, tokens),
    "gpt": Specimen(Gpt, tokens),
    "rnn": Specimen(lambda: Language(nn.RNN(8, 8, 2, batch_first=True)), tokens),
    "gru": Specimen(lambda: Language(nn.GRU(8, 8, 2, batch_first=True)), tokens),
    "feed-forward": Specimen(deep, images),
}

# With small rates: in a net with BatchNorm on eight samples, larger ones make of a
# difference in the last digit another net within 20 steps.
OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-6, eps=1e-6),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_eager_step(name: str, optimizer: str) -> None:
    """Each loss, and all weights and buffers."""
    specimen, make = MODELS[name], OPTIMIZERS[optimizer]
    model, batches = model_of(specimen), batches_of(specimen, NUM_STEPS)
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        losses = train_compiled(step, batches)
        assert step.candidates
    assert losses == pytest.approx(expected, rel=TOLERANCE, abs=0)
    assert difference(model, trained) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_takes_the_memory_that_is_predicted(name: str) -> None:
    """The serial order, within 5 %, by the allocator's own count."""
    specimen = MODELS[name]
    one = TrainedByHand(
        model_of(specimen), OPTIMIZERS["AdamW"], batches_of(specimen, 2)
    )
    plan = plan_memory(serial(one.program), one.footprint())
    assert one.allocated_bytes(plan) == pytest.approx(plan.peak_bytes, rel=0.05)
