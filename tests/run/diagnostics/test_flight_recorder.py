"""The ring of last ops: what was written is found by any process, dead or alive."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hocket.run.diagnostics.flight_recorder import (
    NO_RANK,
    NUM_SLOTS,
    FlightRecorder,
    OpState,
    RecordedOp,
    read_flight_recorder,
)
from tests.run.support.forked_python import start
from tests.run.support.processes import START_S

texts = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=12)
begins = st.tuples(texts, st.integers(0, 10**9))
waits = st.tuples(texts, st.booleans())
one_op = st.tuples(begins, st.lists(waits, max_size=2), st.booleans())


def seen(entry: RecordedOp) -> tuple[int, str, OpState, str, int]:
    """An entry without its times."""
    return entry.step, entry.op, entry.state, entry.waits_for, entry.from_rank


@given(ops=st.lists(one_op, max_size=2 * NUM_SLOTS + 3))
def test_holds_the_newest_ops(
    ops: list[tuple[tuple[str, int], list[tuple[str, bool]], bool]],
) -> None:
    """Up to 128 of them, oldest first, each as far as it came."""
    recorder = FlightRecorder()
    expected = []
    for (op, step), what, ends in ops:
        recorder.begin(op, step)
        state = OpState.BEGUN
        for text, comes in what:
            recorder.wait(text, step % 7)
            state = OpState.WAITING
            if comes:
                recorder.resume()
                state = OpState.BEGUN
        if ends:
            recorder.end()
            state = OpState.ENDED
        waited = (what[-1][0], step % 7) if what else ("", NO_RANK)
        expected.append((step, op, state, *waited))

    assert [seen(entry) for entry in recorder.entries()] == expected[-NUM_SLOTS:]


def test_ops_that_overlap_end_in_their_slots() -> None:
    """Of two lanes' ops, the one that failed stays begun, also if it is the older."""
    recorder = FlightRecorder()
    slots = [recorder.begin(op, 0) for op in ("0F0", "0W0")]
    recorder.end(slots[1])
    assert [entry.state for entry in recorder.entries()] == [
        OpState.BEGUN,
        OpState.ENDED,
    ]


def test_times_are_those_of_the_events() -> None:
    """On the monotonic clock of the host, in order."""
    before_s = time.monotonic()
    recorder = FlightRecorder()
    recorder.begin("0F0", 0)
    recorder.end()
    [entry] = recorder.entries()
    assert before_s <= entry.begun_s <= entry.changed_s <= time.monotonic()


def test_long_texts_are_cut_not_refused() -> None:
    """A report with half a name is better than a failure in the reporter."""
    recorder = FlightRecorder()
    recorder.begin("é" * 40, 0)
    recorder.wait("x" * 100, 3)
    [entry] = recorder.entries()
    assert entry.op.startswith("é" * 13)
    assert (entry.waits_for, entry.from_rank) == ("x" * 24, 3)


def test_outlives_its_writer(tmp_path: Path) -> None:
    """What a process did before SIGKILL is in the file, with nothing flushed."""
    path = tmp_path / "ring"
    program = (
        "import os, pathlib, signal, sys\n"
        "from hocket.run.diagnostics.flight_recorder import FlightRecorder\n"
        "ring = FlightRecorder.create(pathlib.Path(sys.argv[1]), os.getpid())\n"
        "ring.begin('1B3', 12)\n"
        "ring.wait('y of stage 0', 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start(["-c", program, path], tmp_path)
    assert process.wait(START_S) == -signal.SIGKILL
    snapshot = read_flight_recorder(path)
    assert snapshot is not None
    assert snapshot.pid == process.pid
    assert [seen(entry) for entry in snapshot.entries] == [
        (12, "1B3", OpState.WAITING, "y of stage 0", 0)
    ]


def test_is_emptied_when_made_again(tmp_path: Path) -> None:
    """A second run in the same place starts with nothing."""
    FlightRecorder.create(tmp_path / "ring", 1).begin("0F0", 0)
    FlightRecorder.create(tmp_path / "ring", 2)
    snapshot = read_flight_recorder(tmp_path / "ring")
    assert snapshot is not None
    assert (snapshot.pid, snapshot.entries) == (2, ())


def test_what_is_no_ring_is_not_read(tmp_path: Path) -> None:
    """Neither a missing file, nor a short one, nor another of the same size."""
    path = tmp_path / "ring"
    assert read_flight_recorder(path) is None
    path.write_bytes(b"hkring01")
    assert read_flight_recorder(path) is None
    FlightRecorder.create(path, 1)
    path.write_bytes(bytes(path.stat().st_size))
    assert read_flight_recorder(path) is None
