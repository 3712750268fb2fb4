"""The time of work on a device includes the work."""

from __future__ import annotations

import time

import pytest
import torch

from hocket.model.profile.precision import clock_of


def test_a_cpus_clock_is_the_hosts() -> None:
    """There is nothing to wait for."""
    assert clock_of(torch.device("cpu")) is time.perf_counter


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_four_products_take_four_times_as_long_as_one() -> None:
    """However soon the calls return."""
    clock = clock_of(torch.device("cuda"))
    a = torch.randn(4096, 4096, device="cuda")
    spent_s: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(8):
        for count, seconds in spent_s.items():
            begin = clock()
            for _ in range(count):
                torch.mm(a, a)
            seconds.append(clock() - begin)
    assert 2.0 < min(spent_s[4]) / min(spent_s[1]) < 8.0
