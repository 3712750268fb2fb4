"""Enough receive buffers for no sender to wait, and the past bug of too few."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.run.comm.transports import buffers_without_waiting
from hocket.schedules import make_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_is_enough_where_messages_are_read_as_they_come(name: str) -> None:
    """Equal stages in a chain: each message is read when it arrives."""
    schedule = make_schedule(name, num_devices=4, num_microbatches=8)

    assert buffers_without_waiting(schedule) == 1


@pytest.mark.parametrize("num_microbatches", [4, 16, 32])
def test_looped_bfs_piles_up_what_wraps_around(num_microbatches: int) -> None:
    """Past bug: half as many never deadlock, but device 1 stood still for lack of them.

    Device 1 makes its first outputs while device 0 still has all its other first
    forwards to do, and reads none of them before.
    """
    schedule = make_schedule(
        "looped-bfs", num_devices=2, num_microbatches=num_microbatches
    )

    assert buffers_without_waiting(schedule) == num_microbatches - 1
    assert check(schedule).num_buffers == num_microbatches // 2


def test_one_device_sends_nothing() -> None:
    """A schedule on one device has no flow, and needs one buffer at most."""
    schedule = make_schedule("1f1b", num_devices=1, num_microbatches=4)

    assert buffers_without_waiting(schedule) == 1
