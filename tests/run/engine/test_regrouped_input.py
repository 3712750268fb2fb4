"""A stage reads several microbatches of another net, a part of one, or all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hocket.core.dataflow import Fact, Rule
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import split_batch
from hocket.run.data.step_batch import NetBatches, StepBatch
from hocket.run.engine.lanes.inputs import Input, RegroupedInput, Values

NUM_SAMPLES = 12


class Stub(Input):
    """Rows of 0, 1, ... 11 in equal parts, some of which come late.

    Args:
        num_parts: of the maker.
        waits: what a microbatch waits for.
    """

    def __init__(
        self, num_parts: int, waits: Mapping[int, threading.Event] | None = None
    ) -> None:
        self.parts = torch.arange(NUM_SAMPLES).chunk(num_parts)
        self.waits = {} if waits is None else waits
        self.taken: list[int] = []
        self.released: list[int] = []

    def take(self, batch: NetBatches, microbatch: int) -> Values:
        """Return a part, once."""
        if microbatch in self.waits:
            assert self.waits[microbatch].wait(10.0)
        self.taken.append(microbatch)
        return (self.parts[microbatch],)

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """Note it."""
        self.released.append(microbatch)


def batch_of(num_microbatches: int) -> NetBatches:
    """A batch of the reader's net."""
    x = torch.arange(NUM_SAMPLES)
    parts = split_batch((x, x), num_microbatches)
    size = NUM_SAMPLES // num_microbatches
    numbered: list[Any] = [
        type(part)(part.leaves, part.targets, size, first_row=i * size)
        for i, part in enumerate(parts)
    ]
    header = StepHeader(0, 0, NUM_SAMPLES, (size,) * num_microbatches)
    return {"reader": StepBatch(header, tuple(numbered))}


@pytest.mark.parametrize("joins_once", [True, False])
@pytest.mark.parametrize("takes_all", [True, False])
@pytest.mark.parametrize(("num_made", "num_read"), [(6, 2), (2, 6), (4, 4)])
def test_every_microbatch_reads_its_rows_or_all(
    num_made: int, num_read: int, *, takes_all: bool, joins_once: bool
) -> None:
    """In any order; the maker's are taken once each, and released behind the last."""
    rule = Rule(
        Fact.OUTPUT, 0, 0, max(1, num_made // num_read), max(1, num_read // num_made)
    )
    if takes_all:
        rule = Rule(Fact.OUTPUT, 0, 0, num_made, num_read)
    source = Stub(num_made)
    reader = RegroupedInput(
        source, rule, "reader", takes_all=takes_all, joins_once=joins_once
    )
    batch, rows = batch_of(num_read), torch.arange(NUM_SAMPLES)
    for microbatch in reversed(range(num_read)):
        (found,) = reader.take(batch, microbatch)
        expected = rows if takes_all else rows.chunk(num_read)[microbatch]
        assert found.tolist() == expected.tolist()
        reader.release(batch, microbatch)
    assert sorted(source.taken) == sorted(source.released) == [*range(num_made)]


def test_a_lane_that_waits_for_one_group_does_not_keep_another_from_its_own() -> None:
    """Else a device that waits for the second lane's result would wait for ever."""
    comes = threading.Event()
    source = Stub(4, {2: comes})
    rule = Rule(Fact.OUTPUT, 0, 0, 2, 1)
    reader = RegroupedInput(source, rule, "reader", takes_all=False, joins_once=False)
    batch, found = batch_of(2), []
    lane = threading.Thread(target=lambda: found.append(reader.take(batch, 1)))
    lane.start()
    (first,) = reader.take(batch, 0)
    comes.set()
    lane.join(10.0)
    assert first.tolist() == [0, 1, 2, 3, 4, 5]
    assert found[0][0].tolist() == [6, 7, 8, 9, 10, 11]
