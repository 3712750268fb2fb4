"""`pipeline.outputs` is what the plain model returns, in order, on every worker."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hocket.run.data.sample_loader import EvaluationLoader
from tests.run.support.concatenated_batches import ConcatenatedBatches
from tests.run.support.forked import answers_of
from tests.run.support.joined import join, said
from tests.run.support.started import started

SIZES: Final = (12, 7, 1, 5)  # of batches; fewer than all microbatches, and uneven
CUT: Final = ["head"]
NUM_FEATURES: Final = 3


class Features(nn.Module):
    """A model whose outputs are of several types, in a structure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, NUM_FEATURES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return features, and which of them is the largest."""
        y = self.head(self.body(x))
        return {"features": y, "more": (y.argmax(1), y > 0)}


class Shared(Features):
    """A model with an output that is not of samples."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return features, and a number for all samples."""
        y = self.head(self.body(x))
        return {"features": y, "mean": y.mean()}


def loss(output: dict[str, Any], targets: Tensor) -> Tensor:
    """Compare the features with targets."""
    return (output["features"] - targets).square().mean()


def make_batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Draw batches of these sizes."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 4, generator=generator),
            torch.randn(size, NUM_FEATURES, generator=generator),
        )
        for size in sizes
    ]


def collect(num_replicas: int) -> dict[str, Any]:
    """Collect outputs before and after a step of training.

    Returns:
        How far they are from the plain model's; and by how much the step changed them.
    """
    model = Features()
    (example,) = make_batches((16,))
    batches = make_batches(SIZES)
    before = copy.deepcopy(model)
    with (
        closing(join()) as world,
        started(
            model,
            loss,
            (lambda p: torch.optim.SGD(p, 0.5)),
            example,
            cut=CUT if world.world_size > num_replicas else None,
            num_microbatches=4,
            num_replicas=num_replicas,
            world=world,
        ) as pipeline,
    ):
        first = pipeline.outputs(batches)
        again = pipeline.outputs(iter(batches))  # without a length
        loader = EvaluationLoader(ConcatenatedBatches(batches), 10)
        by_rows = pipeline.outputs(loader)  # each worker reads what it needs
        pipeline.step(example)
        second = pipeline.outputs(batches)
        evaluated = pipeline.evaluate(batches).loss
        after = copy.deepcopy(before)
        after.load_state_dict(pipeline.state_dict())
    whole = torch.cat([x for x, _ in batches])
    targets = torch.cat([y for _, y in batches])
    return {
        "before": distance(first, before.eval()(whole)),
        "again": distance(again, before.eval()(whole)),
        "by rows": distance(by_rows, before.eval()(whole)),
        "after": distance(second, after.eval()(whole)),
        "moved": distance(first, second),
        "loss": abs(evaluated - loss(second, targets).item()),
        "keys": list(first),
        "types": [str(x.dtype) for x in (first["features"], *first["more"])],
    }


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference; infinite where integers or booleans differ."""
    is_equal = all(
        torch.equal(a, b) for a, b in zip(found["more"], expected["more"], strict=True)
    )
    far = (found["features"] - expected["features"]).abs().max().item()
    return far if is_equal else float("inf")


def refuse() -> str:
    """Collect an output that has no samples; return the error."""
    (example,) = make_batches((8,))
    with closing(join()) as world:
        pipeline = started(
            Shared(), loss, (lambda p: torch.optim.SGD(p, 0.5)), example, world=world
        )
        return said(lambda: pipeline.outputs([example]))


TOLERANCE = 1e-6


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_workers", "num_replicas"), [(1, 1), (2, 1), (2, 2), (4, 2)]
)
def test_outputs_are_the_plain_models(
    num_workers: int, num_replicas: int, tmp_path: Path
) -> None:
    """Of uneven batches, some smaller than the microbatches; also after training.

    The structure is the model's, with integers and booleans bit for bit. The loss of
    all outputs is what `evaluate` says. All replicas read the statistics of the first.
    """
    for answer in answers_of(
        f"{__name__}:collect", num_replicas, num_workers=num_workers, folder=tmp_path
    ):
        assert answer["keys"] == ["features", "more"]
        assert answer["types"] == ["torch.float32", "torch.int64", "torch.bool"]
        for what in ("before", "again", "by rows", "after"):
            assert answer[what] < TOLERANCE, what
        assert answer["moved"] > 1e-2
        assert answer["loss"] < TOLERANCE


def test_outputs_without_samples_are_refused(tmp_path: Path) -> None:
    """A mean over one microbatch has no place among the others'."""
    (text,) = answers_of(f"{__name__}:refuse", num_workers=1, folder=tmp_path)
    assert "tensors have samples along dimension 0" in text
