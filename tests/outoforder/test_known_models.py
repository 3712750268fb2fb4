"""Models as others have written them, compiled, against their eager step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from tests.outoforder.support.small_steps import (
    OPTIMIZERS,
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
    x = torch.randn(4, 3, SIZE, SIZE, dtype=torch.float64)
    return x, torch.randint(0, 10, (4,))


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
        config = BertConfig(20, 16, 2, 2, 32, max_position_embeddings=8)
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
        self.net = GPT2LMHeadModel(GPT2Config(20, 8, 16, 2, 2))

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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_eager_step(name: str, optimizer: str) -> None:
    """Each loss, and all weights and buffers whose gradient is more than rounding."""
    specimen, make = MODELS[name], OPTIMIZERS[optimizer]
    model, batches = model_of(specimen), batches_of(specimen, NUM_STEPS)
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        losses = train_compiled(step, batches)
        assert step.candidates
    assert losses == pytest.approx(expected, rel=TOLERANCE, abs=0)
    assert difference(model, trained) <= TOLERANCE
