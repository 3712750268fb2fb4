"""Schedules print and parse, and files that cannot be read say where and why."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ParseError
from tests.strategies import orders

HEADER = """
net teacher microbatches=1
net student microbatches=1 loss=batch
stage 0 net=teacher device=0 trainable=no follows=1 delay=1
stage 1 net=student device=0
flow 0>1
"""
LANE = "d0  0F0 1F0 1L 1B0 1U 0U"


@given(schedule=orders())
def test_prints_and_parses(schedule: Schedule) -> None:
    """Any order of any program: delays, replicas, teachers, losses over the batch."""
    assert Schedule.parse(str(schedule)) == schedule


@given(schedule=orders())
def test_says_no_more_than_it_must(schedule: Schedule) -> None:
    """The text has a header only if the program does not follow from the lanes."""
    lines = str(schedule).splitlines()
    bare = "\n".join(lines[-len(schedule.lanes) :])
    try:
        follows = Schedule.parse(bare) == schedule
    except ParseError:
        follows = False
    assert follows == (len(lines) == len(schedule.lanes))


@given(schedule=orders(), data=st.data())
def test_every_error_names_a_line(schedule: Schedule, data: st.DataObject) -> None:
    """Of any text that is nearly a schedule's."""
    words = re.split(r"(\s+)", str(schedule))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.lists(
                st.sampled_from([*WORDS, *words]) | st.text(max_size=3), max_size=2
            )
        )
    try:
        Schedule.parse("".join(words), path="order.txt")
    except ParseError as error:
        message = str(error)
    else:
        message = "order.txt, line 1"
    assert re.match(r"order.txt, line \d+", message)


WORDS = [
    "\n",
    " ",
    "|:",
    ":|",
    "repeats 2\n",
    "flow 0>9\n",
    "copies 0 1\n",
    "d7  0F0\n",
]


def test_reads_comments_and_blank_lines() -> None:
    """A file may explain itself."""
    text = "# one step\n\n  d0  0F0 0B0 0U   # of one microbatch\n"
    assert Schedule.parse(text) == Schedule.parse("d0 0F0 0B0 0U")


def test_reads_a_whole_program() -> None:
    """Every setting of the header arrives."""
    schedule = Schedule.parse(f"steps 1\nreplicas 1\n{HEADER}\n{LANE}")
    program = schedule.program
    assert [net.name for net in program.nets] == ["teacher", "student"]
    assert program.nets[1].batch_loss
    assert program.stages[0].follows == (1,)
    assert program.stages[0].delay == 1
    assert not program.stages[0].trainable
    assert program.flows == ((0, 1),)


def test_reads_a_flow_of_the_whole_batch() -> None:
    """The student's loss per microbatch is over all of the teacher's outputs."""
    header = HEADER.replace(" loss=batch", "") + "steps 1\nreplicas 1"
    for reads, expected in (("batch", {(0, 1)}), ("microbatch", set())):
        text = f"{header.replace('0>1', f'0>1 reads={reads}')}\nd0 0F0 1F0 1B0 1U 0U"
        assert Schedule.parse(text).program.whole_batch_flows == expected


def test_reads_a_body_that_stands_once() -> None:
    """`repeats` is not needed for one repetition."""
    schedule = Schedule.parse("d0  0F0 |: 0B0 0U 0F0@1 :| 0B0@1 0U@1")
    assert schedule.body == ((1, 4),)
    assert schedule.num_repeats == 1
    assert Schedule.parse(str(schedule)) == schedule


def test_lanes_are_aligned() -> None:
    """The picture is read in columns."""
    picture = str(Schedule.parse("d0 0F0 0I0 0U\nd0.1 0W0"))
    assert picture == "d0    0F0 0I0 0U\nd0.1  0W0"


# What is wrong with the second line of a text.
LINES = {
    "x0 0F0": "expected a lane (d0 0F0 0B0 ...) or a line that begins with steps",
    "d0 0F0 0Q0": "'0Q0' is not an op",
    "d0 0F0 0F": "F needs a microbatch number",
    "d0 |: 0F0": "lane d0 needs one |: and one :| around its body",
    "d0 0F0 |: 0B0 :| |: 0U :|": "lane d0 needs one |: and one :|",
    "steps many": "expected a whole number from 0 on, got 'many'",
    "steps -1": "expected a whole number from 0 on, got '-1'",
    "replicas": "got 'replicas'",
    "net model": "expected microbatches=... in this line",
    "net model microbatches=2 lose=batch": "unknown setting 'lose'; known: loss, m",
    "net model microbatches=2 loss=all": "microbatch or batch or replicas, got 'all'",
    "net model microbatches": "expected a setting like device=0, got 'microbat",
    "stage 1 net=model device=0": "expected stage 0, got stage 1",
    "stage 0 net=model": "expected device=... in this line",
    "stage 0 net=model device=0 trainable=maybe": "expected yes or no, got 'maybe'",
    "stage 0 net=model device=x": "expected a whole number from 0 on, got 'x'",
    "stage 0 net=model device=0 follows=a": "expected a whole number from 0 on",
    "flow 0-1": "expected a flow like 0>1, got '0-1'",
    "flow 0>1 reads=all": "expected microbatch or batch, got 'all'",
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((f"# a schedule\n{line}", reason) for line, reason in LINES.items()),
        ("", "no lanes; expected lines like"),
        ("# nothing", "no lanes; expected lines like"),
        ("d0 0F0\nd0 0B0", "line 2: a second lane d0"),
        ("d0 0F0\nd1 0B0", "stage 0 runs on device 0 and, as 0B0, on device 1"),
        (
            "steps 2\nd0 0F0 0B0 0U",
            "a line that begins with steps, but none with stage",
        ),
        ("flow 0>1\nd0 0F0", "a line that begins with flow, but none with stage"),
        ("repeats 2\nd0 0F0", "repeats, but no lane marks its body"),
        ("d0 |: 0F0 :|\nd1 1F0", "a body needs one range per lane"),
        ("d0 0F0 :| 0B0 |:", "line 1: lane d0 needs one |: and one :|"),
        ("repeats 2\nd0 |: 0F0 0B0 0U :|", "is not 2 equal repetitions"),
        (f"{HEADER}flow 1>0\n{LANE}", "flow 1 -> 0 must go from a lower"),
        (f"steps 0\n{HEADER}\n{LANE}", "num_steps is 0, and must be at least 1"),
        ("d999999999  0F0", "no stage is on device 0, but one on device 999999999"),
    ],
)
def test_names_what_is_wrong(text: str, reason: str) -> None:
    """The path, a line if there is one, and what was expected there."""
    with pytest.raises(ParseError, match=r"^order\.txt") as caught:
        Schedule.parse(text, path="order.txt")
    assert reason in str(caught.value)
    if text.startswith("# a schedule"):
        assert str(caught.value).startswith("order.txt, line 2: ")


def test_a_program_is_more_than_its_lanes_tell() -> None:
    """Three replicas print as such; two are what R alone would be read as."""
    program = Program.chain([0], 1, num_replicas=3)
    two = Schedule.parse("d0  0F0 0B0 0R 0U")
    three = Schedule(program, two.lanes)
    assert two.program.num_pipelines == 2
    assert str(three).startswith("steps 1\nreplicas 3\n")
    assert Schedule.parse(str(three)) == three
