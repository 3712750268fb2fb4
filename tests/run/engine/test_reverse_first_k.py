"""Reverse first-k over replicas ends with DistributedDataParallel's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.support.forked import answers_of

RESIDUALS: Final = ["2", "4", "6"]
BLOCKS: Final = ["blocks.0", "blocks.2", "blocks.4"]
LAYERS: Final = ["layers.0", "layers.1", "layers.2", "layers.3"]


def case(model: str, cut: list[str], k: int, **more: Any) -> dict[str, Any]:
    """Buckets that begin at these modules, and the first k of them last."""
    keys = {"num_microbatches", "barrier"} & more.keys()
    order = {"stages_per_device": len(cut) + 1, "k": k, **{x: more[x] for x in keys}}
    settings = {key: more[key] for key in more if key != "barrier"}
    return {"model": model, "schedule": order, "cut": cut, **settings}


# Two replicas with equal shares: bit for bit.
EQUAL: Final[dict[str, dict[str, Any]]] = {
    "normalized": case("resnet", BLOCKS, 2),
    "all of them reversed": case("resnet", BLOCKS, 4),
    "dropout": case("dropout", RESIDUALS, 3),
    "tied": case("tied-dropout", LAYERS, 3),
    "none reversed": case("tied", LAYERS, 0),
    "with a barrier": case("tied", LAYERS, 2, barrier=True),
    "clipped by the norm of all": case("perceptron", RESIDUALS, 3, clip_norm=0.1),
    "found": {"model": "resnet"},
    "found, with given buckets": {"model": "tied-dropout", "cut": LAYERS},
}
# The order in which gradients are added up differs.
CLOSE: Final[dict[str, dict[str, Any]]] = {
    "uneven last batch": case("dropout", RESIDUALS, 3, last=7),
    "two microbatches": case("perceptron", RESIDUALS, 2, num_microbatches=2),
}


# Of these the first has 20 steps, too; the order's body has four.
FEW: Final = ("normalized", "tied", "clipped by the norm of all", "uneven last batch")
FEW_STEPS: Final = 6


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "all_of_them", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_equals_ddp(all_of_them: bool, tmp_path: Path) -> None:
    """After 20 steps of AdamW in float64, or a few; on both of two workers."""
    cases = EQUAL | CLOSE
    if not all_of_them:
        few = {name: {**cases[name], "num_steps": FEW_STEPS} for name in FEW[1:]}
        cases = {FEW[0]: cases[FEW[0]], **few}
    for answer in answers_of(
        "data_parallel_workers:train_all", cases, folder=tmp_path, whole_s=220.0
    ):
        differences = {name: found["difference"] for name, found in answer.items()}
        assert {n: d for n, d in differences.items() if n in EQUAL and d} == {}
        assert {n: d for n, d in differences.items() if d > 1e-10} == {}
        overlapping = {name for name, found in answer.items() if found["overlaps"]}
        assert answer.keys() - overlapping == cases.keys() & {"with a barrier"}


def test_equals_ddp_on_three(tmp_path: Path) -> None:
    """With unequal shares of a batch, too."""
    cases = {
        "normalized": case("normed", BLOCKS, 2, num_steps=FEW_STEPS),
        "tied": case(
            "tied-dropout", LAYERS, 4, batch_size=13, last=8, num_steps=FEW_STEPS
        ),
    }
    for answer in answers_of(
        "data_parallel_workers:train_all", cases, num_workers=3, folder=tmp_path
    ):
        assert {n: x for n, x in answer.items() if x["difference"] > 1e-10} == {}


REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "one replica": ({"num_replicas": 1}, "num_replicas=2 on as many workers"),
    "number of buckets": ({"stages_per_device": 3}, "name with cut= the modules"),
    "memory": ({"memory_bytes": 100}, "The smallest memory_bytes that works is "),
    "float16": ({"precision": "float16"}, 'schedule="1f1b"'),
    "accumulate": ({"accumulate": 2}, "take larger batches"),
    "tied": (case("tied", LAYERS, 5), "a k of at most 4 works"),
}


def test_refuses(tmp_path: Path) -> None:
    """Every worker, with the numbers and a way out."""
    for answer in answers_of(
        "data_parallel_workers:refused",
        {name: settings for name, (settings, _) in REFUSED.items()},
        folder=tmp_path,
    ):
        for name, (_, words) in REFUSED.items():
            assert words in answer[name], name


def test_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    """Weights are equal bit for bit after a checkpoint in the middle.

    Measured reductions last until they were waited for, also where that is in the next
    step: that of bucket 1 until behind the forward of bucket 0.
    """
    for answer in answers_of(
        "data_parallel_workers:resumed", str(tmp_path / "run"), folder=tmp_path / "job"
    ):
        straight, resumed = answer["weights"]
        assert straight == resumed
        assert answer["late"]["1"] == [True] * 5
        assert not any(answer["late"]["0"])
