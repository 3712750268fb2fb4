"""What the workers of the zoo do: train each architecture in several cuts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hocket.run.world import join_world
from tests.run.exactness import train_one
from tests.run.once import captured_once
from tests.run.zoo import make_model


def train_all(
    names: list[str], cases: list[dict[str, Any]], folder: str
) -> list[list[dict[str, Any]]]:
    """The answers of all cases of each architecture, each from the same weights."""
    torch.set_num_threads(1)
    world = join_world()
    answers = []
    for name in names:
        with captured_once() as shelf:
            runs = []
            for i, case in enumerate(cases):
                model = shelf.model(name, partial(make_model, name))
                run = {**case, "model": name, "cut": case["cuts"][name]}
                stem = Path(folder) / f"{name}-{i}"
                runs.append(train_one(world, run, stem, model))
        answers.append(runs)
    return answers
