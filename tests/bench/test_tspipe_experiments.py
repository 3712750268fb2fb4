"""TSPipe's experiments on the simulator: what must be so, whatever the seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.networks.vision import resnet, vit
from bench.published import PACKAGED, kept
from bench.tspipe.experiments import EXPERIMENTS, Experiment, results

models = pytest.importorskip("torchvision.models", exc_type=ImportError)
MOCO: Experiment = next(x for x in EXPERIMENTS if x.nets == "ViT-Base")


def num_weights(make: Callable[[], nn.Module]) -> int:
    """Weights of a model that takes no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize("depth", [18, 50, 101, 152])
def test_resnets_have_as_many_weights_as_torchvisions(depth: int) -> None:
    """With their norms."""
    num_classes = 100 if depth == 18 else 102
    make = getattr(models, f"resnet{depth}")
    expected = num_weights(lambda: make(num_classes=num_classes))
    assert sum(x.weights for x in resnet(depth)) == expected


@pytest.mark.parametrize(
    ("name", "millions"),
    [("ViT-Small", 22), ("ViT-Base", 86), ("ViT-Large", 307), ("ViT-Huge", 632)],
)
def test_vision_transformers_have_as_many_weights_as_published(
    name: str, millions: int
) -> None:
    """To the rounding of the poster's table."""
    found = sum(layer.weights for layer in vit(name)) / 1e6
    assert math.isclose(found, millions, rel_tol=0.025)


def test_all_published_rows_are_shown() -> None:
    """With the authors' numbers, and none where none is published."""
    rows = kept(PACKAGED / "tspipe.json")["tables"][0]["rows"][1:]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (x.method, x.nets, str(x.num_devices)) for x in EXPERIMENTS
    ]
    by_name = {(row[1], row[2]): row for row in rows}
    assert by_name["ViT-Huge", "8"][7] == "6.42"
    assert by_name["ViT-Huge", "8"][9] == "1.88"
    assert by_name["ViT-Huge", "16"][7] == "-"


def test_filled_orders_are_faster_than_the_teacher_first() -> None:
    """And that than one device at a time, by less than there are devices."""
    (result,) = results((replace(MOCO, num_devices=4),))
    gpipe, ours = result.gpipe, result.ours
    assert gpipe is not None
    assert ours is not None
    assert ours.step_s <= gpipe.step_s < gpipe.same_batch_s < result.naive_s
    assert result.naive_s < 4 * ours.step_s
