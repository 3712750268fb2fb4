"""Every case with `num_shards=2`: the plain loop, replicas, or a refusal by name.

Shards train on parts of a batch, as replicas do: where these are not the plain loop,
as with batch norms and losses that count their calls, shards give what replicas give.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.conformance.cases import CASES
from tests.conformance.script import TOLERANCE
from tests.conformance.test_matrix import QUICK
from tests.conformance.ways import Outcome
from tests.conformance.workers import run_on_two
from tests.run.support.worker_pool import WorkerPool

REPLACED: Final = "was replaced while it was sharded"
COMPLEX: Final = "of torch.complex128, and weights are floating-point numbers"
# What replicas do, and shards refuse.
REFUSED: Final = {
    "accumulate_hook": "0.weight has a post-accumulate-grad hook",
    "adafactor": "cannot step sharded weights, which are DTensors",
    "applied": "was written while it was sharded",
    "channels_last": "is not contiguous",
    "complex_weights": COMPLEX,
    "complex_weights_clipped": COMPLEX,
    "data_replaced": REPLACED,
    "declared_mask": "cannot be cut into 16 microbatches",
    "input_gradients": "wants a gradient",
    "layer_to_float32": REPLACED,
    "layer_to_half": REPLACED,
    "learned_scale": "is a scalar",
    "sparse_gradients": "are sparse, and workers add up dense ones alone",
    "trains_again": "does not go together with freeze",
}
# Weights between two steps are in shards: torch raises where the loop writes them.
_WRITES: Final = "single memory location"
RAISED: Final = {
    "another_optimizer_with_backward": _WRITES,
    "clamped": _WRITES,
    "loaded": _WRITES,
}
# The loop reads NaN: the model's weights, and those of the loss.
READ_AS_NAN: Final = {
    "averaged_by_hand",
    "loss_with_weights_clipped",
    "margin_loss",
    "task_weights",
    "weights_and_temperature",
}


def cells() -> list[Any]:
    """All cases; one of them is left to `make test`."""
    marks = {name: [] if name == QUICK else [pytest.mark.long] for name in CASES}
    return [pytest.param(name, marks=marks[name]) for name in CASES]


@pytest.mark.timeout(180)
@pytest.mark.xdist_group("conformance on two workers")
@pytest.mark.parametrize("name", cells())
def test_on_two_shards(two_workers: WorkerPool, name: str) -> None:
    """As the plain loop, as replicas, or refused by name."""
    found = run_on_two(two_workers, name, "shards-2")
    if name in RAISED:
        assert RAISED[name] in found.error
    elif name in REFUSED:
        assert found.is_ours, str(found)
        assert REFUSED[name] in found.error
    elif found.error:
        assert found.is_ours, str(found)
        assert CASES[name].verdict("own-2").kind == "refused", found.error
    elif name in READ_AS_NAN:
        assert found.worst == float("inf")
        assert found.differences["state"] <= TOLERANCE or name in _COUNTED
    elif found.worst > TOLERANCE:
        assert_alike(found, run_on_two(two_workers, name, "replicas-2"))


_COUNTED: Final = {"margin_loss", "weights_and_temperature"}  # and replicas, too


def assert_alike(found: Outcome, replicas: Outcome) -> None:
    """As far from the plain loop, and the same is seen."""
    assert not replicas.error, str(replicas)
    assert found.differences == pytest.approx(replicas.differences, rel=1e-6, abs=1e-9)
    assert found.seen == replicas.seen
