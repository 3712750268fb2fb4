"""The names of all architectures, the library that each needs, and how to make one.

A library that is not installed is left out, with a reason; hocket's own tests need
none but transformers and torchvision:

    pip install --constraint constraints.txt timm diffusers torch_geometric
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from tests.model.support.stages_by_hand import Case

MODULES: Final = {
    "transformers": ("text", "encoder_decoder", "sight_and_sound"),
    "timm": ("vision",),
    "diffusers": ("diffusion",),
    "torch_geometric": ("graphs",),
    "torchvision": ("detection", "images"),
    "torch": ("recurrent",),
}
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (
        *("albert", "bloom", "deberta", "electra", "falcon", "gemma", "gpt-neox"),
        *("jamba", "llama", "longformer", "mamba", "mistral", "mixtral", "opt"),
        *("phi", "qwen2", "qwen2-moe", "roberta"),
    ),
    "encoder_decoder": ("bart", "marian", "pegasus", "switch"),
    "sight_and_sound": ("clip", "detr", "segformer", "swin", "wav2vec2", "whisper"),
    "vision": (
        *("resnet10t", "nf_resnet26", "regnetx_002", "efficientnet_lite0"),
        *("mobilenetv3_small_050", "convnext_atto", "mixer_s32_224", "dla34"),
        *("resmlp_12_224", "poolformer_s12", "ghostnet_050", "repvgg_a0"),
        *("edgenext_xx_small", "hrnet_w18_small", "cait_xxs24_224", "levit_128s"),
        *("xcit_nano_12_p16_224", "vit_tiny_patch16_224", "gmlp_ti16_224"),
        "seresnext26t_32x4d",
    ),
    "diffusion": ("dit", "unet-2d"),
    "graphs": ("dense-gcn", "dense-sage", "gat", "gcn", "gin", "sage"),
    "detection": ("faster-rcnn", "retinanet"),
    "images": ("deeplabv3", "fcn", "googlenet", "lraspp"),
    "recurrent": (
        *("gru", "lstm-cells", "lstm-state-passed", "mixture-of-experts"),
        *("state-kept", "state-passed"),
    ),
}
# They are to be refused; the way out is in the error, and in the catalogue.
REFUSED: Final[Mapping[str, str]] = {"state-kept": "state-passed"}
# They run in every `make test`; all others only in `make test-long`.
SHORT: Final = (
    *("llama", "mixtral", "bart", "segformer", "gru", "mixture-of-experts"),
    "state-kept",
)


def library_of(name: str) -> str:
    """Return the library that an architecture needs."""
    home = home_of(name)
    return next(library for library, homes in MODULES.items() if home in homes)


def home_of(name: str) -> str:
    """Return the module of this folder that has an architecture."""
    return next(home for home, names in NAMES.items() if name in names)


def is_installed(name: str) -> bool:
    """Return whether the library of an architecture is there."""
    return find_spec(library_of(name)) is not None


def make(name: str) -> Case:
    """Return an architecture with its batch, in float64."""
    module = import_module(f"tests.zoo.catalogue.{home_of(name)}")
    makers: Mapping[str, Callable[[], Case]] = module.CASES
    return makers[name]().double()


def all_names() -> tuple[str, ...]:
    """Return every name."""
    return tuple(name for names in NAMES.values() for name in names)
