"""What the workers do that are given good input, if small, random or noisy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hocket import env
from tests.run.support.failing_workers import make_batches, make_model, make_pipeline
from tests.run.support.joined import join
from tests.run.support.launched_workers import listeners

SIZES = (16, 3, 1)  # the last two: fewer samples than microbatches, than replicas


def small_batches(folder: str) -> dict[str, Any]:
    """Train with a smaller last batch, and evaluate batches of all sizes."""
    world = join()
    batches = [make_batches(1, size)[0] for size in SIZES]
    data = DataLoader(TensorDataset(*make_batches(1, 25)[0]), batch_size=16)
    with make_pipeline(
        make_model(), batches[0], folder, world=world, num_replicas=2
    ) as pipeline:
        before = pipeline.evaluate(batches, metrics=hits)
        steps = [result.num_samples for result in pipeline.train(data)]
        after = pipeline.evaluate(batches, metrics=hits)
    return {
        "steps": steps,
        "before": [before.loss, before.metrics["hits"], before.num_samples],
        "changed": before.loss != after.loss,
    }


def hits(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The share of samples whose class is right."""
    return {"hits": (output.argmax(1) == targets).double().mean()}


def random_numbers(folder: str) -> dict[str, Any]:
    """Train a model with dropout several times, and look at the global generator."""
    world = join()
    batches = make_batches(3)
    answers: dict[str, Any] = {}
    all_settings: dict[str, dict[str, Any]] = {
        "1f1b": {"schedule": "1f1b"},
        "1f1b again": {"schedule": "1f1b"},
        "1f1b, another seed": {"schedule": "1f1b", "seed": 1},
        "gpipe": {"schedule": "gpipe"},
        "interleaved": {"schedule": "interleaved-1f1b", "cut": ["7", "15", "23"]},
        "looped": {"schedule": "looped-bfs", "cut": ["7", "15", "23"]},
    }
    for name, settings in all_settings.items():
        with make_pipeline(
            make_model(dropout=0.3), batches[0], folder, world=world, **settings
        ) as pipeline:
            torch.manual_seed(world.rank)
            state = torch.get_rng_state()
            losses = [pipeline.step(batch).loss for batch in batches]
            pipeline.evaluate(batches)
            kept = torch.equal(torch.get_rng_state(), state)
            answers[name] = [losses, kept]
    return answers


def look_around(folder: str) -> dict[str, Any]:
    """What is open in the middle of training."""
    batches = make_batches(2)
    with make_pipeline(make_model(), batches[0], folder) as pipeline:
        for _ in pipeline.train(batches):
            found = {
                "own": listeners(os.getpid()),
                "launcher's": listeners(env.LAUNCHER_PID.integer()),
                "shared": [
                    line.split()[-1]
                    for line in Path("/proc/self/maps").read_text().splitlines()
                    if "/dev/shm" in line
                ],
            }
    return found
