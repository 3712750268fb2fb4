"""What every transport promises of the tensors in a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.errors import SchemaError
from hocket.run.comm.schema import Schema, message_tag, schema_of
from tests.run.support.transport_pair import (
    SCHEMA,
    Settings,
    Worker,
    content,
    each_kind,
    run_both,
    same,
    tags_of,
)

pytestmark = [
    pytest.mark.timeout(110),
    each_kind,
]


def change_after_send(worker: Worker) -> Any:
    """Rank 0 overwrites what it sent."""
    sender, receiver = worker.ends
    tags = tags_of(SCHEMA, 4)
    if worker.rank == 0:
        worker.meet("begin")
        for number, tag in enumerate(tags):
            tensors = content(0, number)
            sender.send(tag, tensors, SCHEMA)
            for tensor in tensors:
                tensor.fill_(-1)
        worker.meet("sent")
        sender.flush(10.0)
        worker.meet("end")
        return True
    worker.meet("begin")
    worker.meet("sent")
    receiver.expect(tags, SCHEMA)
    right = [
        same(receiver.receive(tag), content(0, number))
        for number, tag in enumerate(tags)
    ]
    worker.meet("end")
    return all(right)


def test_what_was_sent_may_be_changed_at_once(kind: str, tmp_path: Path) -> None:
    """A message holds what its tensors held when `send` was called."""
    assert run_both(tmp_path, Settings(kind), change_after_send) == [True, True]


# Types that gloo's collectives refuse.
ODD_TYPES = torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn


def odd_messages() -> list[list[Tensor]]:
    """One of each kind of message that a stage may send."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(6, 8, generator=generator)
    return [
        [base.t()],  # not contiguous
        [base[::2, 1::3]],
        [base.clone().requires_grad_() * 2],
        [base.expand(3, 6, 8)],
        [torch.tensor(3.5)],
        [torch.empty(0, 7)],
        [base > 0.5, torch.arange(5), base.bfloat16(), torch.tensor(True)],
        [base.to(kind) for kind in ODD_TYPES],
        [base.half(), base.double(), torch.complex(base, base), base.to(torch.int8)],
        [torch.full((number % 7,), number) for number in range(300)],
        [],
    ]


def send_odd(worker: Worker) -> list[bool]:
    """Rank 0 compares what rank 1 sends back."""
    sender, receiver = worker.ends
    right = []
    for number, tensors in enumerate(odd_messages()):
        schema = schema_of(tensors, keeps_order=number % 2 == 0)
        tag = message_tag(schema, number, 0)
        if worker.rank == 1:
            receiver.expect([tag], schema)
            sender.send(tag, receiver.receive(tag), schema)
            receiver.release(tag)
            continue
        receiver.expect([tag], schema)
        sender.send(tag, tensors, schema)
        back = receiver.receive(tag)
        right.append(same(back, tensors) and not any(x.requires_grad for x in back))
        receiver.release(tag)
    sender.flush(10.0)
    worker.meet("end")
    return right


def test_every_kind_of_tensor_comes_back_equal(kind: str, tmp_path: Path) -> None:
    """Strides, types, no dimensions, no elements, many tensors, no tensors."""
    right, _ = run_both(tmp_path, Settings(kind), send_odd)

    assert right == [True] * len(odd_messages())


def change_shapes(worker: Worker) -> list[bool]:
    """Rank 0 sends all before rank 1 receives any."""
    sender, receiver = worker.ends
    sizes = [4, 4, 4000, 4, 100_000, 3, 100_000, 4000]
    messages = [[torch.full((size,), float(n))] for n, size in enumerate(sizes)]
    schemas = [schema_of(tensors) for tensors in messages]
    tags = [message_tag(schema, 0, n) for n, schema in enumerate(schemas)]
    if worker.rank == 0:
        for tag, tensors, schema in zip(tags, messages, schemas, strict=True):
            sender.send(tag, tensors, schema)
        sender.flush(10.0)
        worker.meet("end")
        return []
    for tag, schema in zip(tags, schemas, strict=True):
        receiver.expect([tag], schema)
    right = [
        same(receiver.receive(tag), tensors)
        for tag, tensors in zip(tags, messages, strict=True)
    ]
    worker.meet("end")
    return right


def test_shapes_may_change_on_the_way(kind: str, tmp_path: Path) -> None:
    """Larger messages follow smaller ones that are still on their way."""
    _, right = run_both(tmp_path, Settings(kind), change_shapes)

    assert right == [True] * 8


def train_on_received(worker: Worker) -> Any:
    """Rank 1 runs backwards through what it received."""
    sender, receiver = worker.ends
    schema = Schema.parse("float32[4]")
    tags = tags_of(schema, 2)
    if worker.rank == 0:
        for number, tag in enumerate(tags):
            sender.send(tag, [torch.full((4,), number + 1.0)], schema)
        sender.flush(10.0)
        worker.meet("end")
        return None
    receiver.expect(tags, schema)
    weight = torch.full((4,), 3.0, requires_grad=True)
    (x,) = receiver.receive(tags[0])
    x.requires_grad_()
    (weight * x).sum().backward()
    receiver.release(tags[0])
    (y,) = receiver.receive(tags[1])
    late = (weight * y).sum()
    receiver.release(tags[1])
    try:
        late.backward()
    except RuntimeError as error:
        caught = str(error)
    worker.meet("end")
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad.tolist(), weight.grad.tolist(), caught


def test_received_tensors_are_leaves(kind: str, tmp_path: Path) -> None:
    """They take part in a backward; one that comes after the release is an error."""
    _, (input_grad, weight_grad, caught) = run_both(
        tmp_path, Settings(kind), train_on_received
    )

    assert input_grad == [3.0] * 4
    assert weight_grad == [1.0] * 4
    assert "modified by an inplace operation" in caught


def send_wrong(worker: Worker) -> list[str]:
    """Rank 0 tries to send something else than it says."""
    if worker.rank == 1:
        return []
    sender, _ = worker.ends
    caught = []
    for tensors in (
        [torch.zeros(3, 5)],
        [torch.zeros(3, 4), torch.zeros(4, dtype=torch.int64)],
        [torch.zeros(3, 5), torch.zeros(4)],
        [torch.zeros(4, dtype=torch.int64), torch.zeros(3, 5)],
    ):
        try:
            sender.send(message_tag(SCHEMA, 7, 2), tensors, SCHEMA)
        except SchemaError as error:
            caught.append(str(error))
    return caught


def test_a_sender_keeps_to_its_schema(kind: str, tmp_path: Path) -> None:
    """Number, shape, type and order are checked before anything leaves."""
    caught, _ = run_both(tmp_path, Settings(kind), send_wrong)
    begin = "F0>1 (rank 0 to rank 1), step 7, microbatch 2: rank 0 promised "

    assert caught == [
        f"{begin}float32[3, 5], int64[4] and would send {what}"
        for what in (
            "float32[3, 5]",
            "float32[3, 4], int64[4]",
            "float32[3, 5], float32[4]",
            "int64[4], float32[3, 5]",
        )
    ]
