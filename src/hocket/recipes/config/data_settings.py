"""The section [data]: what each kind of data takes."""

from __future__ import annotations

from typing import Literal

from hocket.recipes.config.settings import (
    Count,
    FunctionSettings,
    Probability,
    Settings,
    Share,
)


class DigitsSettings(Settings):
    """scikit-learn's 1797 handwritten digits (`hocket.recipes.data.digits`).

    Args:
        test_fraction: the share of each class that is kept for evaluation.
        shift_probability: the probability that a training image is shifted by up to one
            pixel in each direction, drawn for each image and epoch.
    """

    kind: Literal["digits"]
    test_fraction: Share = 0.25
    shift_probability: Probability = 0.5


class DataFunctionSettings(FunctionSettings):
    """A function that returns data to train on and data to evaluate on.

    Args:
        max_samples: takes only so many samples, the first ones, to train on, and to
            evaluate on; for a try.
    """

    max_samples: Count | None = None


DataSettings = DigitsSettings | DataFunctionSettings
