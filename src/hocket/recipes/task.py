"""A recipe's model, data, loss and metrics, made real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Final, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import DataError
from hocket.recipes.digits import NUM_CHANNELS, NUM_CLASSES, load_digits
from hocket.recipes.gpt import Gpt, generate
from hocket.recipes.recipe import (
    DIGITS_SIDE,
    DigitsSettings,
    GptSettings,
    Recipe,
    TextSettings,
    TransformerSettings,
    VitSettings,
)
from hocket.recipes.samples import Samples
from hocket.recipes.text import load_text
from hocket.recipes.transformer import Blocks
from hocket.recipes.vit import Pooling, VisionTransformer

PROMPT: Final = b"\n"

Scorer = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to a scalar mean
Metrics = Callable[[Tensor, Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Task:
    """What there is to train.

    Args:
        model: freshly initialised from the recipe's seed.
        training: samples to train on.
        evaluation: samples to evaluate on.
        loss: the mean over samples.
        metrics: named means over samples; the first is what the task is about.
    """

    model: nn.Module
    training: Samples
    evaluation: Samples
    loss: Scorer
    metrics: Metrics


def make_task(recipe: Recipe) -> Task:
    """Load the data and make the model.

    Raises:
        DataError: the data are missing or too few for the recipe's batches.
    """
    training, evaluation = load_samples(recipe)
    _check_enough(training, recipe)
    model = make_model(recipe)
    match recipe.data:
        case DigitsSettings():
            return Task(model, training, evaluation, digit_loss, digit_metrics)
        case TextSettings():
            return Task(model, training, evaluation, byte_loss, byte_metrics)
        case _:
            assert_never(recipe.data)


def load_samples(recipe: Recipe) -> tuple[Samples, Samples]:
    """The samples for training and for evaluation.

    Raises:
        DataError: the data are missing, or too few to be split.
    """
    match recipe.data:
        case DigitsSettings() as digits:
            return load_digits(digits.test_fraction, digits.shift_probability)
        case TextSettings() as text:
            return load_text(
                Path(text.path), text.window_bytes, text.validation_fraction
            )
        case _:
            assert_never(recipe.data)


def check_data(recipe: Recipe) -> None:
    """Refuse data of the user's that will not do, before any worker starts.

    Reads no data that hocket's own packages bring: these take a second to load, and
    each worker checks them again.

    Raises:
        DataError: as `make_task`.
    """
    if isinstance(recipe.data, TextSettings):
        training, _ = load_samples(recipe)
        _check_enough(training, recipe)


def make_model(recipe: Recipe) -> nn.Module:
    """The recipe's model, with the weights that its seed gives."""
    torch.manual_seed(recipe.training.seed)
    match recipe.model, recipe.data:
        case VitSettings() as vit, DigitsSettings():
            return VisionTransformer(
                image_side=DIGITS_SIDE,
                num_channels=NUM_CHANNELS,
                num_classes=NUM_CLASSES,
                patch_size=vit.patch_size,
                pooling=Pooling(vit.pooling),
                blocks=_blocks(vit),
            )
        case GptSettings() as gpt, TextSettings() as text:
            return Gpt(
                window_bytes=text.window_bytes,
                tie_weights=gpt.tie_weights,
                blocks=_blocks(gpt),
            )
    raise AssertionError("the recipe's validation lets no other pair pass")


def byte_loss(score_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Mean cross-entropy over all bytes of all windows, in nats per byte."""
    return functional.cross_entropy(score_BTV.flatten(0, 1), target_BT.flatten())


def byte_metrics(score_BTV: Tensor, target_BT: Tensor) -> dict[str, Tensor]:
    """How many bits each byte costs, and how many are guessed right."""
    return {
        "bits_per_byte": byte_loss(score_BTV, target_BT) / log(2),
        "accuracy": (score_BTV.argmax(-1) == target_BT).float().mean(),
    }


def digit_loss(score_BK: Tensor, label_B: Tensor) -> Tensor:
    """Mean cross-entropy over all images, in nats."""
    return functional.cross_entropy(score_BK, label_B)


def digit_metrics(score_BK: Tensor, label_B: Tensor) -> dict[str, Tensor]:
    """The share of images whose class is guessed right."""
    return {"accuracy": (score_BK.argmax(-1) == label_B).float().mean()}


def sample_text(model: Gpt, num_bytes: int, seed: int) -> str:
    """Text that the model has learned to write."""
    generator = torch.Generator().manual_seed(seed)
    drawn = generate(model, PROMPT, num_bytes, generator)
    return drawn.decode("utf-8", errors="replace")


def _blocks(settings: TransformerSettings) -> Blocks:
    return Blocks(
        width=settings.width,
        num_blocks=settings.num_blocks,
        num_heads=settings.num_heads,
        mlp_width=settings.mlp_width,
        dropout=settings.dropout,
    )


def _check_enough(training: Samples, recipe: Recipe) -> None:
    """Refuse data that do not fill one batch.

    Raises:
        DataError: names both numbers.
    """
    batch_size = recipe.training.batch_size
    if training.num_samples < batch_size:
        raise DataError(
            f"{training.num_samples} samples to train on do not fill one batch of "
            f"{batch_size}: --set training.batch_size={training.num_samples} or less, "
            "or give more data"
        )
