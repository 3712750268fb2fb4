"""The section [optimizer]: what each kind of optimizer takes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hocket.recipes.config.settings import (
    Decay,
    NaturalNumber,
    NotNegative,
    Positive,
    Probability,
    Settings,
)


class OptimizerSettings(Settings):
    """Settings that all optimizers have.

    Args:
        learning_rate: its highest value.
        num_warmup_steps: steps of a linear rise to it.
        fall: the decay after that, to the end of training: along a cosine or a line.
        final_fraction: the share of it that is left at the end; 1 keeps it constant.
        weight_decay: as the optimizer defines it.
        weight_decay_on: all parameters, or only those of two and more dimensions: not
            biases and norms.
    """

    NEEDS: ClassVar = {"weight_decay_on": ("weight_decay",)}

    learning_rate: Positive = 1e-3
    num_warmup_steps: NaturalNumber = 0
    fall: Literal["cosine", "linear"] = "cosine"
    final_fraction: Probability = 0.0
    weight_decay: NotNegative = 0.0
    weight_decay_on: Literal["all", "matrices"] = "all"


class AdamwSettings(OptimizerSettings):
    """torch.optim.AdamW.

    Args:
        beta1: the decay of the running mean of gradients.
        beta2: the decay of the running mean of their squares.
        epsilon: added to the root of the latter.
    """

    kind: Literal["adamw"]
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Positive = 1e-8


class SgdSettings(OptimizerSettings):
    """torch.optim.SGD.

    Args:
        momentum: how much of the last update each step keeps.
        nesterov: whether each step looks ahead by the momentum.
    """

    NEEDS: ClassVar = OptimizerSettings.NEEDS | {"nesterov": ("momentum",)}

    kind: Literal["sgd"]
    momentum: Decay = 0.0
    nesterov: bool = False


class LarsSettings(OptimizerSettings):
    """Momentum SGD with a rate for each matrix (`hocket.teacher.lars`).

    Args:
        momentum: how much of the last update each step keeps.
        trust: how far a step may go, as a share of the matrix's size.
    """

    kind: Literal["lars"]
    momentum: Decay = 0.9
    trust: Positive = 0.001


class AdafactorSettings(OptimizerSettings):
    """torch.optim.Adafactor, which keeps a row and a column for each matrix.

    Args:
        beta2_decay: the power of the step's number by which old squares are forgotten.
        update_clip: the largest root mean square of an update.
    """

    kind: Literal["adafactor"]
    beta2_decay: Annotated[float, Field(lt=0)] = -0.8
    update_clip: Annotated[float, Field(ge=1)] = 1.0


AnyOptimizer = AdamwSettings | SgdSettings | LarsSettings | AdafactorSettings
