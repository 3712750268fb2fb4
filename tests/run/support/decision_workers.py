"""Workers whose rank 0 decides on something unusual, or with little memory."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.errors import HocketError
from hocket.freeze import Listed
from tests.freeze.test_decide import Decides
from tests.run.support.freezing_workers import (
    ADAMW,
    make_batches,
    make_pipeline,
    measure_briefly,
)
from tests.run.support.joined import join


def decide_oddly() -> dict[str, Any]:
    """Decide on numbers of other kinds, and choose what cannot be sent.

    Returns:
        The frozen layers of two steps, or the error.
    """
    measure_briefly()
    world = join()
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


def limit_memory(profiles: str) -> dict[str, Any]:
    """Begin with 2x1 and with 1x2, where the memory is half-way between their needs.

    The layers are alike, and large enough that their seconds are known.

    Args:
        profiles: the folder of the profile, so that both cut the same.

    Returns:
        The frozen layers of three steps, or the error.
    """
    world = join()
    torch.manual_seed(0)
    batch = torch.randn(64, 128), torch.randint(128, (64,))
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(9)))
    make = partial(
        hocket.Pipeline,
        loss=F.cross_entropy,
        optimizer=ADAMW,
        example=batch,
        freeze=Listed({1: 4, 2: 8}, every_steps=1),
        profile_dir=profiles,
        world=world,
    )
    first: dict[str, dict[str, Any]] = {
        "2x1": {"num_replicas": 1, "num_microbatches": 4},
        "1x2": {"num_replicas": 2, "num_microbatches": 2},
    }
    needed = 0
    for options in first.values():
        with make(copy.deepcopy(model), **options) as pipeline:
            needed += round(pipeline.plan.predicted.most_bytes)
    found: dict[str, Any] = {}
    for name, options in first.items():
        own = copy.deepcopy(model)
        try:
            with make(own, **options, memory_bytes=needed // 2) as pipeline:
                found[name] = [x.num_frozen for x in pipeline.train([batch] * 3)]
        except HocketError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
