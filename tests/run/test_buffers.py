"""The memory of received messages: used again, and never unnoticed."""

from __future__ import annotations

import pytest
import torch

from hocket.run.buffers import Pool
from hocket.run.schema import Schema

SCHEMA = Schema.parse("float32[4], int64[2]")


def test_uses_again_what_was_given_back() -> None:
    """A pool grows to the most buffers in use at once, per schema, and no further."""
    pool = Pool(torch.device("cpu"))
    first, second = pool.take(SCHEMA), pool.take(SCHEMA)
    addresses = {first.flat.data_ptr(), second.flat.data_ptr()}
    for _ in range(10):
        pool.give(first)
        pool.give(second)
        first, second = pool.take(SCHEMA), pool.take(SCHEMA)
        assert {first.flat.data_ptr(), second.flat.data_ptr()} == addresses
    assert pool.take(Schema.parse("float32[5]")).flat.data_ptr() not in addresses


def test_tensors_know_nothing_of_their_past() -> None:
    """A leaf of one microbatch must not bring its gradient to the next."""
    pool = Pool(torch.device("cpu"))
    buffer = pool.take(SCHEMA)
    x, _ = buffer.tensors()
    x.requires_grad_().sum().backward()
    pool.give(buffer)
    (again, _) = pool.take(SCHEMA).tensors()

    assert again.data_ptr() == x.data_ptr()
    assert not again.requires_grad
    assert again.grad is None


def test_a_backward_after_release_is_an_error() -> None:
    """Else it would silently compute with the next message's values."""
    pool = Pool(torch.device("cpu"))
    buffer = pool.take(SCHEMA)
    x, _ = buffer.tensors()
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * x).sum()
    pool.give(buffer)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_buffer_made_in_evaluation_serves_training() -> None:
    """Tensors made in inference mode could not be saved for a backward."""
    pool = Pool(torch.device("cpu"))
    with torch.inference_mode():
        buffer = pool.take(SCHEMA)
        buffer.tensors()
        pool.give(buffer)
    buffer = pool.take(SCHEMA)
    buffer.flat.zero_()
    x, _ = buffer.tensors()
    weight = torch.ones(4, requires_grad=True)
    (weight * x).sum().backward()

    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 4


def test_a_message_without_tensors_has_memory_too() -> None:
    """Backends refuse to send nothing."""
    buffer = Pool(torch.device("cpu")).take(Schema(()))

    assert buffer.flat.numel() == 64
    assert buffer.tensors() == ()


def test_a_trimmed_pool_begins_anew() -> None:
    """What is in use stays in use, and comes back; what was free is gone."""
    pool = Pool(torch.device("cpu"))
    free, used = pool.take(SCHEMA), pool.take(SCHEMA)
    pool.give(free)

    pool.trim()

    assert pool.take(SCHEMA) is not free
    pool.give(used)
    assert pool.take(SCHEMA) is used
