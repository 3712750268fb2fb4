"""Makes a recipe's model; its seed determines the weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, assert_never

import torch
from torch import Tensor, nn

from hocket.errors import DataError, MissingPackageError, RecipeError
from hocket.nearest import nearest
from hocket.recipes.config.data_settings import (
    DigitsSettings,
    GlueSettings,
    MaskedTextSettings,
    SquadSettings,
    TextSettings,
    side_of,
)
from hocket.recipes.config.model_settings import (
    BertSettings,
    ColourNetSettings,
    DensenetSettings,
    FfnnSettings,
    GptSettings,
    MobilenetSettings,
    ModelFunctionSettings,
    NasnetSettings,
    ResnetSettings,
    ResnextSettings,
    RnnSettings,
    TorchvisionSettings,
    TransformerSettings,
    VitSettings,
)
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resnext_depths import resnext_blocks
from hocket.recipes.data.digits import NUM_CHANNELS, NUM_CLASSES
from hocket.recipes.data.glue import GlueSamples, GlueTask
from hocket.recipes.data.images.cifar import Cifar
from hocket.recipes.data.images.image_folder import ImageFolder
from hocket.recipes.data.images.stl10 import Stl10
from hocket.recipes.data.masked_text import MaskedText
from hocket.recipes.data.squad import Squad
from hocket.recipes.models.gpt import Gpt, Rnn
from hocket.recipes.models.nasnet import NasNet
from hocket.recipes.models.pretrained import load_pretrained
from hocket.recipes.models.resnet import ResNet
from hocket.recipes.models.transformer import Blocks
from hocket.recipes.models.vit import Pooling, VisionTransformer, begin_with
from hocket.recipes.user_functions import load_function
from hocket.run.data.samples import FirstSamples, Samples

if TYPE_CHECKING:
    from transformers import BertConfig


_BLOCKS: Final = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


# Makes torchvision's classifiers, and some of its families at any size.
#
# Batch normalization takes its means over a microbatch, not over the whole batch.
#
# Source: Huang et al., arXiv:1608.06993 (DenseNet); Howard et al., arXiv:1905.02244
# (MobileNetV3); Xie et al., arXiv:1611.05431 (ResNeXt; WPipe has the depths beyond
# 152).
def make_torchvision_net(settings: ColourNetSettings, num_classes: int) -> nn.Module:
    """Make a model from images (B, 3, S, S) to class scores (B, K).

    Args:
        settings: which, and its sizes; a DenseNet's stem has twice the growth's
            channels, as the paper's networks for ImageNet have.
        num_classes: K.

    Raises:
        DataError: pretrained weights are missing, or another model's.
        MissingPackageError: torchvision is not installed.
        RecipeError: it has no such classifier.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingPackageError(
            "the model comes with torchvision, which is not installed or does not load "
            f"({error}): pip install 'hocket[vision]'"
        ) from error
    model: nn.Module
    match settings:
        case DensenetSettings(growth_rate=growth_rate):
            model = models.DenseNet(
                growth_rate=growth_rate,
                block_config=_BLOCKS[settings.depth],
                num_init_features=2 * growth_rate,
                num_classes=num_classes,
            )
        case MobilenetSettings(width_multiplier=width):
            model = models.mobilenet_v3_large(num_classes=num_classes, width_mult=width)
        case ResnextSettings():
            model = models.ResNet(
                models.resnet.Bottleneck,
                list(resnext_blocks(settings.depth)),
                num_classes=num_classes,
                groups=settings.num_groups,
                width_per_group=settings.group_width,
            )
            if settings.pretrained is not None:
                load_pretrained(
                    model,
                    Path(settings.pretrained),
                    kind="a ResNeXt",
                    head="fc.",
                    source="download that file of a ResNeXt under torchvision's names "
                    "(https://huggingface.co/timm/resnext50_32x4d.tv_in1k) there",
                )
        case TorchvisionSettings(name=name):
            names = models.list_models(module=models)
            if name not in names:
                near = nearest(name, names)
                raise RecipeError(f"model.name {name!r} is unknown: {near}")
            model = models.get_model(name, weights=None, num_classes=num_classes)
        case _:
            raise AssertionError(f"{type(settings).__name__} is not made here")
    return model


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
        case VitSettings() | ResnetSettings() | ColourNetSettings() | FfnnSettings():
            return _classifier(recipe.model, _images(recipe, whole))
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
            return _own_model(own)
        case _:
            assert_never(recipe.model)


@dataclass(frozen=True, slots=True)
class _Images:
    """The sizes of images, and the number of their classes."""

    num_channels: int
    side: int
    num_classes: int


def _images(recipe: Recipe, samples: Samples) -> _Images:
    side = side_of(recipe.data)
    assert side is not None, "the recipe is valid"
    match recipe.data:
        case DigitsSettings():
            return _Images(NUM_CHANNELS, side, NUM_CLASSES)
        case _:
            assert isinstance(samples, Cifar | Stl10 | ImageFolder), (
                "the recipe is valid"
            )
            return _Images(3, side, samples.num_classes)


def _classifier(
    settings: VitSettings | ResnetSettings | ColourNetSettings | FfnnSettings,
    images: _Images,
) -> nn.Module:
    match settings:
        case VitSettings():
            vit = VisionTransformer(
                image_side=images.side,
                num_channels=images.num_channels,
                num_classes=images.num_classes,
                patch_size=settings.patch_size,
                pooling=Pooling(settings.pooling),
                blocks=_blocks(settings),
            )
            if settings.pretrained is not None:
                begin_with(vit, Path(settings.pretrained))
            return vit
        case ResnetSettings():
            return ResNet(
                num_channels=images.num_channels,
                num_classes=images.num_classes,
                width=settings.width,
                num_blocks=settings.num_blocks,
            )
        case NasnetSettings():
            sizes = settings.num_features, settings.num_cells
            return NasNet(images.num_classes, *sizes)
        case FfnnSettings():
            return Ffnn(
                num_inputs=images.num_channels * images.side**2,
                num_classes=images.num_classes,
                width=settings.width,
                num_layers=settings.num_layers,
            )
        case _:
            return make_torchvision_net(settings, images.num_classes)


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


def _own_model(settings: ModelFunctionSettings) -> nn.Module:
    model = load_function(settings.function)(**settings.arguments)
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


# Shapes: B images, C channels, S side in pixels, K classes.
class Ffnn(nn.Module):
    """Images (B, C, S, S) to class scores (B, K).

    Args:
        num_inputs: C x S x S.
        num_classes: K.
        width: features of each layer.
        num_layers: layers with a ReLU behind each; out-of-order backprop's FFNN-16 has
            16 of width 4096.

    Source: Oh et al., EuroSys'22, section 8.
    """

    def __init__(
        self, *, num_inputs: int, num_classes: int, width: int, num_layers: int
    ) -> None:
        super().__init__()
        widths = [num_inputs, *[width] * num_layers]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(before, after), nn.ReLU())
                for before, after in pairwise(widths)
            )
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Score the classes."""
        score_BK: Tensor = self.head(self.layers(image_BCSS.flatten(1)))
        return score_BK
