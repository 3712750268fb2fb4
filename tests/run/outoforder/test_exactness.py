"""A compiled step trains what the eager step trains."""

from __future__ import annotations

from typing import Final

import pytest

import hocket
from tests.run.outoforder.support.small_steps import (
    MORE_OPTIMIZERS,
    OPTIMIZERS,
    SPECIMENS,
    TOLERANCE,
    batches_of,
    difference,
    loss,
    model_of,
    train_compiled,
    train_eagerly,
)

SHORT: Final = {
    ("perceptron", "SGD"),
    ("convolutional", "AdamW"),
    ("tied transformer", "AdamW"),
    ("lstm", "SGD"),
}
# `make test-long` tries the rest.
CASES: Final = [
    pytest.param(name, optimizer, marks=[] if is_short else pytest.mark.long)
    for name in SPECIMENS
    for optimizer in OPTIMIZERS
    for is_short in [(name, optimizer) in SHORT]
]


@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_equals_the_eager_step(name: str, optimizer: str) -> None:
    """20 steps, from the same random state: each loss, and all weights and buffers."""
    specimen, make = SPECIMENS[name], OPTIMIZERS[optimizer]
    model, batches = model_of(specimen), batches_of(specimen)
    expected, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        losses = train_compiled(step, batches)
    assert losses == pytest.approx(expected, rel=TOLERANCE, abs=0)
    assert difference(model, trained) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
def test_other_optimizers(optimizer: str) -> None:
    """Captured with their counts of steps and learning rates as tensors."""
    specimen, make = SPECIMENS["perceptron"], MORE_OPTIMIZERS[optimizer]
    model, batches = model_of(specimen), batches_of(specimen)
    _, trained = train_eagerly(model, make, batches)
    with hocket.compile_step(model, loss, make, example=batches[0]) as step:
        train_compiled(step, batches)
        assert step.candidates
    assert difference(model, trained) <= TOLERANCE
