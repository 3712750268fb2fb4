"""The memory of received messages: used again, and never unnoticed."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.run.comm.buffers import NUM_KEPT, Buffer, Pool, buffer_bytes
from hocket.run.comm.schema import Schema

SCHEMA = Schema.parse("float32[4], int64[2]")
LARGE = Schema.parse("float32[2048]")


def test_uses_again_what_was_given_back() -> None:
    """A pool grows to the most buffers in use at once, per schema, and no further."""
    pool = Pool(torch.device("cpu"))
    first, second = pool.take(SCHEMA), pool.take(SCHEMA)
    addresses = {first.flat.data_ptr(), second.flat.data_ptr()}
    for _ in range(10):
        pool.release(first)
        pool.release(second)
        first, second = pool.take(SCHEMA), pool.take(SCHEMA)
        assert {first.flat.data_ptr(), second.flat.data_ptr()} == addresses
    assert pool.take(Schema.parse("float32[5]")).flat.data_ptr() not in addresses


def test_tensors_know_nothing_of_their_past() -> None:
    """A leaf of one microbatch must not bring its gradient to the next."""
    pool = Pool(torch.device("cpu"))
    buffer = pool.take(SCHEMA)
    x, _ = buffer.tensors()
    x.requires_grad_().sum().backward()
    address = x.data_ptr()
    del x, _
    pool.release(buffer)
    (again, _) = pool.take(SCHEMA).tensors()

    assert again.data_ptr() == address
    assert not again.requires_grad
    assert again.grad is None


@pytest.mark.parametrize("schema", [SCHEMA, LARGE])
def test_what_a_user_has_kept_is_not_written_over(schema: Schema) -> None:
    """Past bug: a queue of a teacher's outputs, and a module's last inputs, were."""
    pool = Pool(torch.device("cpu"))
    buffer = pool.take(schema)
    view = buffer.tensors()[0].detach()[1:3]
    view.fill_(5.0)
    for _ in range(3):
        pool.release(buffer)
        buffer = pool.take(schema)
        buffer.flat.zero_()
    assert view.tolist() == [5.0, 5.0]
    address = buffer.flat.data_ptr()
    pool.release(buffer)
    assert pool.take(schema).flat.data_ptr() == address


def test_a_backward_after_release_is_an_error() -> None:
    """Else it would silently compute with the next message's values."""
    pool = Pool(torch.device("cpu"))
    buffer = pool.take(SCHEMA)
    x, _ = buffer.tensors()
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * x).sum()
    pool.release(buffer)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_buffer_made_in_evaluation_serves_training() -> None:
    """Tensors made in inference mode could not be saved for a backward."""
    pool = Pool(torch.device("cpu"))
    with torch.inference_mode():
        buffer = pool.take(SCHEMA)
        buffer.tensors()
        pool.release(buffer)
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
    pool.release(free)

    pool.trim()

    assert pool.take(SCHEMA) is not free
    pool.release(used)
    assert pool.take(SCHEMA) is used


def test_what_no_message_will_need_is_given_up() -> None:
    """In looped-bfs with recomputation, eight buffers of one schema all became free.

    They stayed beside those of other schemas, when the step had no use for them.
    """
    pool, large = Pool(torch.device("cpu")), Schema.parse("float32[8192]")
    for _ in range(2):
        pool.expect(LARGE, 8)
        pool.expect(large, 8)
        many = [pool.take(LARGE) for _ in range(8)]
        memory = [weakref.ref(buffer.flat) for buffer in many]
        while many:
            pool.release(many.pop())
        assert [one() for one in memory] == [None] * 8
        addresses = set()
        for _ in range(8):
            buffer = pool.take(large)
            addresses.add(buffer.flat.data_ptr())
            pool.release(buffer)
        assert len(addresses) == 1


def test_what_is_free_does_not_pile_up() -> None:
    """Though more messages of its schema come, they never come all at once again."""
    pool = Pool(torch.device("cpu"))
    pool.expect(LARGE, 100)
    many = [pool.take(LARGE) for _ in range(8)]
    memory = [weakref.ref(buffer.flat) for buffer in many]
    while many:
        pool.release(many.pop())

    assert sum(one() is not None for one in memory) == NUM_KEPT


def test_small_buffers_stay() -> None:
    """Headers and norms, a few of every step."""
    pool = Pool(torch.device("cpu"))
    buffers = [pool.take(SCHEMA) for _ in range(10)]
    addresses = {buffer.flat.data_ptr() for buffer in buffers}
    pool.expect(LARGE, 1)
    for buffer in buffers:
        pool.release(buffer)

    assert {pool.take(SCHEMA).flat.data_ptr() for _ in range(10)} == addresses


def test_in_the_rhythm_of_1f1b_nothing_is_made_anew() -> None:
    """Only where a step begins: to make a buffer takes about as long as to fill it."""
    pool = Pool(torch.device("cpu"))
    gradient = Schema.parse("float32[2049]")
    seen: dict[int, Buffer] = {}  # held here, so that no other one gets its address

    def take(schema: Schema) -> Buffer:
        buffer = pool.take(schema)
        return seen.setdefault(id(buffer), buffer)

    def backward(inputs: deque[Buffer]) -> None:
        pool.release(take(gradient))
        pool.release(inputs.popleft())

    for _ in range(2):
        pool.expect(LARGE, 20)
        pool.expect(gradient, 20)
        inputs = deque(take(LARGE) for _ in range(3))
        backward(inputs)
        before = set(seen)
        for _ in range(17):
            inputs.append(take(LARGE))
            backward(inputs)
        while inputs:
            backward(inputs)
        assert set(seen) == before


BURSTS: Final = st.tuples(
    st.integers(min_value=0, max_value=2),  # of which schema
    st.integers(min_value=1, max_value=12),  # how many are taken
    st.integers(min_value=0, max_value=20),  # and then given back, of any schema
)


@given(st.lists(BURSTS, max_size=8))
def test_no_more_is_free_than_is_in_use(bursts: list[tuple[int, int, int]]) -> None:
    """Or than a few buffers are; whatever comes and goes, in whatever order."""
    pool = Pool(torch.device("cpu"))
    schemas = [Schema.parse(f"float32[{1024 << i}]") for i in range(3)]
    in_use: list[Buffer] = []
    memory: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
    for which, num_taken, num_given in bursts:
        for _ in range(num_taken):
            in_use.append(pool.take(schemas[which]))
            flat = in_use[-1].flat
            memory[id(flat)] = weakref.ref(flat), flat.nbytes
            del flat
        for _ in range(min(num_given, len(in_use))):
            pool.release(in_use.pop(0))
            held = sum(size for one, size in memory.values() if one() is not None)
            used = sum(buffer.flat.nbytes for buffer in in_use)
            assert held <= used + max(used, NUM_KEPT * buffer_bytes(schemas[-1]))
