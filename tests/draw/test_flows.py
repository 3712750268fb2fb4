"""Messages, matched with the op that made them and the op that waited for them."""

from __future__ import annotations

import pytest

from hocket.core.dataflow import makes, needs
from hocket.draw.flows import flows
from tests.draw.timelines import simulated, teacher_and_student


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_chain_has_one_message_per_border_microbatch_and_direction(name: str) -> None:
    """`2 (p - 1) m`, and each is made before it leaves, and read after it came."""
    timeline = simulated(name, 4, 8, message_s=0.1)
    found = list(flows(timeline))

    assert len(found) == 2 * 3 * 8
    for flow in found:
        (from_lane, made), (to_lane, read) = flow.maker, flow.reader
        ops = (
            timeline.schedule.lanes[from_lane].ops,
            timeline.schedule.lanes[to_lane].ops,
        )
        program = timeline.schedule.program
        values = set(makes(ops[0][made], program)) & set(needs(ops[1][read], program))
        assert len(values) == 1
        start_s = timeline.traffic.start_s[flow.transfer]
        end_s = timeline.traffic.end_s[flow.transfer]
        assert timeline.end_s[from_lane][made] <= start_s < end_s
        assert end_s <= timeline.start_s[to_lane][read]


def test_reductions_are_no_messages() -> None:
    """Reductions end on the device where they began, and are no flows."""
    timeline = simulated("gpipe", 1, 4, num_replicas=2)

    assert timeline.traffic.lane.size > 0
    assert list(flows(timeline)) == []


def test_a_message_that_several_ops_read_is_a_flow_to_each() -> None:
    """The student's stage reads its other stage's output in F; the loss in L."""
    timeline = teacher_and_student()
    lanes = timeline.schedule.lanes
    readers = {
        str(lanes[flow.reader[0]].ops[flow.reader[1]]) for flow in flows(timeline)
    }

    assert readers == {"2F0", "2F1", "1B0", "1B1"}
