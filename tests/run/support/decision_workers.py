"""Workers whose rank 0 decides on something unusual."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hocket.errors import HocketError
from tests.freeze.test_decide import Decides
from tests.run.support.bad_input_workers import join
from tests.run.support.freezing_workers import (
    make_batches,
    make_pipeline,
    measure_briefly,
)


def decide_oddly() -> dict[str, Any]:
    """Decide on numbers of other kinds, and choose what cannot be sent.

    Returns:
        The frozen layers of two steps, or the error.
    """
    measure_briefly()
    world = join()
    torch.set_num_threads(1)
    case = {"options": "plain", "policy": "alpha", "shapes": "fixed"}
    found: dict[str, Any] = {}
    for name, value in (("numpy", np.int64(2)), ("float", 1.5)):
        with make_pipeline(
            case, world, freeze=Decides(value, every_steps=1)
        ) as pipeline:
            try:
                results = [*pipeline.train(make_batches()[:2])]
                found[name] = [x.num_frozen for x in results]
            except HocketError as error:
                found[name] = f"{type(error).__name__}: {error}"
    with make_pipeline(case, world) as pipeline:
        freezing = pipeline._freezing
        assert freezing is not None
        try:
            no_json: Any = object
            freezing._from_rank_0(no_json, "layers")
        except (HocketError, TypeError) as error:
            found["no JSON"] = f"{type(error).__name__}: {error}"
    return found
