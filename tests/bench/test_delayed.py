"""Messages with a delay come late, and no other message waits for them."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Final

import pytest

from bench.emulated.delayed import DelayedReceiver, DelayedSender
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

DELAY_S: Final = 0.4
NUM_MESSAGES: Final = 4


def exchange(worker: Worker) -> tuple[list[float], bool]:
    """Rank 0 sends all at once; when it did so, and when rank 1 had which."""
    sender = DelayedSender(worker.ends[0])
    receiver = DelayedReceiver(worker.ends[1], DELAY_S)
    tags = tags_of(SCHEMA, NUM_MESSAGES)
    times_s, right = [], True
    if worker.rank == 1:
        receiver.expect(tags, SCHEMA)
    worker.meet("begin")
    for number, tag in enumerate(tags):
        if worker.rank == 0:
            times_s.append(perf_counter())
            sender.send(tag, content(0, number), SCHEMA)
        else:
            right &= same(receiver.receive(tag), content(0, number))
            times_s.append(perf_counter())
            receiver.release(tag)
    sender.flush(10.0)
    worker.meet("end")
    return times_s, right


@pytest.mark.timeout(110)
@each_kind
def test_all_messages_are_late_and_none_waits_for_another(
    kind: str, tmp_path: Path
) -> None:
    """They hold what was sent, the sender goes on, and delays overlap."""
    (sent_s, _), (read_s, right) = run_both(tmp_path, Settings(kind), exchange)
    assert right
    late_s = [read - sent for sent, read in zip(sent_s, read_s, strict=True)]
    assert min(late_s) >= DELAY_S
    assert sent_s[-1] - sent_s[0] < DELAY_S
    assert read_s[-1] - sent_s[0] < 2 * DELAY_S
