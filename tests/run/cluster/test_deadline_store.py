"""A store that does not answer ends in an error, whatever the network does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hocket.errors import WaitError
from hocket.run.cluster.store.deadline_store import DeadlineStore
from hocket.run.cluster.store.store_exchange import StoreExchange

SILENT_S = 0.3


class Silent(dist.Store):
    """A store that a network swallowed: no question is answered before the end."""

    def __init__(self, end: threading.Event) -> None:
        super().__init__()
        self.num_asked = 0
        self._end = end

    def set(self, key: str, value: str) -> None:
        """As into the buffer of a socket."""

    def check(self, keys: list[str]) -> bool:
        """Never."""
        self.num_asked += 1
        self._end.wait()
        return False


@pytest.fixture
def silent() -> Iterator[Silent]:
    """A store that says nothing while the test runs."""
    end = threading.Event()
    yield Silent(end)
    end.set()


def test_it_answers_like_the_store_behind_it() -> None:
    """All that hocket asks, also under a prefix; an error goes through."""
    behind = dist.HashStore()
    in_time = DeadlineStore(behind, "here:1")
    store = dist.PrefixStore("job", in_time)
    store.set("a", "word")
    assert store.get("a") == b"word"
    assert behind.get("job/a") == b"word"
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert (store.check(["a"]), store.check(["b"])) == (True, False)
    exchange = StoreExchange(store, 0, 1, 1.0)
    assert exchange.gather("all", {"a": 1}) == [{"a": 1}]


def test_silence_is_an_error_with_the_address(silent: Silent) -> None:
    """In time; and nothing is asked any more, so that an end takes no longer."""
    store = DeadlineStore(silent, "node-a:29500", SILENT_S)
    begin_s = time.monotonic()
    with pytest.raises(WaitError, match=r"store at node-a:29500 did not .* for 0\.3 s"):
        store.check(["a"])
    assert SILENT_S <= time.monotonic() - begin_s < SILENT_S + 20.0
    with pytest.raises(WaitError, match="node-a:29500"):
        store.check(["a"])
    assert silent.num_asked == 1


def test_an_exchange_ends_with_its_store(silent: Silent) -> None:
    """Long before its own timeout, which counts what the others take."""
    store = DeadlineStore(silent, "node-a:29500", SILENT_S)
    with pytest.raises(WaitError, match="did not answer"):
        StoreExchange(dist.PrefixStore("job", store), 0, 2, 60.0).barrier("end")


def test_no_worker_waits_for_one_that_has_left() -> None:
    """A worker that polls for its key raises, under any prefix; other keys answer."""
    behind = dist.HashStore()
    own, other = (DeadlineStore(behind, "node-a:29500") for _ in range(2))
    waiting = dist.PrefixStore("pipeline 0", other)
    waiting.set("here", "x")
    exchange, errors = StoreExchange(waiting, 0, 2, timeout_s=1e6), []

    def wait() -> None:
        try:
            exchange.gather("plan", None)
        except WaitError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not behind.check(["pipeline 0/exchange/0/0"]):
        time.sleep(0.001)
    own.leave("rank 1 was stopped at step 12 in 0B3")
    thread.join(60.0)
    assert errors == ["left alone: rank 1 was stopped at step 12 in 0B3"]
    assert waiting.check(["here"])
    assert waiting.get("here") == b"x"


def test_leaving_a_lost_store_has_no_effect(silent: Silent) -> None:
    """The process ends all the same."""
    store = DeadlineStore(silent, "node-a:29500", SILENT_S)
    with pytest.raises(WaitError, match="did not answer"):
        store.check(["a"])
    store.leave("rank 0 was stopped")
    assert silent.num_asked == 1


def test_signals_get_through(silent: Silent) -> None:
    """Ctrl-C ends a wait for a store; torch's own would sit it out."""
    # A shell that started the tests in the background may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    store = DeadlineStore(silent, "node-a:29500", 30.0)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
    begin_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.check(["a"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin_s < 10.0
