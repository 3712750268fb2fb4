"""`pipeline.outputs` is what the plain model returns, in order, on every worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.support.forked import answers_of

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
        "output_workers:collect", num_replicas, num_workers=num_workers, folder=tmp_path
    ):
        assert answer["keys"] == ["features", "more"]
        assert answer["types"] == ["torch.float32", "torch.int64", "torch.bool"]
        for what in ("before", "again", "by rows", "after"):
            assert answer[what] < TOLERANCE, what
        assert answer["moved"] > 1e-2
        assert answer["loss"] < TOLERANCE


def test_outputs_without_samples_are_refused(tmp_path: Path) -> None:
    """A mean over one microbatch has no place among the others'."""
    (text,) = answers_of("output_workers:refuse", num_workers=1, folder=tmp_path)
    assert "tensors have samples along dimension 0" in text
