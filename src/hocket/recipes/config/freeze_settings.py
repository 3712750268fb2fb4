"""The sections [freeze] and [cache]: which layers stop training, and when.

[freeze]
policy = "alpha"                 # "none" is the baseline
alpha = 0.2
shapes = {5 = "2x4", 8 = "1x8"}  # stages x replicas from so many frozen layers on
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hocket.freeze.shapes import Balance
from hocket.recipes.config.settings import (
    Count,
    NaturalNumber,
    Positive,
    Settings,
    Share,
    layout_of,
)


def _by_number(table: Any) -> Any:
    """Return a table of TOML, whose keys are strings, by whole numbers."""
    keys = [*table] if isinstance(table, dict) else []
    wrong = [x for x in map(str, keys) if not (x.isascii() and x.isdecimal())]
    if wrong:
        raise ValueError(f"{wrong[0]!r:.80} should be a whole number, such as 4")
    return {int(key): table[key] for key in keys} if keys else table


Layout = Annotated[str, AfterValidator(lambda text: str(layout_of(text)))]
Shapes = Annotated[dict[int, Layout], BeforeValidator(_by_number)]
LayersByDecision = Annotated[dict[int, NaturalNumber], BeforeValidator(_by_number)]


class FreezeSettings(Settings):
    """Settings that all policies have.

    Args:
        every_steps: steps between decisions; those of an epoch when not given.
        layers: the modules that count as layers, as "encoder.layers.*"; the children of
            the list of blocks that holds most parameters when not given.
        shapes: stages x replicas from so many frozen layers on, as {4 = "2x2"}; {}
            keeps the first layout. The predicted fastest that fits
            `pipeline.memory_bytes` when not given.
        balance: "exact" cuts stages by measured seconds; "greedy" is PipeTransformer's
            rule, by parameters; without `shapes` it also takes half the stages each
            time.
        recut: whether layers change their devices when others freeze; if not, each
            stays where it is, and the first layout stays.
    """

    policy: str
    every_steps: Count | None = None
    layers: str | None = None
    shapes: Shapes | None = None
    balance: Balance = "exact"
    recut: bool = True


class NoFreezing(Settings):
    """No layer freezes."""

    policy: Literal["none"]


class AlphaSettings(FreezeSettings):
    """A fixed share of the layers left, at each decision (`hocket.freeze.Alpha`).

    Args:
        alpha: the share.
    """

    policy: Literal["alpha"]
    alpha: Share = 0.2


class ArgminGradientSettings(FreezeSettings):
    """Up to the smallest gradient (`hocket.freeze.ArgminGradient`).

    Args:
        alpha: the largest share of the layers left that freezes at a decision.
        patience: as many decisions in a row must propose it; 1 is the published rule.
    """

    policy: Literal["argmin-gradient"]
    alpha: Share = 0.2
    patience: Count = 2


class PercentileSettings(FreezeSettings):
    """Before the first gradient that still changes (`hocket.freeze.Percentile`).

    Args:
        percentile: the percentile, from 0 to 100, of the changes of gradients.
        patience: as many decisions in a row must propose it; 1 is the published rule.
    """

    policy: Literal["percentile"]
    percentile: Annotated[float, Field(ge=0, le=100)] = 50.0
    patience: Count = 2


class PlasticitySettings(FreezeSettings):
    """When activations move no more (`hocket.freeze.Plasticity`).

    Args:
        window: the plasticities to which a line is fitted.
        tolerance: it is flat if its slope is at most this share of the steepest.
        patience: decisions in a row at which it must be flat.
        unfreeze_at: the share of the learning rate at which all layers train again; 0
            for never.
    """

    policy: Literal["plasticity"]
    window: Annotated[int, Field(ge=2)] = 4
    tolerance: Positive = 0.2
    patience: Count = 2
    unfreeze_at: Annotated[float, Field(ge=0, lt=1)] = 0.1


class ListedSettings(FreezeSettings):
    """A schedule by hand (`hocket.freeze.Listed`).

    Args:
        num_frozen: layers that are frozen from a decision on, as {2 = 6, 4 = 8}: six
            after two epochs, or after 2 x `every_steps` steps.
    """

    policy: Literal["listed"]
    num_frozen: LayersByDecision


AnyFreezing = (
    NoFreezing
    | AlphaSettings
    | ArgminGradientSettings
    | PercentileSettings
    | PlasticitySettings
    | ListedSettings
)


class CacheSettings(Settings):
    """The outputs of frozen layers are kept (`hocket.Cache`).

    Args:
        folder: where the files are, relative to the current folder; a folder holds the
            outputs of one model. In the run's own folder when not given.
        ram_bytes: the most memory of each worker for them.
        disk_bytes: the most that each worker writes to the folder.
        dtype: "bfloat16" keeps half as many bytes, rounded; as computed when not given.
        draws_once: random changes of training samples are drawn once, and are the same
            in each epoch; without it, data that change them are refused.
    """

    NOT_ALL_0: ClassVar = ("ram_bytes", "disk_bytes")

    folder: str | None = None
    ram_bytes: NaturalNumber = 0
    disk_bytes: NaturalNumber = 0
    dtype: Literal["bfloat16"] | None = None
    draws_once: bool = False
