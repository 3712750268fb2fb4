"""Ops begin and end in this process's seconds, whatever the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from hocket.run.device.stopwatch import HostWatch, StreamWatch, make_stopwatch

HANDING_S = 0.001  # what the host takes to hand over one op


def test_a_host_watch_has_the_times_of_calls() -> None:
    """In the order in which they were made, in `perf_counter`'s seconds."""
    watch = make_stopwatch(3, torch.device("cpu"))
    before_s = time.perf_counter()
    for i in (1, 0):
        watch.start(i)
        time.sleep(0.001)
        watch.end(i)
    start_s, end_s = watch.read().value

    assert isinstance(watch, HostWatch)
    assert before_s <= start_s[1] <= end_s[1] - 0.001
    assert end_s[1] <= start_s[0] <= end_s[0] - 0.001
    assert end_s[0] <= time.perf_counter()
    assert (start_s[2], end_s[2]) == (0.0, 0.0)


@dataclass
class Machine:
    """A host and a device whose work it hands over, with a clock that stands still.

    Stands in for a GPU: the stream does one thing after the other, none of it before
    the host has handed it over, and the host goes on meanwhile.
    """

    host_s: float = 100.0
    stream_s: float = 0.0

    def work(self, seconds: float) -> None:
        """Hand over work that takes the device some time."""
        self.host_s += HANDING_S
        self.stream_s = max(self.stream_s, self.host_s) + seconds

    def event(self) -> Moment:
        """One that can be handed over."""
        return Moment(self)

    def clock(self) -> float:
        """The host's."""
        return self.host_s


@dataclass
class Moment:
    """An event: when the stream passes it, once it is handed over."""

    machine: Machine
    passed_s: float | None = None

    def record(self) -> None:
        """Now, or when the stream is through with what it was handed before."""
        machine = self.machine
        self.passed_s = machine.stream_s = max(machine.stream_s, machine.host_s)

    def synchronize(self) -> None:
        """The host waits for the stream."""
        assert self.passed_s is not None
        self.machine.host_s = max(self.machine.host_s, self.passed_s)

    def elapsed_time(self, other: Moment) -> float:
        """As torch's: refused where one of the two has not been passed yet."""
        assert self.passed_s is not None
        assert other.passed_s is not None
        assert max(self.passed_s, other.passed_s) <= self.machine.host_s
        return (other.passed_s - self.passed_s) * 1e3


def test_a_stream_watch_has_the_times_of_the_device() -> None:
    """And not when the host handed over the work, which is long before."""
    machine = Machine()
    watch = StreamWatch(3, machine.event, machine.clock)
    for i in range(3):
        watch.start(i)
        machine.work(0.5)
        watch.end(i)
    handed_s = machine.host_s
    start_s, end_s = watch.read().value

    assert handed_s == pytest.approx(100.0 + 3 * HANDING_S)
    first_s = 100.0 + HANDING_S + 0.5
    assert end_s == pytest.approx([first_s, first_s + 0.5, first_s + 1.0])
    assert start_s == pytest.approx([100.0, first_s, first_s + 0.5])
    assert machine.host_s == pytest.approx(end_s[-1])


def test_a_stream_that_waits_for_the_host_shows_the_gap() -> None:
    """Between two ops, where the schedule has one."""
    machine = Machine()
    watch = StreamWatch(2, machine.event, machine.clock)
    for i in range(2):
        watch.start(i)
        machine.work(0.5)
        watch.end(i)
        machine.host_s += 2.0
    start_s, end_s = watch.read().value

    assert start_s[1] - end_s[0] == pytest.approx(2.0 - 0.5)


def test_events_are_used_again_and_what_did_not_run_took_no_time() -> None:
    """In a step's first batches nothing is updated: what the last step left is old."""
    machine = Machine()
    watch = StreamWatch(2, machine.event, machine.clock)
    spent_s = []
    for ran in ((0, 1), (0,)):
        for i in ran:
            watch.start(i)
            machine.work(1.0 + i)
            watch.end(i)
        start_s, end_s = watch.read().value
        spent_s.append((end_s - start_s).tolist())

    assert spent_s[0] == pytest.approx([1.0 + HANDING_S, 2.0])
    assert spent_s[1] == pytest.approx([1.0 + HANDING_S, 0.0])


def test_an_end_that_is_known_later_counts() -> None:
    """A reduction's: it is noted when an op has waited for it."""
    machine = Machine()
    watch = StreamWatch(2, machine.event, machine.clock)
    watch.start(0)
    watch.start(1)
    machine.work(1.0)
    watch.end(1)
    machine.work(3.0)
    watch.end(0)
    start_s, end_s = watch.read().value

    assert (end_s - start_s).tolist() == pytest.approx(
        [4.0 + HANDING_S, 1.0 + HANDING_S]
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_watch_has_the_times_of_a_gpu() -> None:
    """A long product takes longer on the stream than the host needs to hand it over."""
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    watch = make_stopwatch(2, device)
    torch.cuda.synchronize()
    before_s = time.perf_counter()
    for i in range(2):
        watch.start(i)
        for _ in range(20):
            torch.mm(a, a)
        watch.end(i)
    handed_s = time.perf_counter() - before_s
    start_s, end_s = watch.read().value

    assert isinstance(watch, StreamWatch)
    assert (end_s - start_s).min() > handed_s / 2
    assert before_s - 1e-3 <= start_s[0] <= end_s[0] <= start_s[1]
    assert end_s[1] <= time.perf_counter()
