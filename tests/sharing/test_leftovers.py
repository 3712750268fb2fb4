"""What a call of `share` leaves behind: in threads that go on, and in later calls."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch

import hocket
from hocket.errors import ConfigError, DataError, RunError
from tests.sharing.test_isolation import plain

TIMEOUT_S: Final = 20.0


def share(*jobs: hocket.Job, mode: str = "turns") -> hocket.ShareReport:
    """Share the CPU."""
    return hocket.share(list(jobs), mode=mode, device="cpu")


def test_a_second_call_at_the_same_time_is_refused() -> None:
    """Past bug: each saw the other's generators as its own, and one waited for ever.

    Both have the process's settings and random numbers. A later call is none.
    """
    second: list[BaseException] = []

    def call_again(i: int) -> None:
        with pytest.raises(ConfigError, match=r"another hocket\.share") as found:
            share(hocket.Job("b", plain()))
        second.append(found.value)

    share(hocket.Job("a", plain(call_again, num=1))).check()
    assert len(second) == 1
    share(hocket.Job("b", plain(num=1))).check()


@contextmanager
def blocked_draw() -> Iterator[tuple[Callable[[], Any], threading.Event]]:
    """A random operator that lasts until an event is set, or for `TIMEOUT_S`."""
    library = torch.library.Library("hocket_test", "FRAGMENT")
    goes_on = threading.Event()

    def slow_draw(x: torch.Tensor) -> torch.Tensor:
        goes_on.wait(TIMEOUT_S)
        return x + torch.rand(())

    tags = (torch.Tag.nondeterministic_seeded,)
    library.define("slow_draw(Tensor x) -> Tensor", tags=tags)
    library.impl("slow_draw", slow_draw, "CPU")
    try:
        yield lambda: torch.ops.hocket_test.slow_draw(torch.ones(())), goes_on
    finally:
        goes_on.set()
        library._destroy()


def test_a_job_that_hangs_in_a_draw_hangs_alone() -> None:
    """Past bug: others waited for its generators, and counted as hung as well.

    Once the draw ends, long after `share`, the caller's random state is not changed.
    """
    with blocked_draw() as (draw, goes_on):

        def hang(i: int) -> None:
            if i == 0:
                torch.rand(())
            elif i == 20:
                draw()

        jobs = [
            hocket.Job("a", plain(hang, num=30), timeout_s=1.0),
            hocket.Job("b", plain(num=200, sleep_s=0.005), timeout_s=1.0),
        ]
        threads = set(threading.enumerate())
        report = share(*jobs, mode="free")
        assert report["a"].is_hung
        assert len(report["b"].losses) == 200
        assert report["b"].error is None
        torch.manual_seed(5)
        torch.rand(3)
        state = torch.get_rng_state()
        goes_on.set()
        for thread in set(threading.enumerate()) - threads:
            thread.join(TIMEOUT_S)
        assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupt_ends_the_jobs() -> None:
    """Past bug: they went on to train beside the caller, and put its settings back."""

    def interrupt(i: int) -> None:
        if i % 100 == 3:  # again, for Python ignores one that falls into a destructor
            _thread.interrupt_main()
        time.sleep(0.01)

    # Another test of this process may have left one that ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            share(hocket.Job("stopped", plain(interrupt, num=500)))
    finally:
        signal.signal(signal.SIGINT, before)
    names = [thread.name for thread in threading.enumerate()]
    assert "hocket job stopped" not in names  # of other tests, some hang on


def test_a_draw_after_the_jobs_end_is_reported() -> None:
    """Past bug: the thread ended without a word, and the report was good."""

    def start_late(i: int) -> None:
        if i == 5:
            late.start()

    def draw() -> None:
        time.sleep(0.3)
        torch.rand(())

    late = threading.Thread(target=draw)
    report = share(
        hocket.Job("a", plain(start_late, num=6)),
        hocket.Job("b", plain(num=80, sleep_s=0.01)),
    )
    late.join(TIMEOUT_S)
    assert isinstance(report["a"].error, RunError)
    assert report["b"].error is None


def test_an_error_of_a_thread_is_its_own() -> None:
    """Past bug: any of hocket's errors in a thread of a job ended the job."""
    seen: list[Any] = []

    def fail() -> None:
        raise DataError("no more samples")

    def start(i: int) -> None:
        if i == 2:
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join(TIMEOUT_S)

    hook, threading.excepthook = threading.excepthook, seen.append
    try:
        share(hocket.Job("a", plain(start, num=6))).check()
    finally:
        threading.excepthook = hook
    assert [x.exc_type for x in seen] == [DataError]


class Kept(threading.Thread):
    """A thread that keeps what it has made."""

    def run(self) -> None:
        """Make it."""
        self.made = torch.ones(4)


def test_a_thread_is_freed_when_its_work_is_done() -> None:
    """Past bug: it held itself, and its tensors, until the garbage was collected."""
    refs: list[weakref.ref[Any]] = []

    def start(i: int) -> None:
        thread = Kept()
        thread.start()
        thread.join(TIMEOUT_S)
        refs.append(weakref.ref(thread))

    gc.disable()
    try:
        share(hocket.Job("a", plain(start, num=6))).check()
        assert not [ref for ref in refs if ref() is not None]
    finally:
        gc.enable()
