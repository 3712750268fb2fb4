"""Plans a model of the transformers library by its `config.json` alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from hocket.errors import MissingPackageError, PlanError
from hocket.options import SHORT_WEIGHTS
from hocket.planner.rank import PlanConfig, Progress
from hocket.planner.ranking.report import Ranking
from hocket.recipes.data import cast_floats
from hocket.run.tune.planning import plan
from hocket.signatures import values_of

CONFIG: Final = "config.json"
_NUM_SAMPLES: Final = 2  # of the example
_PER_DEVICE: Final = 8  # samples of a step
_MOST_TOKENS: Final = 2048


def plan_config(
    path: Path, num_tokens: int | None, config: PlanConfig, progress: Progress | None
) -> Ranking:
    """Predict every way to train the model that a config describes.

    Args:
        path: a `config.json`, or a folder that has one.
        num_tokens: tokens of a sample; 2048, or as many as the model takes, when not
            given. Nothing where samples are images.
        config: what to plan for; 8 samples a device when not given.
        progress: called with the number of candidates done, and of all.

    Raises:
        PlanError: no kind of device is named; or it is no such config, or of a model
            that reads neither tokens nor images.
        MissingPackageError: the transformers library is not installed.
    """
    if config.hardware is None:
        raise PlanError(
            f"{path} has no weights that could be measured here: name the kind of "
            "device, such as --hardware a100-80g"
        )
    model = _model_of(path / CONFIG if path.is_dir() else path)
    batch = _example_of(model, num_tokens)
    if config.precision == SHORT_WEIGHTS:
        model.to(torch.bfloat16)
        batch = cast_floats(batch, torch.bfloat16)
    size = config.batch_size or _PER_DEVICE * config.num_devices
    values = values_of(PlanConfig, replace(config, batch_size=size))
    return plan(model, batch, _loss, progress=progress, **values)


def _model_of(path: Path) -> Any:
    """Return the outline of the model.

    Raises:
        PlanError: it cannot be made.
        MissingPackageError: the transformers library is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            f"{path} is a config of the transformers library, which is not installed: "
            "pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(path), trust_remote_code=False
        )
        config.use_cache = False
        names = config.architectures or []
        with torch.device("meta"):
            if not names:
                auto: Any = transformers.AutoModelForCausalLM
                return auto.from_config(config, dtype=torch.float32)
            return getattr(transformers, names[0])(config)
    except Exception as error:  # of any kind: the file is the user's
        raise PlanError(
            f"{path} is no config that the transformers library makes a model of: "
            f"{type(error).__name__}: {error}"
        ) from error


def _example_of(model: Any, num_tokens: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch as the model takes it.

    Raises:
        PlanError: it is not known how one looks.
    """
    config, reads = model.config, model.main_input_name
    if num_tokens is not None and reads != "input_ids":
        raise PlanError(
            f"--tokens has no effect: a {type(model).__name__} reads {reads}"
        )
    if reads == "input_ids":
        most = getattr(config, "max_position_embeddings", None)
        if num_tokens and most and num_tokens > most:
            raise PlanError(
                f"--tokens {num_tokens} is more than a {type(model).__name__} of this "
                f"config takes, which is {most} (max_position_embeddings)"
            )
        length = num_tokens or min(most or _MOST_TOKENS, _MOST_TOKENS)
        ids = torch.zeros(_NUM_SAMPLES, length, dtype=torch.long)
        more = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
        return {"input_ids": ids, **more}, ids
    if reads == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        num_channels = getattr(config, "num_channels", 3)
        images = torch.zeros(_NUM_SAMPLES, num_channels, *sides)
        return {"pixel_values": images}, torch.zeros(_NUM_SAMPLES, dtype=torch.long)
    raise PlanError(
        f"a {type(model).__name__} reads {reads}, and only models that read tokens or "
        "images can be planned by their config: use hocket.plan(model, batch, ...)"
    )


def _loss(output: Any, targets: Tensor) -> Tensor:
    """Cross-entropy where there is a class for each target; else the mean output."""
    logits: Tensor | None = output.get("logits")
    if logits is None:
        found = [x.float().mean() for x in output.values() if isinstance(x, Tensor)]
        return torch.stack(found).sum()
    if logits.shape[:-1] != targets.shape:
        return logits.float().mean()
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
