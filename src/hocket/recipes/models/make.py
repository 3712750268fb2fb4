"""Makes a recipe's model; its seed determines the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, assert_never, runtime_checkable

import torch
from torch import Tensor, nn

from hocket.errors import DataError, MissingPackageError, RecipeError
from hocket.recipes.config.data_settings import (
    GlueSettings,
    MaskedTextSettings,
    SquadSettings,
    TextSettings,
)
from hocket.recipes.config.model_settings import (
    BertSettings,
    GptSettings,
    ModelFunctionSettings,
    RnnSettings,
    TransformerSettings,
    VitSettings,
)
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.data.glue import GlueSamples, GlueTask
from hocket.recipes.data.masked_text import MaskedText
from hocket.recipes.data.squad import Squad
from hocket.recipes.models.gpt import Gpt, Rnn
from hocket.recipes.models.transformer import Blocks
from hocket.recipes.models.vit import Pooling, VisionTransformer
from hocket.recipes.user_functions import call_function
from hocket.run.data.samples import FirstSamples, Samples

if TYPE_CHECKING:
    from transformers import BertConfig


def make_model(recipe: Recipe, training: Samples) -> nn.Module:
    """Make a newly initialised model.

    Args:
        recipe: the recipe.
        training: the samples to train on, for the numbers of classes and words.

    Raises:
        RecipeError: the user's function returns no module.
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: the package that has the model is not installed.
    """
    torch.manual_seed(recipe.training.seed)
    whole = training.samples if isinstance(training, FirstSamples) else training
    match recipe.model:
        case VitSettings() as vit:
            return _vit(vit, whole)
        case GptSettings() as gpt:
            assert isinstance(recipe.data, TextSettings), "the recipe is valid"
            return Gpt(
                window_bytes=recipe.data.window_bytes,
                tie_weights=gpt.tie_weights,
                blocks=_blocks(gpt),
            )
        case RnnSettings() as rnn:
            return Rnn(width=rnn.width, num_layers=rnn.num_layers, dropout=rnn.dropout)
        case BertSettings() as bert:
            return _bert(bert, recipe.data, whole)
        case ModelFunctionSettings() as own:
            return _own_model(own, whole)
        case _:
            assert_never(recipe.model)


@runtime_checkable
class Images(Protocol):
    """Images of one size, with classes."""

    num_channels: int
    side: int
    num_classes: int


def _vit(settings: VitSettings, images: Any) -> nn.Module:
    """Make a vision transformer of the images' sizes.

    Raises:
        RecipeError: the data are no images, or patches do not fill them.
    """
    if not isinstance(images, Images):
        raise RecipeError(
            "model.kind 'vit' reads images: the function of [data] must return samples "
            "with num_channels, side (pixels) and num_classes"
        )
    if images.side % settings.patch_size:
        raise RecipeError(
            f"model.patch_size {settings.patch_size} does not divide the images' side "
            f"of {images.side} pixels"
        )
    return VisionTransformer(
        image_side=images.side,
        num_channels=images.num_channels,
        num_classes=images.num_classes,
        patch_size=settings.patch_size,
        pooling=Pooling(settings.pooling),
        blocks=_blocks(settings),
    )


def _bert(settings: BertSettings, text: Any, samples: Samples) -> nn.Module:
    """Make Hugging Face's own class, so that weights can be exported to it."""
    assert isinstance(text, GlueSettings | SquadSettings | MaskedTextSettings), (
        "the recipe is valid"
    )
    assert isinstance(samples, GlueSamples | MaskedText | Squad), "the recipe is valid"
    try:
        from transformers import (
            BertConfig,
            BertForMaskedLM,
            BertForQuestionAnswering,
            BertForSequenceClassification,
        )
    except ImportError as error:
        raise MissingPackageError(
            "BERT comes with transformers, which is not installed or does not load "
            f"({error}): pip install 'hocket[recipes]'"
        ) from error
    config = BertConfig(
        vocab_size=samples.tokenizer.num_entries,
        hidden_size=settings.width,
        num_hidden_layers=settings.num_blocks,
        num_attention_heads=settings.num_heads,
        intermediate_size=settings.mlp_width,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        max_position_embeddings=max(512, text.num_tokens),
    )
    match text:
        case MaskedTextSettings():
            return MaskedBert(_pretrained_or_new(BertForMaskedLM, config, settings))
        case SquadSettings():
            return _pretrained_or_new(BertForQuestionAnswering, config, settings)
        case _:
            config.num_labels = GlueTask(text.task).num_classes
            return _pretrained_or_new(BertForSequenceClassification, config, settings)


def _pretrained_or_new(
    kind: type[Any], config: BertConfig, settings: BertSettings
) -> nn.Module:
    if settings.pretrained is not None:
        return _pretrained(kind, config, Path(settings.pretrained))
    model: nn.Module = kind(config)
    return model


def _pretrained(kind: type[Any], config: BertConfig, folder: Path) -> nn.Module:
    """Load weights from a folder; never from a pickle, nor from the network.

    Raises:
        DataError: there are no weights, or their sizes differ.
    """
    if not (folder / "model.safetensors").is_file():
        raise DataError(
            f"model.pretrained: {folder} has no model.safetensors: download the files "
            "of a BERT (https://huggingface.co/google-bert/bert-base-uncased) there"
        )
    try:
        model: nn.Module = kind.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"model.pretrained: the weights in {folder} do not fit a BERT of the "
            f"recipe's sizes: {error}"
        ) from error
    return model


def _blocks(settings: TransformerSettings) -> Blocks:
    return Blocks(
        width=settings.width,
        num_blocks=settings.num_blocks,
        num_heads=settings.num_heads,
        mlp_width=settings.mlp_width,
        dropout=settings.dropout,
    )


def _own_model(settings: ModelFunctionSettings, samples: Samples) -> nn.Module:
    model = call_function("model", settings, data=samples)
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"{settings.function} returned {type(model).__name__}: it must return a "
            "torch.nn.Module"
        )
    return model


# Shapes: B samples, T pieces, V entries of the vocabulary, W width.
class MaskedBert(nn.Module):
    """Ids (B, T) to `logits` (B, T, V) and `hidden_states` (B, T, W), the last ones.

    Names of parameters are those of Hugging Face's class.

    Args:
        model: a `transformers.BertForMaskedLM`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bert: nn.Module = model.bert
        self.cls: nn.Module = model.cls

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Score the pieces."""
        hidden_BTW = self.bert(input_ids=input_ids).last_hidden_state
        return {"logits": self.cls(hidden_BTW), "hidden_states": hidden_BTW}
