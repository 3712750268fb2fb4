"""What the zoo does: capture each architecture once, and train it in several cuts.

    fork server ─▶ captures all ─┬─▶ worker 0
                                 └─▶ worker 1

Each worker has all captures when it begins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from hocket.run.data.batch import call_arguments
from tests.run.support.captured_once import captured_once, keep_ready
from tests.run.support.exactness import train_one
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.small_models import batches, make_model, specimen_of

ANSWERS: Final = "answers.json"
OUTPUT: Final = "capture.txt"  # what the process that captures writes


def capture_and_train(
    names: list[str], cases: list[dict[str, Any]], folder: Path
) -> None:
    """Leave what two workers answer in a file. For a process of its own.

    Args:
        names: of the architectures.
        cases: how each is trained; all with microbatches of one size.
        folder: for everything.
    """
    os.dup2(os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    [num_samples] = {-(-x["batch_size"] // x["num_microbatches"]) for x in cases}
    for name in names:
        if specimen_of(name).cuts:
            continue  # captured with a cut, each time with another one
        [(inputs, _)] = batches(name, 1, num_samples, num_samples)
        keep_ready(name, partial(make_model, name), *call_arguments(inputs))
    answers = answers_of(
        "tests.zoo.training:train_all",
        names,
        cases,
        str(folder),
        folder=folder,
        whole_s=600.0,
        context=multiprocessing.get_context("fork"),
    )
    (folder / ANSWERS).write_text(json.dumps(answers))


def train_all(
    names: list[str], cases: list[dict[str, Any]], folder: str
) -> list[list[dict[str, Any]]]:
    """The answers of all cases of each architecture, each from the same weights."""
    world = join()
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
